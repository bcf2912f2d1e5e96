"""The o200k_harmony vocabulary, found offline: plain text to ids, ids to text, and the control tokens."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding

from rose_dist.vocabulary import HARMONY_RANKS, HARMONY_SIZE, VARIABLE, find_ranks_file, load_token_bytes

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
SIZE = HARMONY_SIZE
"""Rows of the model's embedding; the ids above the ranks that `CONTROL_TEXT` leaves out are reserved."""

_PIECE = 8192
"""Characters that are encoded at once."""
_LONGEST_RUN = 1024
"""Characters with, or without, white space."""
_LONG_TEXT = 65_536
"""Characters; so long a text is encoded by a thread beside the loop."""
_BREATH_S = 1e-4
"""Long enough for another thread to take the interpreter lock, which the encoder holds while it encodes a piece."""


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
        for piece in _pieces(text):
            ids += self._ordinary(piece)
            if len(text) > _LONG_TEXT:
                time.sleep(_BREATH_S)
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
        return self.token_bytes[token_id] if 0 <= token_id < HARMONY_RANKS else b""


def _whole_texts(token_bytes: list[bytes]) -> Iterator[tuple[int, str]]:
    for token_id, text in enumerate(token_bytes):
        with suppress(UnicodeDecodeError):
            yield token_id, text.decode()


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


def _pieces(text: str) -> Iterator[str]:
    """Cut where no token can reach across, before a space that follows a word, and inside of runs that are too long.

    BPE takes time quadratic in a run of characters with, or without, white space (2.8 s for 100,000 times the letter
    a): one request could stop the server.
    """
    begin = 0
    for run in re.finditer(r"\S+|\s+", text):
        if run.start() - begin >= _PIECE and text[run.start()] == " ":
            yield text[begin : run.start()]
            begin = run.start()
        for cut in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
            yield text[begin:cut]
            begin = cut
    yield text[begin:]
