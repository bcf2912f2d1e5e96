"""One generating request between the engine's outputs and an endpoint: choices, timing, counts, clean-up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from rose_dist.engine.protocol import Generate, Output
from rose_dist.frontend.api.http import EVENT_STREAM_HEADERS, JsonResponse
from rose_dist.frontend.api.service import Service
from rose_dist.frontend.choice import Choice, merged
from rose_dist.frontend.connection import Connection
from rose_dist.frontend.errors import ApiError, ClientGoneError, ReplicaLostError
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
        """Events after the last output."""

    def broken_off(self, error: ApiError) -> list[bytes]:
        """Events that tell of an error in a stream that has already begun."""

    def add(self, step: Step) -> None:
        """Collect for `whole`."""

    def whole(self) -> msgspec.Struct:
        """The answer of a request that doesn't stream."""


class Exchange:
    """Call `step` until `ended`; then `usage` holds. `close` in every case."""

    def __init__(
        self,
        service: Service,
        scope: Scope,
        request: GenerationFields,
        *,
        generates: list[Generate],
        choices: list[Choice],
        watched: bool = True,
    ) -> None:
        """
        Args:
            watched: it ends when the client leaves.
        """
        self.choices = choices
        self._service = service
        self._scope = scope
        self._arrival: float = scope["rose.arrival"]
        self._last = [0.0] * len(choices)
        self._first = [0.0] * len(choices)
        self._prefill = [0.0] * len(choices)
        self._prompts = {id(generate.prompt): len(generate.prompt) for generate in generates}
        self._generation = service.client.start(generates)
        self._connection = Connection.of(scope) if watched else None
        if self._connection is not None:
            self._connection.watch(self._on_lost)
        self._open = len(choices)
        self._closed = False
        metrics = service.metrics
        metrics.request_n.observe(request.choices)
        if (limit := request.token_limit()) is not None:
            metrics.request_max_tokens.observe(limit)

    @property
    def ended(self) -> bool:
        """Every choice has its finish reason."""
        return self._open == 0

    async def step(self) -> Step:
        """What arrived since the last call, per choice, neighbouring deltas joined. Not to be called once `ended`.

        Raises:
            ApiError: the engine refused or failed.
            ClientGoneError: the client left.
        """
        return self._taken(await self._generation.receive())

    def take(self) -> Step:
        """As `step`, but what is there now."""
        return self._taken(self._generation.take())

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, until this is closed, whenever there is something to `take`."""
        self._generation.listen(listener)

    def _taken(self, arrived: Sequence[tuple[int, Output]]) -> Step:
        now = time.monotonic()
        if len(arrived) == 1:
            index, output = arrived[0]
            return [(self.choices[index], merged(self._feed(index, output, now)))]
        deltas: dict[int, list[Delta]] = {}
        for index, output in arrived:
            deltas.setdefault(index, []).extend(self._feed(index, output, now))
        return [(self.choices[index], merged(parts)) for index, parts in deltas.items()]

    def _feed(self, index: int, output: Output, now: float) -> list[Delta]:
        choice = self.choices[index]
        if choice.finish_reason is not None:
            return []
        deltas = choice.feed(output)
        if output.token_ids:
            self._count(index, output, now)
        if choice.finish_reason is not None:
            self._end(choice, now)
        return deltas

    def usage(self) -> Usage:
        """Tokens so far; the prompt counts once however many choices it has."""
        choices = self.choices
        return Usage.of(
            sum(self._prompts.values()),
            sum(choice.completion_tokens for choice in choices),
            cached=max(choice.cached_tokens for choice in choices),
            reasoning=sum(choice.reasoning_tokens for choice in choices),
        )

    def abort(self, error: Exception) -> None:
        """End it from outside: a waiting `step` raises `error`."""
        self._generation.abort(error)

    def _on_lost(self) -> None:
        self._generation.abort(ClientGoneError())

    def close(self, error: BaseException | None = None) -> None:
        """Free everything; what still runs in the engine is cancelled."""
        if self._closed:
            return
        self._closed = True
        if self._connection is not None:
            self._connection.watch(None)
        self._generation.close()
        metrics = self._service.metrics
        if self._open and error is not None:
            metrics.finished[_outcome(error)] += self._open
        prompt_tokens = sum(self._prompts.values())
        metrics.prompt_tokens += prompt_tokens
        metrics.request_prompt_tokens.observe(prompt_tokens)
        self._scope["rose.tokens"] = (prompt_tokens, sum(choice.completion_tokens for choice in self.choices))

    def _count(self, index: int, output: Output, now: float) -> None:
        metrics = self._service.metrics
        tokens = len(output.token_ids)
        metrics.generation_tokens += tokens
        last = self._last[index]
        if last:
            metrics.inter_token.observe((now - last) / tokens, tokens)
        else:
            metrics.time_to_first_token.observe(now - self._arrival)
            metrics.queue_time.observe(output.queue_s)
            metrics.prefill_time.observe(output.prefill_s)
            self._first[index] = now
            self._prefill[index] = output.prefill_s
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
            metrics.inference_time.observe(self._prefill[choice.index] + now - first)
            if choice.completion_tokens > 1:
                metrics.per_output_token.observe((now - first) / (choice.completion_tokens - 1))


def _outcome(error: BaseException) -> str:
    if isinstance(error, ReplicaLostError):
        return "lost"
    return "error" if isinstance(error, ApiError) else "abort"


async def respond(
    start: Callable[[], Awaitable[tuple[Exchange, Answer]]], scope: Scope, receive: Receive, send: Send, *, stream: bool
) -> None:
    """Start an exchange, answer and close. If the replica is lost before the client has got any of the output, start
    it once more: not oftener, since a request that brings down replicas must not bring down all.
    """
    try:
        await _respond(*await start(), scope, receive, send, stream=stream)
    except _NothingSentError:
        await _respond(*await start(), scope, receive, send, stream=stream)


class _NothingSentError(ReplicaLostError):
    """The client has got nothing yet."""


async def _respond(
    exchange: Exchange, answer: Answer, scope: Scope, receive: Receive, send: Send, *, stream: bool
) -> None:
    """The status waits for the engine's first output, which may be a refusal."""
    try:
        if stream:
            first = b"".join(answer.begin() + answer.events(await _or_nothing_sent(exchange.step())))
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            last = await _Stream(exchange, answer, Connection.of(scope)).run()
            await send({"type": "http.response.body", "body": last})
        else:
            while not exchange.ended:
                answer.add(await _or_nothing_sent(exchange.step()))
            await JsonResponse(answer.whole())(scope, receive, send)
    except BaseException as error:
        exchange.close(error)
        raise
    exchange.close()


