"""The scheduler and the KV cache under random traffic, with a made-up model: nothing is lost, nothing dead-locks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rose_dist.engine.config import EngineConfig
from rose_dist.engine.kv_cache import GroupSpec, KVCache
from rose_dist.engine.protocol import Generate, Output, SamplingParams
from rose_dist.engine.sampler import Sampled
from rose_dist.engine.scheduler import Plan, Scheduler

BLOCK = 4
VOCABULARY = 50
CLIENT = b"client"


class Harness:
    """Runs steps with a model whose next token is a function of all tokens before it, read from the cache's slots."""

    def __init__(
        self, blocks: int, window: int | None, window_blocks: int, budget: int, running: int, *, ahead: bool = False
    ) -> None:
        """`ahead`: each step is planned before the results of the one before are taken in."""
        self.ahead = ahead
        self.under_way: tuple[Plan, list[Sampled]] | None = None
        specs = [GroupSpec(blocks, None)]
        if window is not None:
            specs.append(GroupSpec(window_blocks, window))
        config = EngineConfig(
            Path(),
            block_size=BLOCK,
            kv_tokens=blocks * BLOCK,
            max_step_tokens=max(budget, running),
            max_running=running,
            max_waiting=1000,
        )
        self.kv = KVCache(specs, BLOCK)
        self.scheduler = Scheduler(config, self.kv, 10_000, VOCABULARY)
        self.slots: list[dict[int, int]] = [{} for _ in specs]
        """For each group, what was last written to each slot: a token and, as in a real cache, all that it has seen."""
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str | None] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()) -> None:
        request = Generate(
            request_id=name,
            prompt=prompt,
            sampling=SamplingParams(temperature=0, seed=1),
            max_tokens=max_tokens,
            stop_ids=list(stop_ids),
        )
        refusal = self.scheduler.add(CLIENT, request)
        self.outputs[name] = []
        if isinstance(refusal, Output):
            self.finished[name] = refusal.finish

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        assert plan.step.token_count <= self.scheduler.config.max_step_tokens
        assert self.ahead or bool(plan.step.sequences) == self.scheduler.has_work
        sampled = []
        before, self.under_way = self.under_way, None
        for request, sequence in zip(plan.requests, plan.step.sequences, strict=True):
            assert sequence.end < request.limit
            tokens = request.tokens if before is None else known(request.tokens, before[1])
            for group, (first, blocks) in enumerate(sequence.tables):
                window = self.kv.groups[group].window
                slots = self.slots[group]
                for position in range(sequence.start, sequence.end):
                    slots[slot(first, blocks, position)] = hash(tuple(tokens[: position + 1]))
                    # Everything that this token sees must be what the request has there.
                    seen = range(0 if window is None else max(0, position - window + 1), position + 1)
                    assert all(slots[slot(first, blocks, p)] == hash(tuple(tokens[: p + 1])) for p in seen)
            if sequence.sample:
                sampled.append(Sampled(next_token(tokens)))
        self.finish(before)
        self.scheduler.launched(plan)
        self.under_way = (plan, sampled)
        if not self.ahead:
            self.finish(self.under_way)
            self.under_way = None
        self.check_pools()
        return plan

    def finish(self, under_way: tuple[Plan, list[Sampled]] | None) -> None:
        if under_way is not None:
            for client, output in self.scheduler.complete(*under_way):
                assert client == CLIENT
                self.take(output)

    def take(self, output: Output) -> None:
        assert output.request_id not in self.finished
        self.outputs[output.request_id] += output.token_ids
        if output.finish is not None:
            self.finished[output.request_id] = output.finish

    def check_pools(self) -> None:
        """Each block is held exactly by the tables it stands in."""
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        for group, pool in enumerate(self.kv.pools):
            holders = Counter(block for request in requests for block in request.tables[group].blocks)
            assert all(pool._holders[block] == holders[block] for block in range(pool.size))
            assert pool.used == len(holders)


def known(tokens: list[int], sampled: list[Sampled]) -> list[int]:
    """With what the step under way has sampled in place of its row."""
    return [sampled[-1 - token].token if token < 0 else token for token in tokens]


def slot(first: int, blocks: list[int], position: int) -> int:
    return blocks[position // BLOCK - first] * BLOCK + position % BLOCK


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % VOCABULARY


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


prompts = st.one_of(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60),
    # Shared beginnings, so that blocks are found again.
    st.integers(1, 60).map(lambda n: [i % 7 for i in range(n)]),
)
arrivals = st.lists(st.tuples(prompts, st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=12)


@given(
    arrivals=arrivals,
    cancels=st.sets(st.integers(0, 11), max_size=3),
    blocks=st.integers(20, 40),
    window=st.sampled_from([None, 1, 4, 6, 16]),
    budget=st.integers(1, 24),
    running=st.integers(1, 6),
    ahead=st.booleans(),
    stop_ids=st.sampled_from([(), tuple(range(0, VOCABULARY, 6))]),
)
@settings(max_examples=300)
def test_every_request_gets_its_own_tokens(
    arrivals: list[tuple[list[int], int, int]],
    cancels: set[int],
    blocks: int,
    window: int | None,
    budget: int,
    running: int,
    ahead: bool,
    stop_ids: tuple[int, ...],
) -> None:
    window_blocks = running * (-(-(window or 1) // BLOCK) + 1) + -(-max(budget, running) // BLOCK) + running
    harness = Harness(blocks, window, window_blocks, budget, running, ahead=ahead)
    for number, (prompt, count, pause) in enumerate(arrivals):
        harness.add(f"r{number}", prompt, count, stop_ids)
        for _ in range(pause):
            harness.step()
        if number in cancels and f"r{number}" not in harness.finished:
            harness.scheduler.cancel(CLIENT, f"r{number}")
            harness.finished[f"r{number}"] = "cancelled"
    for _ in range(5000):
        if not harness.scheduler.has_work and harness.under_way is None:
            break
        harness.step()
    assert not harness.scheduler.has_work
    assert harness.kv.used_blocks == 0
    for number, (prompt, count, _) in enumerate(arrivals):
        name = f"r{number}"
        expected = alone(prompt, count)
        stopped = next((i + 1 for i, token in enumerate(expected) if token in stop_ids), None)
        expected = expected[:stopped]
        if harness.finished[name] in ("length", "stop"):
            assert harness.outputs[name] == expected
        elif harness.finished[name] == "error":
            assert len(prompt) + count > blocks * BLOCK
        else:
            assert harness.outputs[name] == expected[: len(harness.outputs[name])]


def test_a_full_queue_turns_requests_away() -> None:
    harness = Harness(40, None, 0, 16, 2)
    object.__setattr__(harness.scheduler.config, "max_waiting", 3)
    for number in range(8):
        harness.add(f"r{number}", [1, 2, 3], 4)
    assert [name for name, finish in harness.finished.items() if finish == "overloaded"] == ["r5", "r6", "r7"]
    while harness.scheduler.has_work:
        harness.step()
    assert sum(finish == "length" for finish in harness.finished.values()) == 5


def test_decodes_come_first_and_prompts_fill_the_budget() -> None:
    harness = Harness(40, None, 0, 10, 4)
    harness.add("a", [1] * 3, 9)
    harness.step()
    harness.add("b", [2] * 25, 3)
    plans = [harness.step() for _ in range(3)]
    assert [[len(s.tokens) for s in plan.step.sequences] for plan in plans] == [[1, 9], [1, 9], [1, 7]]


def test_cached_blocks_go_least_recently_used_first() -> None:
    harness = Harness(20, None, 0, 80, 1)
    for name, prompt in (("a", [1] * 16), ("b", [2] * 16), ("a again", [1] * 16), ("c", [3] * 40)):
        harness.add(name, prompt, 1)
        while harness.scheduler.has_work:
            harness.step()
    hits = harness.scheduler.stats.prefix_hits
    assert hits == 12  # "a again", short of its last token
    for name, prompt in (("a", [1] * 16), ("b", [2] * 16)):
        harness.add(f"{name} at last", prompt, 1)
        while harness.scheduler.has_work:
            harness.step()
    assert harness.scheduler.stats.prefix_hits >= hits + 12
