"""Which requests run in the next step, and with how many tokens."""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass

from rose_dist.engine.config import EngineConfig
from rose_dist.engine.grammar import GrammarError
from rose_dist.engine.kv_cache import KVCache
from rose_dist.engine.protocol import EngineStats, FinishReason, Generate, Output
from rose_dist.engine.request import Request
from rose_dist.engine.sampler import Sampled
from rose_dist.engine.step import SequenceStep, Step


@dataclass(frozen=True)
class Plan:
    """A step, and the request behind each of its sequences."""

    step: Step
    requests: tuple[Request, ...]

    @property
    def sampling(self) -> list[Request]:
        """The requests whose next token the step yields, in order."""
        return [
            request for request, sequence in zip(self.requests, self.step.sequences, strict=True) if sequence.sample
        ]


Delivery = tuple[bytes, Output]
"""A client and what it is to be told."""


class Scheduler:
    """Continuous batching under one token budget: decodes first, then chunks of prompts, first come, first served.

    A request that finds no room for its next token takes that of the latest arrival, which is computed anew later. The
    earliest arrival can therefore always go on, and since no request is admitted that could not fit alone, all end.
    """

    def __init__(self, config: EngineConfig, kv: KVCache, max_context: int, vocab_size: int) -> None:
        self.config = config
        self.kv = kv
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = EngineStats(kv_blocks_total=kv.total_blocks)

    def add(self, client: bytes, generate: Generate) -> Request | Output:
        """Queue a request; its refusal if it can't be taken."""
        if len(self.waiting) >= self.config.max_waiting + self._open_places():
            return Output(request_id=generate.request_id, finish="overloaded")
        limit = min(self.max_context, self.kv.capacity)
        if problem := self._problem(generate, limit):
            return Output(request_id=generate.request_id, finish="error", error=problem)
        if generate.max_tokens is not None:
            limit = len(generate.prompt) + generate.max_tokens
        seed = secrets.randbits(63) if generate.sampling.seed is None else generate.sampling.seed
        request = Request(client, generate, limit, seed, self.kv.empty_tables())
        self.waiting.append(request)
        return request

    def adopt(self, client: bytes, generate: Generate) -> None:
        """Run a request at once whose prompt's keys and values, the last token's excepted, are in the cache by other
        means. There must be room.
        """
        limit = len(generate.prompt) + (generate.max_tokens or 1)
        request = Request(client, generate, limit, generate.sampling.seed or 0, self.kv.empty_tables())
        if not self.kv.place(request, len(generate.prompt) - 1):
            raise ValueError(f"no room in the KV cache for {len(generate.prompt)} more tokens")
        request.admitted = request.arrived
        self.running.append(request)

    def _open_places(self) -> int:
        return max(0, self.config.max_running - len(self.running))

    def _problem(self, generate: Generate, limit: int) -> str | None:
        length = len(generate.prompt)
        room = f"the model's context is {self.max_context}, the KV cache's {self.kv.capacity}"
        if not generate.prompt:
            return "the prompt is empty"
        ids = (min(generate.prompt), max(generate.prompt), *generate.stop_ids, *generate.sampling.logit_bias)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            return f"token ids of the prompt, stop_ids and logit_bias are 0 to {self.vocab_size - 1}"
        if length >= limit:
            return f"the prompt has {length} tokens and must have fewer than {limit}: {room}"
        if generate.max_tokens is not None and length + generate.max_tokens > limit:
            return f"the prompt's {length} tokens and max_tokens {generate.max_tokens} exceed {limit}: {room}"
        return None

    def cancel(self, client: bytes, request_id: str) -> Request | None:
        """Forget a request and free its blocks; None if it is not there: it has ended meanwhile."""
        for queue in (self.running, self.waiting):
            for request in queue:
                if request.id == request_id and request.client == client:
                    self._end(request)
                    return request
        return None

    def cancel_all(self, client: bytes) -> list[Request]:
        """Forget all requests of a client, which are returned."""
        requests = [request for request in (*self.running, *self.waiting) if request.client == client]
        for request in requests:
            self._end(request)
        return requests

    @property
    def has_work(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self.running) or any(not request.compiling for request in self.waiting)

    def schedule(self) -> Plan:
        """Choose the next step's tokens, admit and preempt as needed."""
        budget = self.config.max_step_tokens
        preemptions = self.stats.preemptions
        planned: list[tuple[Request, int]] = []
        for request in sorted(self.running, key=lambda request: request.remaining > 1):
            if budget == 0:
                break
            if request.complete or request not in self.running:  # waits for its last token; or had to make room
                continue
            count = min(request.remaining, budget)
            if self._make_room(request, count, planned):
                planned.append((request, count))
                budget -= count
        preempted = self.stats.preemptions > preemptions
        for request in [request for request in self.waiting if not request.compiling]:
            if not budget or preempted or len(self.running) >= self.config.max_running:
                break
            self.kv.match(request)
            count = min(request.remaining, budget)
            if not (self.kv.has_room(request) and self.kv.grow(request, request.computed + count)):
                self.kv.free(request)
                break
            self.waiting.remove(request)
            self.running.append(request)
            self._count_admission(request)
            planned.append((request, count))
            budget -= count
        self.update_gauges()
        planned.sort(key=lambda entry: (entry[1] > 1, entry[0].computed))
        return Plan(
            Step([self._sequence(request, count) for request, count in planned]),
            tuple(request for request, _ in planned),
        )

    def _make_room(self, request: Request, count: int, planned: list[tuple[Request, int]]) -> bool:
        """Blocks for `count` more tokens, taken from later arrivals if need be; False if `request` itself had to go."""
        while not self.kv.grow(request, request.computed + count):
            victim = self.running[-1]
            self.running.pop()
            self.kv.free(victim)
            self.waiting.appendleft(victim)
            self.stats.preemptions += 1
            planned[:] = [entry for entry in planned if entry[0] is not victim]
            if victim is request:
                return False
        return True

    def _count_admission(self, request: Request) -> None:
        request.admitted = request.admitted or time.monotonic()
        if request.output_length == 0:
            request.cached_tokens = request.computed
            self.stats.prefix_queries += request.prompt_length
            self.stats.prefix_hits += request.computed

    def _sequence(self, request: Request, count: int) -> SequenceStep:
        start = request.computed
        return SequenceStep(
            tokens=request.tokens[start : start + count],
            start=start,
            tables=[(table.first, list(table.blocks)) for table in request.tables],
            sample=count == request.remaining,
        )

    def launched(self, plan: Plan) -> None:
        """The step is under way and the one before is complete. Its tokens count as computed, and those that it samples
        as there, though unknown. One more step may be planned before `complete`.
        """
        row = 0
        for request, sequence in zip(plan.requests, plan.step.sequences, strict=True):
            if not request.done:
                self.kv.advance(request, sequence.end)
                if sequence.sample:
                    request.tokens.append(-1 - row)
            row += sequence.sample

    def complete(self, plan: Plan, sampled: list[Sampled]) -> list[Delivery]:
        """Take in a launched step's results: one sampled token for each of `plan.sampling`, in order."""
        deliveries = []
        results = iter(sampled)
        for request, sequence in zip(plan.requests, plan.step.sequences, strict=True):
            if sequence.sample:
                result = next(results)
                if not request.done:
                    deliveries.append((request.client, self._accept(request, sequence.end, result)))
        self.stats.steps += 1
        self.stats.step_tokens += plan.step.token_count
        self.update_gauges()
        return deliveries

    def _accept(self, request: Request, position: int, sampled: Sampled) -> Output:
        first = position == request.prompt_length
        now = time.monotonic()
        request.tokens[position] = sampled.token
        finish: FinishReason | None = None
        error = _step_grammar(request, sampled.token)
        if error is not None:
            finish = "error"
        elif sampled.token in request.stop_ids:
            finish = "stop"
        elif position + 1 >= request.limit:
            finish = "length"
        if finish is not None:
            self._end(request)
        return Output(
            request_id=request.id,
            token_ids=[sampled.token],
            logprobs=None if sampled.logprobs is None else [sampled.logprobs],
            finish=finish,
            error=error,
            cached_tokens=request.cached_tokens if first else 0,
            queue_s=request.admitted - request.arrived if first else 0.0,
            prefill_s=now - request.admitted if first else 0.0,
        )

    def _end(self, request: Request) -> None:
        """Forget a request, wherever it stands. Steps under way may still write to its blocks, but later ones that get
        them come after those.
        """
        request.done = True
        self.kv.free(request)
        (self.running if request in self.running else self.waiting).remove(request)

    def update_gauges(self) -> None:
        self.stats.running = len(self.running)
        self.stats.waiting = len(self.waiting)
        self.stats.kv_blocks_used = self.kv.used_blocks


def _step_grammar(request: Request, token: int) -> str | None:
    """What is wrong if the request's grammar can't go on."""
    try:
        if request.grammar is not None:
            request.grammar.accept(token)
    except GrammarError as error:
        return str(error)
    return None
