"""Reads output that marks its parts with tags: `<think>…</think>` and `<tool_call>…</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rose_dist.frontend.formats.base import Delta, Section, TextDelta
from rose_dist.frontend.tokenizer import Tokenizer


class TagIds(NamedTuple):
    """Ids of the tags; None where the vocabulary has no such token, and then text of that shape is just text."""

    think: int | None
    end_think: int | None
    tool_call: int | None
    end_tool_call: int | None


class TaggedParser:
    """A `ChatParser` for the template's formats."""

    def __init__(
        self, tokenizer: Tokenizer, tags: TagIds, *, stop_ids: frozenset[int], in_reasoning: bool, tools: frozenset[str]
    ) -> None:
        self._tags = tags
        self._stop_ids = stop_ids
        self._detokenizer = tokenizer.detokenizer()
        self._text_section: Section = "reasoning" if in_reasoning else "content"
        self._at_start = in_reasoning
        self.section: Section = self._text_section

    def feed(self, token_id: int) -> Sequence[Delta]:
        if token_id in self._stop_ids:
            self.section = "control"
            return self._flush()
        if token_id == self._tags.think:
            return self._enter("reasoning")
        if token_id == self._tags.end_think:
            return self._enter("content")
        self.section = self._text_section
        return self._text(self._detokenizer.feed(token_id))

    def finish(self) -> Sequence[Delta]:
        return self._flush()

    def _enter(self, section: Section) -> Sequence[Delta]:
        deltas = self._flush()
        self._text_section = section
        self._at_start = True
        self.section = "control"
        return deltas

    def _text(self, text: str) -> Sequence[Delta]:
        if self._at_start:  # templates put newlines around the tags
            text = text.lstrip("\n")
            self._at_start = not text
        if not text:
            return ()
        return (TextDelta("reasoning" if self._text_section == "reasoning" else "content", text),)

    def _flush(self) -> Sequence[Delta]:
        return self._text(self._detokenizer.finish())
