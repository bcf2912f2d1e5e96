"""Deltas of one exchange as a response: output items, and the events of a stream in OpenAI's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rose_dist.frontend.api.chat_answer import top_logprobs
from rose_dist.frontend.api.exchange import Exchange, Step
from rose_dist.frontend.api.http import encode_json
from rose_dist.frontend.api.service import Service, new_id, random_hex
from rose_dist.frontend.choice import Choice
from rose_dist.frontend.errors import ApiError
from rose_dist.frontend.formats.base import Delta, Message, TextDelta, ToolCall, ToolCallDelta
from rose_dist.frontend.schema.response_object import (
    FunctionCallItem,
    IncompleteDetails,
    ItemEvent,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    TextLogprob,
)

OnEnd = Callable[[ResponseObject, Message], None]
"""Is given the finished response and its turn as history."""


class ResponseAnswer:
    """An `Answer` with one choice."""

    def __init__(
        self, service: Service, response: ResponseObject, exchange: Exchange, *, logprobs: bool, on_end: OnEnd
    ) -> None:
        self.response = response
        self._codec = service.tokenizer
        self._exchange = exchange
        self._logprobs = logprobs
        self._on_end = on_end
        self._sequence = 0
        self._open: OutputItem | None = None
        self._pieces: list[str] = []

    def begin(self) -> list[bytes]:
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def events(self, step: Step) -> list[bytes]:
        return [_encode(event) for event in self._item_events(step)]

    def add(self, step: Step) -> None:
        for _ in self._item_events(step):
            pass

    def end(self) -> list[bytes]:
        events = [_encode(event) for event in self._close()]
        return [*events, self._whole(f"response.{self._complete()}")]

    def whole(self) -> ResponseObject:
        for _ in self._close():
            pass
        self._complete()
        return self.response

    def broken_off(self, error: ApiError) -> list[bytes]:
        self.fail(error)
        return [self._whole("response.failed")]

    def fail(self, error: ApiError) -> None:
        self.response.status = "failed"
        self.response.error = ResponseError(error.code or "server_error", error.message)

    def _complete(self) -> str:
        response = self.response
        if self._exchange.choices[0].finish_reason == "length":
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.status = "completed"
        response.usage = ResponseUsage.of(self._exchange.usage())
        self._on_end(response, _as_history(response.output))
        return response.status

    def _item_events(self, step: Step) -> Iterator[ItemEvent]:
        for choice, deltas in step:
            for delta in deltas:
                yield from self._delta_events(choice, delta)

    def _delta_events(self, choice: Choice, delta: Delta) -> Iterator[ItemEvent]:
        if isinstance(delta, ToolCallDelta):
            if delta.name is not None:
                yield from self._close()
                call_id = f"call_{random_hex(12)}"
                yield from self._begin(FunctionCallItem(id=f"fc_{random_hex(12)}", call_id=call_id, name=delta.name))
            if delta.arguments:
                self._pieces.append(delta.arguments)
                yield self._event("response.function_call_arguments.delta", delta=delta.arguments)
        elif delta.section == "content":
            if not isinstance(self._open, MessageItem):
                yield from self._close()
                yield from self._begin(MessageItem(id=f"msg_{random_hex(12)}"))
                yield self._event("response.content_part.added", content_index=0, part=OutputText())
            self._pieces.append(delta.text)
            logprobs = self._take_logprobs(choice)
            yield self._event("response.output_text.delta", content_index=0, delta=delta.text, logprobs=logprobs)
        else:
            yield from self._reasoning_events(delta)

    def _reasoning_events(self, delta: TextDelta) -> Iterator[ItemEvent]:
        if not isinstance(self._open, ReasoningItem):
            yield from self._close()
            yield from self._begin(ReasoningItem(id=f"rs_{random_hex(12)}"))
            yield self._event("response.content_part.added", content_index=0, part=ReasoningText())
        self._pieces.append(delta.text)
        yield self._event("response.reasoning_text.delta", content_index=0, delta=delta.text)

    def _begin(self, item: OutputItem) -> Iterator[ItemEvent]:
        self._open = item
        self._pieces = []
        self._item_logprobs: list[TextLogprob] = []
        self.response.output.append(item)
        yield self._event("response.output_item.added", item=item, item_id=None)

    def _close(self) -> Iterator[ItemEvent]:
        """End the open item; it is incomplete only if the output was cut short in it."""
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            yield self._event("response.function_call_arguments.done", arguments=text, name=item.name)
        elif isinstance(item, MessageItem):
            part = OutputText(text=text, logprobs=self._item_logprobs)
            item.content = [part]
            yield self._event("response.output_text.done", content_index=0, text=text, logprobs=part.logprobs)
            yield self._event("response.content_part.done", content_index=0, part=part)
        else:
            item.content = [ReasoningText(text=text)]
            yield self._event("response.reasoning_text.done", content_index=0, text=text)
            yield self._event("response.content_part.done", content_index=0, part=item.content[0])
        cut = self._exchange.ended and self._exchange.choices[0].finish_reason == "length"
        status: ItemStatus = "incomplete" if cut else "completed"
        item.status = status
        yield self._event("response.output_item.done", item=item, item_id=None)
        self._open = None

    def _event(self, kind: str, **fields: object) -> ItemEvent:
        assert self._open is not None
        fields = {"item_id": self._open.id, **fields}
        event = ItemEvent(
            type=kind,
            sequence_number=self._sequence,
            output_index=len(self.response.output) - 1,
            **fields,  # type: ignore[arg-type]
        )
        self._sequence += 1
        return event

    def _whole(self, kind: str) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._sequence, response=self.response)
        self._sequence += 1
        return _encode(event)

    def _take_logprobs(self, choice: Choice) -> list[TextLogprob]:
        if not self._logprobs:
            return []
        taken = [
            TextLogprob(
                self._codec.token_text(token_id),
                entry.logprob,
                list(self._codec.token_bytes[token_id]),
                top_logprobs(self._codec, entry),
            )
            for token_id, entry in choice.take_logprobs()
        ]
        self._item_logprobs += taken
        return taken


def _encode(event: ItemEvent | ResponseEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + encode_json(event) + b"\n\n"


def _as_history(output: Sequence[OutputItem]) -> Message:
    """The turn as a chat format takes it when the response is continued."""
    reasoning = "".join(part.text for item in output if isinstance(item, ReasoningItem) for part in item.content)
    content = "".join(part.text for item in output if isinstance(item, MessageItem) for part in item.content)
    calls = [
        ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
        for item in output
        if isinstance(item, FunctionCallItem)
    ]
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def new_response_id() -> str:
    return new_id("resp").replace("-", "_")
