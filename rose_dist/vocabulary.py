"""What bytes each token id stands for, read from a tokenizer's file; grammars and Harmony need nothing else of it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from rose_dist.errors import RoseError


class VocabularyError(RoseError, ValueError):
    """A vocabulary that is missing or can't be read; the message says what would serve."""


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


def _tiktoken_ranks(data: bytes) -> dict[int, bytes]:
    pairs = (line.split() for line in data.splitlines())
    return {int(rank): base64.b64decode(text, validate=True) for text, rank in pairs}


def _byte_level_entries(tokenizer: dict[str, object]) -> dict[int, bytes]:
    if "ByteLevel" not in json.dumps(tokenizer["decoder"]):
        raise ValueError("its decoder is not ByteLevel")
    to_byte = _byte_of_character()
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]  # type: ignore[index]
    by_id = {token_id: bytes(map(to_byte.__getitem__, text)) for text, token_id in vocabulary.items()}
    for added in tokenizer["added_tokens"]:  # type: ignore[attr-defined]
        by_id[added["id"]] = b"" if added["special"] else added["content"].encode()
    return by_id


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet: a printable Latin-1 byte is its own character, the other 68 follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
