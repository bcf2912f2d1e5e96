"""Deltas of one exchange as chat completions and chunks."""

from __future__ import annotations

import time

from msgspec import UNSET

from rose_dist.engine.protocol import TokenLogprobs
from rose_dist.frontend.api.exchange import Exchange, Step
from rose_dist.frontend.api.http import DONE, encode_json, error_events, event
from rose_dist.frontend.api.service import Service, new_id, random_hex
from rose_dist.frontend.choice import Choice
from rose_dist.frontend.errors import ApiError
from rose_dist.frontend.formats.base import TextDelta, ToolCallDelta
from rose_dist.frontend.schema import chat as schema
from rose_dist.frontend.tokenizer import TextCodec

_PLACEHOLDER = "\0"
_ENCODED_PLACEHOLDER = encode_json(_PLACEHOLDER)


class ChatAnswer:
    """An `Answer`."""

    def __init__(self, service: Service, request: schema.ChatRequest, exchange: Exchange) -> None:
        self._exchange = exchange
        self._tokenizer = service.tokenizer
        self._show_reasoning = request.include_reasoning
        self._logprobs = bool(request.logprobs)
        self._include_usage = request.include_usage
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = request.model
        self._templates: dict[tuple[int, str], list[bytes]] = {}
        self._parts = [_Parts() for _ in exchange.choices]

    def begin(self) -> list[bytes]:
        role = schema.ChunkDelta(role="assistant", content="")
        return [self._event(choice.index, role) for choice in self._exchange.choices]

    def events(self, step: Step) -> list[bytes]:
        events = []
        for choice, deltas in step:
            for delta in deltas:
                if isinstance(delta, ToolCallDelta):
                    events.append(self._event(choice.index, schema.ChunkDelta(tool_calls=[self._call(choice, delta)])))
                elif self._logprobs and delta.section == "content":
                    chunk = schema.ChunkDelta(content=delta.text)
                    events.append(self._event(choice.index, chunk, logprobs=self._take_logprobs(choice)))
                elif delta.section == "content" or self._show_reasoning:
                    events.append(self._text_event(choice.index, delta))
            if choice.finish_reason is not None:
                logprobs = self._take_logprobs(choice) if self._logprobs else None
                events.append(self._event(choice.index, schema.ChunkDelta(), choice.finish_reason, logprobs))
        return events

    def end(self) -> list[bytes]:
        if not self._include_usage:
            return [DONE]
        chunk = schema.ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=[], usage=self._exchange.usage()
        )
        return [event(chunk), DONE]

    def broken_off(self, error: ApiError) -> list[bytes]:
        return error_events(error)

    def add(self, step: Step) -> None:
        for choice, deltas in step:
            parts = self._parts[choice.index]
            for delta in deltas:
                if isinstance(delta, ToolCallDelta):
                    parts.add_call(self._call(choice, delta))
                elif delta.section == "content":
                    parts.content.append(delta.text)
                else:
                    parts.reasoning.append(delta.text)

    def whole(self) -> schema.ChatCompletion:
        return schema.ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._whole_choice(choice, self._parts[choice.index]) for choice in self._exchange.choices],
            usage=self._exchange.usage(),
        )

    def _whole_choice(self, choice: Choice, parts: _Parts) -> schema.Choice:
        content = "".join(parts.content)
        message = schema.ResponseMessage(content=content if content or not parts.calls else None)
        if parts.reasoning and self._show_reasoning:
            message.reasoning = message.reasoning_content = "".join(parts.reasoning)
        if parts.calls:
            message.tool_calls = parts.calls
        logprobs = self._take_logprobs(choice) if self._logprobs else None
        return schema.Choice(
            index=choice.index, message=message, logprobs=logprobs, finish_reason=choice.finish_reason or "stop"
        )

    def _event(
        self,
        index: int,
        delta: schema.ChunkDelta,
        finish_reason: str | None = None,
        logprobs: schema.ChoiceLogprobs | None = None,
    ) -> bytes:
        choice = schema.ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        chunk = schema.ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=None if self._include_usage else UNSET,
        )
        return event(chunk)

    def _text_event(self, index: int, delta: TextDelta) -> bytes:
        """As `_event`, from a chunk encoded once per choice and section with a placeholder for the text."""
        template = self._templates.get((index, delta.section))
        if template is None:
            if delta.section == "content":
                chunk = schema.ChunkDelta(content=_PLACEHOLDER)
            else:
                chunk = schema.ChunkDelta(reasoning_content=_PLACEHOLDER, reasoning=_PLACEHOLDER)
            template = self._event(index, chunk).split(_ENCODED_PLACEHOLDER)
            self._templates[index, delta.section] = template
        return encode_json(delta.text).join(template)

    def _call(self, choice: Choice, delta: ToolCallDelta) -> schema.ChunkToolCall:
        function = schema.ResponseFunction(name=delta.name, arguments=delta.arguments)
        if delta.name is None:
            return schema.ChunkToolCall(index=delta.index, function=function)
        return schema.ChunkToolCall(index=delta.index, function=function, id=f"call_{random_hex(12)}", type="function")

    def _take_logprobs(self, choice: Choice) -> schema.ChoiceLogprobs | None:
        taken = choice.take_logprobs()
        return (
            schema.ChoiceLogprobs([_token_logprob(self._tokenizer, i, entry) for i, entry in taken]) if taken else None
        )


class _Parts:
    """What a choice of a request that doesn't stream has so far."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[schema.ResponseToolCall] = []

    def add_call(self, piece: schema.ChunkToolCall) -> None:
        arguments = piece.function.arguments or ""
        if piece.id is not None:
            function = schema.ResponseFunction(name=piece.function.name, arguments=arguments)
            self.calls.append(schema.ResponseToolCall(id=piece.id, function=function))
        else:
            last = self.calls[piece.index].function
            last.arguments = f"{last.arguments}{arguments}"


def top_logprobs(codec: TextCodec, entry: TokenLogprobs) -> list[schema.TopLogprob]:
    return [schema.TopLogprob(codec.token_text(i), logprob, list(codec.token_bytes[i])) for i, logprob in entry.top]


def _token_logprob(codec: TextCodec, token_id: int, entry: TokenLogprobs) -> schema.TokenLogprob:
    text, token_bytes = codec.token_text(token_id), list(codec.token_bytes[token_id])
    return schema.TokenLogprob(text, entry.logprob, token_bytes, top_logprobs(codec, entry))
