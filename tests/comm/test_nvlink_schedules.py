"""Many exchanges between emulated GPUs with nothing between them: any schedule is right, any weakening is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.comm.all_to_all import nvlink
from rose_dist.comm.all_to_all.protocol import Routing
from rose_dist.kernels.peer_regions import CHUNK_STAGE, HEADER_STAGE, STAGES
from rose_dist.kernels.sync import WaitExpiredError, WaitReport
from tests.comm.oracle import Case, make_ids
from tests.comm.test_all_to_all import BF16, same_bits
from tests.comm.test_nvlink_gpu import Job
from tests.ptx.errors import PtxError
from tests.ptx.launch import Launch
from tests.ptx.weaken import Weakening, weakenings

CASE = Case(tokens=(3,), hidden=16, experts=5, top_k=2, dtype=BF16)
SUMMED = dataclasses.replace(CASE, partial_sums=True)
CASES = pytest.mark.parametrize("case", [CASE, SUMMED], ids=["results", "partial sums"])


class Echo:
    """One exchange whose experts give their rows back, on every rank; nothing waits for the host."""

    def __init__(self, job: Job, tokens: tuple[int, ...], seed: int) -> None:
        self.job, self.inputs = job, []
        generator = torch.Generator().manual_seed(seed)
        for rank in range(len(job.moes)):
            count = tokens[(rank + seed) % len(tokens)]
            kind = ("uniform", "skips", "duplicates", "last_expert")[seed % 4]
            ids = make_ids(dataclasses.replace(CASE, routing=kind), count, generator)
            x = torch.randn(count, CASE.hidden, generator=generator).to(BF16)
            self.inputs.append((x, Routing(ids, torch.rand(count, CASE.top_k, generator=generator))))
        self.given: list[Any] = [None] * len(job.moes)
        self.outs: list[Any] = [None] * len(job.moes)

    def call(self, step: str) -> None:
        self.job.each(getattr(self, step))

    def dispatch(self, rank: int, half: str = "dispatch") -> None:
        x, routing = self.inputs[rank]
        tensor = self.job.cluster.tensor
        routing = Routing(tensor(routing.ids), tensor(routing.weights))
        self.given[rank] = getattr(self.job.moes[rank], half)(tensor(x), routing)

    def dispatch_send(self, rank: int) -> None:
        self.dispatch(rank, "dispatch_send")

    def dispatch_recv(self, rank: int) -> None:
        self.given[rank] = self.job.moes[rank].dispatch_recv(self.given[rank])

    def combine(self, rank: int) -> None:
        self.outs[rank] = self.job.cluster.tensor(torch.zeros_like(self.inputs[rank][0]))
        self.job.moes[rank].combine(self.given[rank].x, self.given[rank], out=self.outs[rank])

    def combine_send(self, rank: int) -> None:
        self.job.moes[rank].combine_send(self.given[rank].x, self.given[rank])

    def combine_recv(self, rank: int) -> None:
        self.outs[rank] = self.job.cluster.tensor(torch.zeros_like(self.inputs[rank][0]))
        self.job.moes[rank].combine_recv(self.given[rank], out=self.outs[rank])

    def right(self) -> bool:
        expected = self.summed if self.job.config.partial_sums else self.sum
        for out, (x, routing) in zip(self.outs, self.inputs, strict=True):
            if not same_bits(out, expected(x.float(), routing).to(BF16)):
                return False
        return True

    def sum(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        total = torch.zeros(x.shape)
        for j in range(CASE.top_k):
            valid = routing.ids[:, j, None] >= 0
            total = torch.where(valid, total + routing.weights[:, j, None] * x, total)
        return total

    def summed(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """With each rank's sum rounded, in the order in which a token names the ranks."""
        ranks = [moe.local_experts for moe in self.job.moes]
        total = torch.zeros(x.shape)
        for token, ids in enumerate(routing.ids.tolist()):
            named = [next(r for r, held in enumerate(ranks) if n in held) if n >= 0 else -1 for n in ids]
            for rank in dict.fromkeys(r for r in named if r >= 0):
                share = torch.zeros(x.shape[1])
                for j in (j for j, r in enumerate(named) if r == rank):
                    share = share + routing.weights[token, j] * x[token]
                total[token] += share.to(BF16).float()
        return total


def chain(job: Job, tokens: tuple[int, ...], count: int) -> list[Echo]:
    echoes = [Echo(job, tokens, seed) for seed in range(count)]
    for echo in echoes:
        echo.call("dispatch")
        echo.call("combine")
    return echoes


def plain_rows_from(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "PACKET_TOKENS", tokens - 1)


def plain_results_from(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "RESULT_PACKET_BYTES", (tokens - 1) * CASE.top_k * CASE.hidden * BF16.itemsize)


@pytest.mark.parametrize("seed", range(3))
def test_exchanges_back_to_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets: ranks run ahead of one another over several rounds of all copies."""
    job = Job(CASE, 2, monkeypatch)
    echoes = chain(job, (3, 0, 2), 7)
    job.run(seed)
    assert all(echo.right() for echo in echoes)


@CASES
def test_all_forms_by_turns(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets, packets with plain results, and plain rows, each beside each."""
    plain_results_from(2, monkeypatch)
    plain_rows_from(4, monkeypatch)
    job = Job(case, 2, monkeypatch, max_tokens=18)
    echoes = chain(job, (18, 2, 3, 1, 0), 5)
    job.run(1)
    assert all(echo.right() for echo in echoes)


@CASES
@pytest.mark.parametrize(("ranks", "tokens"), [(3, (3, 0, 1)), (8, (1, 2))])
def test_ranks(ranks: int, tokens: tuple[int, ...], case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also more ranks than experts."""
    job = Job(case, ranks, monkeypatch)
    echoes = chain(job, tokens, 2)
    job.run(ranks)
    assert all(echo.right() for echo in echoes)


def choose_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "plain rows":
        plain_rows_from(2, monkeypatch)
    elif form == "plain results":
        plain_results_from(2, monkeypatch)


FORMS = ("packets", "plain results", "plain rows")


@CASES
@pytest.mark.parametrize("form", FORMS)
def test_two_in_flight(form: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_form(form, monkeypatch)
    job = Job(case, 2, monkeypatch, in_flight=2)
    echoes = [Echo(job, (3, 1), seed) for seed in range(6)]
    for pair in zip(echoes[::2], echoes[1::2], strict=True):
        for step in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
            for echo in pair:
                echo.call(step)
    job.run(3)
    assert all(echo.right() for echo in echoes)


# --- Weakened ---------------------------------------------------------------------------------------------------------


def ordering(program: Any) -> Iterator[Weakening]:
    """Every release and acquire of a flag, made relaxed or its scope narrower; not those of a report, which only a wait
    that expired writes.
    """
    reporting = False
    for weakening in weakenings(program, barriers=False):
        if ".cas." in weakening.text:
            reporting = True
        elif weakening.text.startswith("st.release") and reporting:
            reporting = weakening.change.startswith("release")  # its scope comes next
        elif weakening.text.startswith(("st.release", "ld.acquire")):
            yield weakening


Build = Callable[[pytest.MonkeyPatch], tuple[Job, list[Echo]]]


def caught(build: Build, change: Callable[[Launch], Launch], seeds: int) -> bool:
    for seed in range(seeds):
        with pytest.MonkeyPatch.context() as patch:
            job, echoes = build(patch)
            job.cluster.peers.change = change
            try:
                job.cluster.peers.run(seed=seed)
            except PtxError:
                return True
            if not all(echo.right() for echo in echoes):
                return True
    return False


def halves(job: Job, tokens: tuple[int, ...], count: int) -> list[Echo]:
    echoes = [Echo(job, tokens, seed) for seed in range(count)]
    for echo in echoes:
        for step in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
            echo.call(step)
    return echoes


WEAKENINGS = {
    ("plain rows", chain): 8,
    ("plain rows", halves): 8,
    ("plain results", chain): 4,
    ("plain results", halves): 4,
}
"""What there is to weaken, at least: the flag of a chunk and the flag of results, the latter by chunk or by token, each
at both ends, each in its order and in its scope."""


@CASES
@pytest.mark.parametrize(("form", "calls"), WEAKENINGS)
def test_every_weakened_flag_is_caught(form: str, calls: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_form(form, monkeypatch)

    def build(patch: pytest.MonkeyPatch) -> tuple[Job, list[Echo]]:
        job = Job(case, 2, patch)
        return job, calls(job, (3,), 2)

    job, echoes = build(monkeypatch)
    programs: dict[str, Any] = {}
    for launches in job.cluster.peers._launches:
        for launch in launches:
            programs.setdefault(launch.program.kernel.name, launch.program)
    job.run()
    assert all(echo.right() for echo in echoes)
    tried = 0
    for name, program in programs.items():
        if "AssignSlots" in name:
            continue  # test_phase_barrier
        for weakening in ordering(program):
            tried += 1

            def change(launch: Launch, weakening: Weakening = weakening, name: str = name) -> Launch:
                return weakening.apply(launch) if launch.program.kernel.name == name else launch

            assert caught(build, change, 12), f"{name}: {weakening}"
    assert tried >= WEAKENINGS[form, calls]


@CASES
@pytest.mark.parametrize("waits", [("griddepcontrol", "wait"), ("cp", "async", "bulk", "wait_group")], ids=str)
def test_what_is_not_awaited_is_caught(waits: tuple[str, ...], case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of pairs, by the blocks that send and those that take; rows that are under way by bulk copies."""
    plain_rows_from(2, monkeypatch)

    def build(patch: pytest.MonkeyPatch) -> tuple[Job, list[Echo]]:
        job = Job(case, 2, patch)
        return job, chain(job, (3,), 2)

    job, _ = build(monkeypatch)
    rows = next(one for one in job.cluster.peers._launches[0] if "DispatchRows" in one.program.kernel.name)
    lines = [one.line for one in rows.program.kernel.instructions if one.parts[: len(waits)] == waits]
    # Of many waits for copies none may matter alone.
    for some in [[line] for line in lines] if waits[0] == "griddepcontrol" else [lines]:

        def change(launch: Launch, some: list[int] = some) -> Launch:
            return dropped(launch, *some) if launch.program.kernel.name == rows.program.kernel.name else launch

        assert caught(build, change, 12), some


@pytest.mark.parametrize("kind", ["st", "ld"])
def test_too_small_a_scope_of_packets_is_a_race(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(patch: pytest.MonkeyPatch) -> tuple[Job, list[Echo]]:
        job = Job(CASE, 2, patch)
        job.cluster.peers.weaken = (f"{kind}.relaxed.sys.global.v4", f"{kind}.relaxed.gpu.global.v4")
        return job, chain(job, (3,), 1)

    assert caught(build, lambda launch: launch, 3)


def test_packets_that_tear_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = False
    for seed in range(20):
        job = Job(CASE, 2, monkeypatch)
        echoes = chain(job, (3,), 1)
        try:
            job.cluster.peers.run(seed=seed, vector_atomic=False, races="off")
        except PtxError:
            wrong = True
        wrong |= not all(echo.right() for echo in echoes)
        if wrong:
            return
    raise AssertionError("nobody noticed")


# --- A dead peer ------------------------------------------------------------------------------------------------------


def report_of(job: Job, rank: int) -> WaitReport:
    report = WaitReport(STAGES)
    report._words.copy_(job.cluster.peers.reports[rank])
    return report


def test_a_rank_that_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(CASE, 3, monkeypatch)
    echo = Echo(job, (3,), 0)
    for rank in (0, 2):
        job.moes[rank].exchange._wait = (job.cluster.peers.reports[rank].data_ptr(), 30_000, rank)
        with job.cluster.on(rank):
            echo.dispatch(rank)
    job.cluster.peers.run()
    for rank in (0, 2):
        with pytest.raises(WaitExpiredError, match=f"rank {rank} waited for rank 1 in {STAGES[HEADER_STAGE]}"):
            report_of(job, rank).check()
        assert not echo.given[rank].counts.any()


def test_a_rank_that_dies_after_its_headers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's flags never come."""
    plain_rows_from(2, monkeypatch)
    job = Job(CASE, 2, monkeypatch)
    echo = Echo(job, (3,), 0)
    for rank in range(2):
        job.moes[rank].exchange._wait = (job.cluster.peers.reports[rank].data_ptr(), 40_000, rank)
        with job.cluster.on(rank):
            (echo.dispatch if rank == 0 else echo.dispatch_send)(rank)
    job.cluster.peers.change = lambda launch: without_release(launch) if launch.gpu == 1 else launch
    job.cluster.peers.run(races="off")
    with pytest.raises(WaitExpiredError, match=f"rank 0 waited for rank 1 in {STAGES[CHUNK_STAGE]}"):
        report_of(job, 0).check()


def without_release(launch: Launch) -> Launch:
    """The launch with its flag stores dropped."""
    for weakening in weakenings(launch.program, scopes=False, barriers=False):
        if weakening.text.startswith("st.release") and "DispatchRows" in launch.program.kernel.name:
            return dropped(launch, weakening.line)
    return launch


def dropped(launch: Launch, *lines: int) -> Launch:
    program = launch.program
    for at, one in enumerate(launch.program.kernel.instructions):
        if one.line in lines:
            program = program.replaced(at, dataclasses.replace(one, parts=("pmevent",), operands=()))
    return dataclasses.replace(launch, program=program)
