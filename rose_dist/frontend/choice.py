"""One choice of an answer: ids become deltas, cut at stop strings, counted, with their log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from rose_dist.engine.protocol import Output, TokenLogprobs
from rose_dist.frontend.errors import EngineError, OverloadedError
from rose_dist.frontend.formats.base import ChatParser, Delta, TextDelta, ToolCallDelta
from rose_dist.frontend.stop import StopMatcher


class Choice:
    def __init__(
        self,
        index: int,
        parser: ChatParser,
        *,
        stops: list[str],
        hidden_stop_ids: frozenset[int] = frozenset(),
        one_call: bool = False,
    ) -> None:
        """
        Args:
            stops: stop strings; they are looked for in content only.
            hidden_stop_ids: the request's own stop ids; one that ends the output is not shown.
            one_call: drop calls after the first.
        """
        self.index = index
        self.finish_reason: str | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self._parser = parser
        self._matcher = StopMatcher(stops) if stops else None
        self._hidden_stop_ids = hidden_stop_ids
        self._one_call = one_call
        self._called = False
        self._content_in = 0
        self._content_out = 0
        self._held_logprobs: list[tuple[int, int, TokenLogprobs]] = []

    @property
    def matched_stop(self) -> bool:
        """A stop string ended the output, which the engine doesn't know."""
        return self._matcher is not None and self._matcher.matched is not None

    def feed(self, output: Output) -> list[Delta]:
        """The deltas of one step's output. Sets `finish_reason` when the choice has ended.

        Raises:
            OverloadedError: the engine's queue was full.
            EngineError: the engine gave up on the request.
        """
        if output.cached_tokens:
            self.cached_tokens = output.cached_tokens
        deltas: list[Delta] = []
        logprobs = output.logprobs
        parser = self._parser
        matcher = self._matcher
        hidden = self._hidden_stop_ids
        for position, token_id in enumerate(output.token_ids):
            self.completion_tokens += 1
            if hidden and token_id in hidden:
                continue
            start = self._content_in
            if new := parser.feed(token_id):
                deltas += self._shown(new)
            if parser.section == "reasoning":
                self.reasoning_tokens += 1
            elif logprobs is not None and parser.section == "content":
                self._held_logprobs.append((start, token_id, logprobs[position]))
            if matcher is not None and matcher.matched is not None:
                self.finish_reason = "stop"
                return deltas
        if output.finish is not None:
            deltas += self._finish(output)
        return deltas

    def take_logprobs(self) -> list[tuple[int, TokenLogprobs]]:
        """(token id, log probabilities) of the content shown since the last call."""
        held = self._held_logprobs
        if self._matcher is None or (self.finish_reason is not None and not self.matched_stop):
            self._held_logprobs = []
            return [(token_id, logprobs) for _, token_id, logprobs in held]
        self._held_logprobs = [entry for entry in held if entry[0] >= self._content_out]
        return [(token_id, logprobs) for start, token_id, logprobs in held if start < self._content_out]

    def _shown(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """`deltas` without what a stop string or `one_call` cuts off."""
        if self._matcher is None and len(deltas) == 1 and isinstance(deltas[0], TextDelta):
            return deltas
        shown: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                self._called = True
                if delta.index == 0 or not self._one_call:
                    shown.append(delta)
            elif self._matcher is not None and delta.section == "content":
                self._content_in += len(delta.text)
                text = self._matcher.feed(delta.text)
                self._content_out += len(text)
                if text:
                    shown.append(TextDelta("content", text))
            else:
                shown.append(delta)
        return shown

    def _finish(self, output: Output) -> list[Delta]:
        if output.finish == "overloaded":
            raise OverloadedError
        if output.finish in ("error", "cancelled"):
            raise EngineError(output.error or "The engine cancelled the request")
        deltas = list(self._shown(self._parser.finish()))
        if self.matched_stop:
            self.finish_reason = "stop"
            return deltas
        if self._matcher is not None and (held := self._matcher.finish()):
            deltas.append(TextDelta("content", held))
        self.finish_reason = "tool_calls" if self._called and output.finish == "stop" else output.finish
        return deltas


def merged(deltas: Sequence[Delta]) -> Sequence[Delta]:
    """The same deltas with neighbours of one section or call joined, so that a late client gets one chunk."""
    if len(deltas) < 2:
        return deltas
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta) and delta.section == last.section:
            joined[-1] = TextDelta(last.section, last.text + delta.text)
        elif (
            isinstance(delta, ToolCallDelta)
            and isinstance(last, ToolCallDelta)
            and delta.index == last.index
            and delta.name is None
            and last.name is None
        ):
            joined[-1] = ToolCallDelta(last.index, last.arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined
