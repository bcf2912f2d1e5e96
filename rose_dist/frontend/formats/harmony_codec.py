"""Harmony's vocabulary for what the API does besides chats: completions and the text of log probabilities."""

from __future__ import annotations

from rose_dist.frontend.formats.harmony_vocabulary import (
    CALL,
    CONTROL_TEXT,
    END_OF_TEXT,
    RETURN,
    SIZE,
    HarmonyVocabulary,
)
from rose_dist.frontend.tokenizer import TextCodec


class HarmonyCodec(TextCodec):
    eos_ids = frozenset({RETURN, CALL, END_OF_TEXT})

    def __init__(self, vocabulary: HarmonyVocabulary) -> None:
        self._vocabulary = vocabulary
        control = [CONTROL_TEXT.get(i, "").encode() for i in range(len(vocabulary.token_bytes), SIZE)]
        super().__init__([*vocabulary.token_bytes, *control], range(len(vocabulary.token_bytes), SIZE))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._vocabulary.encode(text)  # no text has special tokens around it