async def _or_nothing_sent(step: Awaitable[Step]) -> Step:
    try:
        return await step
    except ReplicaLostError as error:
        raise _NothingSentError from error


class _Stream:
    """Writes events as outputs arrive. The task sleeps until the last, or while the client reads too slowly."""

    def __init__(self, exchange: Exchange, answer: Answer, connection: Connection) -> None:
        self._exchange = exchange
        self._answer = answer
        self._connection = connection
        self._last: bytes | None = None
        self._wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> bytes:
        """
        Returns: the last events, not yet written.

        Raises:
            ClientGoneError: the client left.
        """
        if self._exchange.ended:
            return b"".join(self._answer.end())
        self._exchange.listen(self._on_output)
        while self._last is None:
            await self._wake
            self._wake = asyncio.get_running_loop().create_future()
            if self._last is None:
                await self._connection.drain()
                self._on_output()
        return self._last

    def _on_output(self) -> None:
        if self._last is not None or self._wake.done():
            return
        if self._connection.write_paused:
            self._wake.set_result(None)
            return
        try:
            self._write(self._answer.events(self._exchange.take()))
        except ApiError as error:
            self._exchange.close(error)
            self._end(self._answer.broken_off(error))
        except Exception as error:
            self._wake.set_exception(error)

    def _write(self, events: list[bytes]) -> None:
        if self._exchange.ended:
            self._end(events + self._answer.end())
        elif events:
            self._connection.write_chunk(events[0] if len(events) == 1 else b"".join(events))

    def _end(self, events: list[bytes]) -> None:
        self._last = b"".join(events)
        self._wake.set_result(None)
