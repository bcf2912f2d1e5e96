"""Reads output that marks its parts with tags: `<think>…</think>`, and those of its form of tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rose_dist.frontend.formats.base import Delta, Section, TextDelta
from rose_dist.frontend.formats.call_form import CallForm
from rose_dist.frontend.formats.call_text import CallText
from rose_dist.frontend.stop import StopMatcher
from rose_dist.frontend.tokenizer import Detokenizer


class ReasoningTags(NamedTuple):
    """Ids of `<think>` and `</think>`; None where the vocabulary has no such token, and then there is no reasoning."""

    opening: int | None
    closing: int | None


class TaggedParser:
    """A `ChatParser` for jinja templates.

    Reasoning tags are tokens. Tags of calls are found in the text, since not every vocabulary has them as tokens, and
    only where tools are on offer.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        tags: ReasoningTags,
        form: CallForm,
        *,
        stop_ids: frozenset[int],
        in_reasoning: bool,
        tools: frozenset[str],
    ) -> None:
        """
        Args:
            detokenizer: shows the tags of calls.
            in_reasoning: the prompt has opened the reasoning.
            tools: names on offer.
        """
        self._detokenizer = detokenizer
        self._tags = tags
        self._form = form
        self._stop_ids = stop_ids
        self._tools = tools
        self._calls = 0
        self._call: CallText | None = None
        self._tag = StopMatcher([form.opening]) if tools else None
        """Looks for the next tag: an opening one in content, a closing one in a call."""
        self._text_section: Section = "reasoning" if in_reasoning else "content"
        self._skip_newlines = in_reasoning
        self.section: Section = self._text_section

    def feed(self, token_id: int) -> Sequence[Delta]:
        if token_id in self._stop_ids:
            self.section = "control"
            return self._take(self._detokenizer.finish())
        if token_id == self._tags.opening:
            return self._enter("reasoning")
        if token_id == self._tags.closing:
            return self._enter("content")
        text = self._detokenizer.feed(token_id)
        deltas = self._take(text) if text else ()
        self.section = self._text_section
        return deltas

    def finish(self) -> Sequence[Delta]:
        deltas = [*self._take(self._detokenizer.finish())]
        if self._tag is None:
            return deltas
        held = self._tag.finish()
        if self._call is not None:
            if not self._call.is_complete:  # else it is the beginning of the closing tag
                deltas += self._call.feed(held)
            deltas += self._call.finish(closed=False)
        elif held:
            deltas.append(TextDelta("content", held))
        return deltas

    def _enter(self, section: Section) -> Sequence[Delta]:
        deltas = self._take(self._detokenizer.finish())
        self.section = "control"
        if self._call is None:
            self._text_section = section
            self._skip_newlines = True
        return deltas

    def _take(self, text: str) -> Sequence[Delta]:
        if self._skip_newlines:  # templates put newlines around the tags
            text = text.lstrip("\n")
            self._skip_newlines = not text
        if not text:
            return ()
        if self._text_section == "reasoning":
            return (TextDelta("reasoning", text),)
        if self._tag is None:
            return (TextDelta("content", text),)
        return self._content_and_calls(self._tag, text)

    def _content_and_calls(self, tag: StopMatcher, text: str) -> Sequence[Delta]:
        shown = tag.feed(text)
        deltas: list[Delta] = []
        if self._call is not None:
            deltas += self._call.feed(shown)
        elif shown:
            deltas.append(TextDelta("content", shown))
        if tag.matched is None:
            return deltas
        if self._call is None:
            self._call = CallText(self._calls, self._tools, self._form)
            self._text_section = "tool_call"
        else:
            deltas += self._call.finish(closed=True)
            self._calls += self._call.is_call
            self._call = None
            self._text_section = "content"
            self._skip_newlines = True
        self._tag = StopMatcher([self._form.closing if self._call else self._form.opening])
        return [*deltas, *self._take(tag.rest)]
