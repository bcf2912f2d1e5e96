"""The chat format of gpt-oss."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

from rose_dist.frontend.formats.base import Conversation
from rose_dist.frontend.formats.harmony_grammar import harmony_grammar
from rose_dist.frontend.formats.harmony_header import OfferedTools
from rose_dist.frontend.formats.harmony_parser import HarmonyParser
from rose_dist.frontend.formats.harmony_render import render
from rose_dist.frontend.formats.harmony_vocabulary import CALL, RETURN, HarmonyVocabulary


class HarmonyFormat:
    """Implements `ChatFormat`. Loading the vocabulary takes about 0.5 s."""

    name = "harmony"
    stop_ids = frozenset({RETURN, CALL})
    """`<|end|>` is not among them: analysis ends with it and the answer follows."""

    def __init__(self, checkpoint: Path | None = None, *, today: Callable[[], date] = date.today):
        """
        Args:
            checkpoint: where a `tokenizer.json` may serve as source of the vocabulary.
            today: the date that the system message states.

        Raises:
            VocabularyError: no source of the vocabulary was found.
        """
        self.vocabulary = HarmonyVocabulary.find(checkpoint)
        self._today = today

    def render(self, conversation: Conversation) -> list[int]:
        return render(conversation, self.vocabulary, self._today())

    def parser(self, conversation: Conversation) -> HarmonyParser:
        """Preambles count as reasoning where the content must match a format: they would break it."""
        tools = OfferedTools.of(conversation)
        return HarmonyParser(self.vocabulary, tools, show_preambles=conversation.response_format is None)

    def grammar(self, conversation: Conversation) -> str | None:
        return harmony_grammar(conversation, self.vocabulary)
