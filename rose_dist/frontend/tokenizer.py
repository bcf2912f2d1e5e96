"""Text to token ids and back, over a checkpoint's `tokenizer.json`.

Two tokenizers are built from the file: one as it stands, for text that the chat template wrote, and one that knows no
added tokens, for text that a client wrote. So `<|im_end|>` in a user's message is eight ordinary tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from rose_dist.errors import RoseError
from rose_dist.vocabulary import byte_of_character

_LONG_TEXT = 16_384
"""Characters."""

_LOSSY_UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenizerError(RoseError, ValueError):
    """The checkpoint's tokenizer files are missing or of a kind that this server can't stream."""


class Detokenizer:
    """Text of a growing sequence of ids. O(1) a token; bytes of an incomplete character are held back."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decode = _LOSSY_UTF8("replace").decode

    def feed(self, token_id: int) -> str:
        """The text that became whole with this token; unknown ids yield nothing."""
        try:
            return self._decode(self._token_bytes[token_id])
        except IndexError:
            return ""

    def finish(self) -> str:
        """What is left: U+FFFD for bytes that never became a character."""
        return self._decode(b"", True)


class TextCodec(ABC):
    """Text and ids of one vocabulary, as the API needs them."""

    token_bytes: list[bytes]
    """Bytes of every id; ids that the vocabulary lacks are empty."""
    eos_ids: frozenset[int]
    """Ids that end a text or a turn."""

    def __init__(self, token_bytes: list[bytes], special_ids: Iterable[int]) -> None:
        self.token_bytes = token_bytes
        self._visible_bytes = list(token_bytes)
        for special in special_ids:
            self._visible_bytes[special] = b""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text` as ordinary text; control tokens written out in it stay text.

        With `add_special_tokens`, what the tokenizer itself puts around a text (often a first token) is added.
        """

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of ids, with special tokens only if `special`."""
        table = self.token_bytes if special else self._visible_bytes
        return b"".join(table[i] for i in ids if i < len(table)).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """One token's text as log probabilities show it; bytes that are no whole character become U+FFFD."""
        return self.token_bytes[token_id].decode("utf-8", "replace")

    def detokenizer(self) -> Detokenizer:
        """Special tokens have no text in it."""
        return Detokenizer(self._visible_bytes)


class Tokenizer(TextCodec):
    """The codec of a checkpoint's `tokenizer.json`."""

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: holds `tokenizer.json`; `tokenizer_config.json`, `generation_config.json`, `config.json` and
                `chat_template.jinja` are read where present.

        Raises:
            TokenizerError: `tokenizer.json` is missing, broken or neither byte-level nor with byte fallback.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: a checkpoint needs its tokenizer.json beside the weights")
        try:
            self._full = tokenizers.Tokenizer.from_file(str(path))
            self._plain = _plain(self._full)
        except Exception as error:
            raise TokenizerError(f"{path} can't be loaded: {error}") from error
        self.directory = directory
        self._settings = _read_json(directory / "tokenizer_config.json")
        added = self._full.get_added_tokens_decoder()
        self.added: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        """Text of every added token, special or not, and its id."""
        self.control = {token.content: token_id for token_id, token in added.items() if _is_control(token)}
        """Added tokens that only a template may write."""
        self._true_ids = {
            plain: self.added[token.content] for plain, token in self._plain.get_added_tokens_decoder().items()
        }
        special_ids = [token_id for token_id, token in added.items() if token.special]
        super().__init__(_token_bytes(self._full, path), special_ids)
        self.eos_ids = self._named_eos_ids()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids = _encode(self._plain, text, add_special_tokens=add_special_tokens)
        return [self._true_ids.get(i, i) for i in ids] if self._true_ids else ids

    def encode_template(self, text: str) -> list[int]:
        """Ids of text that a template wrote: every added token in it becomes its id."""
        return _encode(self._full, text, add_special_tokens=False)

    def visible_with(self, shown: Iterable[str]) -> list[bytes]:
        """The table for a `Detokenizer` that also shows these added tokens, special or not."""
        table = list(self._visible_bytes)
        for token in shown:
            if token in self.added:
                table[self.added[token]] = token.encode()
        return table

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches a control token written out; longer ones first."""
        return re.compile("|".join(map(re.escape, sorted(self.control, key=len, reverse=True))) or "(?!)")

    def _named_eos_ids(self) -> frozenset[int]:
        """Every id that the checkpoint's files name as an end of a turn."""
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self.directory / name).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        if (token := self.special_token("eos_token")) in self.added:
            ids.add(self.added[token])
        return frozenset(ids)

    def special_token(self, name: str) -> str:
        """The text of `bos_token`, `eos_token` …; empty where the checkpoint has none."""
        value = self._settings.get(name) or ""
        return str(value["content"] if isinstance(value, dict) else value)

    @cached_property
    def chat_template(self) -> str | None:
        """The checkpoint's jinja source: `chat_template.jinja`, or the field in `tokenizer_config.json`."""
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        value = self._settings.get("chat_template")
        if isinstance(value, list):
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
        return value if isinstance(value, str) else None


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """In a batch if the text is long: only that releases the interpreter lock, so that other threads go on."""
    if len(text) < _LONG_TEXT:
        encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _is_control(token: tokenizers.AddedToken) -> bool:
    """Some vocabularies list runs of spaces or newlines as added tokens; those are ordinary text."""
    return token.special or not token.content.isspace()


def _plain(full: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer for ordinary text: it has no control tokens, and its model can't produce them either."""
    control = {token.content for token in full.get_added_tokens_decoder().values() if _is_control(token)}
    description = json.loads(full.to_str())
    model = description["model"]
    if model["type"] == "BPE":  # renamed rather than removed: the ids must stay without holes
        merged = {"".join(merge) for merge in model["merges"]}
        unreachable = control - merged - {model["unk_token"]}
        model["vocab"] = {f"\0{t}" if t in unreachable else t: i for t, i in model["vocab"].items()}
    description["added_tokens"] = [entry for entry in description["added_tokens"] if entry["content"] not in control]
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _token_bytes(tokenizer: tokenizers.Tokenizer, path: Path) -> list[bytes]:
    decoder = repr(tokenizer.decoder)
    if "ByteLevel" in decoder:
        convert = _byte_level
    elif "ByteFallback" in decoder:
        convert = _byte_fallback
    else:
        raise TokenizerError(f"{path}: the decoder is neither ByteLevel nor ByteFallback, so its tokens have no bytes")
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = convert(token)
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        table[token_id] = added.content.encode()
    return table


_BYTE_OF = byte_of_character()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
