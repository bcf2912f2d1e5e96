"""One generating request between the engine's outputs and an endpoint: choices, timing, counts, clean-up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from rose_dist.engine.protocol import Generate
from rose_dist.frontend.api.http import DONE, DisconnectWatch, EventStream, JsonResponse, error_event
from rose_dist.frontend.api.service import Service
from rose_dist.frontend.choice import Choice, merged
from rose_dist.frontend.errors import ApiError
from rose_dist.frontend.formats.base import Delta
from rose_dist.frontend.schema.common import Usage
from rose_dist.frontend.schema.sampling import GenerationFields

Step = list[tuple[Choice, Sequence[Delta]]]
"""What arrived at once, per choice."""


class Answer(Protocol):
    """An endpoint's shapes for one exchange."""

    def begin(self) -> list[bytes]:
        """Events that come before any output."""

    def events(self, step: Step) -> list[bytes]: ...

    def end(self) -> list[bytes]:
        """Events after the last output, before `[DONE]`."""

    def add(self, step: Step) -> None:
        """Collect for `whole`."""

    def whole(self) -> msgspec.Struct:
        """The answer of a request that doesn't stream."""


class Exchange:
    """Iterate with `steps` until it ends; then `usage` holds. `close` in every case."""

    def __init__(
        self,
        service: Service,
        scope: Scope,
        receive: Receive,
        request: GenerationFields,
        *,
        generates: list[Generate],
        choices: list[Choice],
    ) -> None:
        self.choices = choices
        self._service = service
        self._scope = scope
        self._arrival: float = scope["rose.arrival"]
        self._last = [0.0] * len(choices)
        self._first = [0.0] * len(choices)
        self._prompts = {id(generate.prompt): len(generate.prompt) for generate in generates}
        self._generation = service.client.start(generates)
        self._watch = DisconnectWatch(receive, self._generation)
        self._open = len(choices)
        self._closed = False
        metrics = service.metrics
        metrics.request_n.observe(request.choices)
        if (limit := request.token_limit()) is not None:
            metrics.request_max_tokens.observe(limit)

    async def steps(self) -> AsyncIterator[Step]:
        """What arrived, per choice, neighbouring deltas joined. Ends when every choice has its finish reason.

        Raises:
            ApiError: the engine refused or failed.
            ClientGoneError: the client left.
        """
        receive = self._generation.receive
        while self._open:
            arrived = await receive()
            now = time.monotonic()
            deltas: dict[int, list[Delta]] = {}
            for index, output in arrived:
                choice = self.choices[index]
                if choice.finish_reason is not None:
                    continue
                deltas.setdefault(index, []).extend(choice.feed(output))
                if output.token_ids:
                    self._count(index, len(output.token_ids), now)
                if choice.finish_reason is not None:
                    self._end(choice, now)
            yield [(self.choices[index], merged(parts)) for index, parts in deltas.items()]

    def usage(self) -> Usage:
        """Tokens so far; the prompt counts once however many choices it has."""
        choices = self.choices
        return Usage.of(
            sum(self._prompts.values()),
            sum(choice.completion_tokens for choice in choices),
            cached=max(choice.cached_tokens for choice in choices),
            reasoning=sum(choice.reasoning_tokens for choice in choices),
        )

    def close(self, error: BaseException | None = None) -> None:
        """Free everything; what still runs in the engine is cancelled."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        self._generation.close()
        metrics = self._service.metrics
        if self._open and error is not None:
            metrics.finished["error" if isinstance(error, ApiError) else "abort"] += self._open
        prompt_tokens = sum(self._prompts.values())
        metrics.prompt_tokens += prompt_tokens
        metrics.request_prompt_tokens.observe(prompt_tokens)
        self._scope["rose.tokens"] = (prompt_tokens, sum(choice.completion_tokens for choice in self.choices))

    def _count(self, index: int, tokens: int, now: float) -> None:
        metrics = self._service.metrics
        metrics.generation_tokens += tokens
        last = self._last[index]
        if last:
            metrics.inter_token.observe((now - last) / tokens, tokens)
        else:
            metrics.time_to_first_token.observe(now - self._arrival)
            self._first[index] = now
        self._last[index] = now

    def _end(self, choice: Choice, now: float) -> None:
        self._open -= 1
        if choice.matched_stop:
            self._generation.cancel(choice.index)
        metrics = self._service.metrics
        metrics.finished[choice.finish_reason or "stop"] += 1
        metrics.end_to_end.observe(now - self._arrival)
        metrics.request_generation_tokens.observe(choice.completion_tokens)
        if first := self._first[choice.index]:
            metrics.decode_time.observe(now - first)
            if choice.completion_tokens > 1:
                metrics.per_output_token.observe((now - first) / (choice.completion_tokens - 1))


async def respond(
    exchange: Exchange, answer: Answer, scope: Scope, receive: Receive, send: Send, *, stream: bool
) -> None:
    """Answer and close. The status waits for the engine's first output, which may be a refusal."""
    try:
        if stream:
            steps = exchange.steps()
            first = await anext(steps)
            await EventStream(_events(exchange, answer, first, steps))(scope, receive, send)
        else:
            async for step in exchange.steps():
                answer.add(step)
            await JsonResponse(answer.whole())(scope, receive, send)
    except BaseException as error:
        exchange.close(error)
        raise
    exchange.close()


async def _events(exchange: Exchange, answer: Answer, first: Step, steps: AsyncIterator[Step]) -> AsyncIterator[bytes]:
    try:
        yield b"".join(answer.begin() + answer.events(first))
        async for step in steps:
            if events := answer.events(step):
                yield b"".join(events)
    except ApiError as error:
        exchange.close(error)
        yield error_event(error)
        return
    yield b"".join([*answer.end(), DONE])
