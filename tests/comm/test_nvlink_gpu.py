"""Experts over data-parallel GPUs, emulated: dispatch and combine of all ranks, bit by bit against `oracle`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.comm.all_to_all import nvlink
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.nvlink import NvLink, exchange_layout
from rose_dist.comm.all_to_all.protocol import Dispatched, Routing
from rose_dist.comm.layout import Layout
from rose_dist.comm.symmetric_memory import Region
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.formats import FP8 as BLOCKS_FP8
from tests.comm.emulated import SMS, Cluster
from tests.comm.oracle import Batch, Case, expected_out, expected_rows, run_experts
from tests.comm.test_all_to_all import BF16, CASES, FP8, same_bits
from tests.kernels.peers import LONG

DEVICE = torch.device("cuda", 0)
MOST = 21
"""Most tokens of nearly all cases, so that they share compiled kernels."""


@dataclass(frozen=True)
class One:
    """A rank of a group all of whose members say the same."""

    rank: int
    size: int

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size


class Job:
    """An all-to-all on every rank of a cluster."""

    def __init__(
        self, case: Case, ranks: int, monkeypatch: pytest.MonkeyPatch, *, in_flight: int = 1,
        packed: PackedLayout | None = None, arch: str = "sm_90a", max_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.config = replace(case.config, max_tokens=max_tokens or case.config.max_tokens)
        self.layout = Layout(ranks, tp=1, dp=ranks, ep=ranks)
        region_bytes = exchange_layout(self.config, ranks, in_flight).region_bytes
        self.cluster = Cluster(ranks, region_bytes, monkeypatch, ARCHS[arch])
        addresses = tuple(self.cluster.peers.addresses[:ranks])
        options = GpuOptions(device=DEVICE, in_flight=in_flight, layout=packed or PackedLayout())
        self.moes = []
        for rank in range(ranks):
            with self.cluster.on(rank):
                take = lambda size: Region(torch.empty(0), addresses)  # noqa: E731
                moe = NvLink(self.config, One(rank, ranks), options, take, SMS)
                moe.exchange._wait = (self.cluster.peers.reports[rank].data_ptr(), LONG, rank)
                self.moes.append(moe)

    def each(self, function: Any) -> list[Any]:
        results = []
        for rank in range(len(self.moes)):
            with self.cluster.on(rank):
                results.append(function(rank))
        return results

    def run(self, seed: int = 0, **options: Any) -> None:
        self.cluster.peers.run(seed=seed, **options)
        assert not any(report.any() for report in self.cluster.peers.reports), self.cluster.peers.reports


class Exchange:
    """One dispatch and combine of all ranks."""

    def __init__(self, job: Job, case: Case) -> None:
        self.job, self.case = job, case
        self.batches = [Batch.of(case, rank) for rank in range(len(job.moes))]

    def arguments(self, rank: int) -> tuple[Any, dict[str, Any]]:
        batch, tensor = self.batches[rank], self.job.cluster.tensor
        routing = Routing(tensor(batch.routing.ids), tensor(batch.routing.weights))
        rows = None if self.case.rows is None else tensor(torch.tensor([batch.live], dtype=torch.int32))
        scales = None if batch.given_scales is None else tensor(batch.given_scales)
        return (tensor(batch.given), routing), {"scales": scales, "rows": rows}

    def dispatch(self, half: str = "dispatch") -> None:
        def call(rank: int) -> Any:
            positional, named = self.arguments(rank)
            return getattr(self.job.moes[rank], half)(*positional, **named)

        self.given = self.job.each(call)

    def receive(self) -> None:
        self.given = self.job.each(lambda rank: self.job.moes[rank].dispatch_recv(self.given[rank]))

    def check_rows(self, packed: PackedLayout | None = None) -> None:
        for rank, dispatched in enumerate(self.given):
            expected = expected_rows(self.case, self.job.layout, rank)
            counts = torch.tensor([len(pairs) for pairs in expected], dtype=torch.int32)
            assert dispatched.counts.tolist() == counts.tolist()
            assert dispatched.offsets.tolist() == (packed or PackedLayout()).starts(counts).tolist()
            for start, pairs in zip(dispatched.offsets.tolist(), expected, strict=False):
                for row, (source, token) in enumerate(pairs, start):
                    batch = self.batches[source]
                    assert same_bits(dispatched.x[row], batch.x[token])
                    assert batch.scales is None or same_bits(dispatched.scales[row], batch.scales[token])

    def results(self, rank: int) -> Any:
        dispatched: Dispatched = self.given[rank]
        return self.job.cluster.tensor(run_experts(self.case, dispatched, self.job.moes[rank].local_experts, 0))

    def combine(self) -> None:
        def call(rank: int) -> Any:
            out = self.job.cluster.tensor(self.batches[rank].before)
            self.job.moes[rank].combine(self.results(rank), self.given[rank], out=out, accumulate=self.case.accumulate)
            return out

        self.outs = self.job.each(call)

    def combine_send(self) -> None:
        self.job.each(lambda rank: self.job.moes[rank].combine_send(self.results(rank), self.given[rank]))

    def combine_receive(self) -> None:
        def call(rank: int) -> Any:
            out = self.job.cluster.tensor(self.batches[rank].before)
            self.job.moes[rank].combine_recv(self.given[rank], out=out, accumulate=self.case.accumulate)
            return out

        self.outs = self.job.each(call)

    def check_out(self) -> None:
        for out, batch in zip(self.outs, self.batches, strict=True):
            assert same_bits(out, expected_out(self.case, batch, self.job.layout))


def once(job: Job, case: Case, seed: int, packed: PackedLayout | None = None) -> None:
    exchange = Exchange(job, case)
    exchange.dispatch()
    job.run(seed)
    exchange.check_rows(packed)
    exchange.combine()
    job.run(seed)
    exchange.check_out()


SLOW = ("R-TOPK 2", "R-TOPK 6", "R-TOPK 10", "R-TOPK 16", "R-TOPK 22", "R-TOPK 32")
SMALL = {
    name: case for name, case in CASES.items()
    if max(case.tokens) < 20 and case.hidden <= 64 and case.experts < 1000 and name not in SLOW
}  # fmt: skip
SMALL |= {
    "top 32": Case(tokens=(2, 1), top_k=32, experts=37),
    "all on one expert": Case(tokens=(9,), routing="last_expert"),
    "all alike": Case(tokens=(9, 7), routing="same"),
    "many experts": Case(tokens=(2, 1), experts=1030, top_k=2),
    "a row of several parts": Case(tokens=(2, 1), hidden=6400, top_k=2, dtype=BF16),
    "quantised to fp8": Case(tokens=(3, 2), hidden=2880, top_k=2, quantized=BLOCKS_FP8),
    "quantised to mxfp8": CASES["quantised to mxfp8, with a bound"],
    "quantised, a row of several parts": Case(tokens=(2, 1), hidden=5 * 1424, top_k=2, quantized=BLOCKS_FP8),
    "fp8 with scales, 2880": Case(tokens=(2, 1), hidden=2880, top_k=2, dtype=FP8, out_dtype=BF16, scale_dim=23),
}
for name in (
    "T-ZERO-BOUND", "R-NEG1: some skipped", "bf16 with accumulate", "top 32", "all alike", "quantised to fp8",
    "a row of several parts",
):  # fmt: skip
    SMALL[f"{name}, partial sums"] = replace(SMALL[name], partial_sums=True)


@pytest.mark.parametrize("name", SMALL)
def test_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once(Job(SMALL[name], 2, monkeypatch, max_tokens=MOST), SMALL[name], 0)


@pytest.mark.parametrize("packed", [PackedLayout(16), PackedLayout(8, 8)], ids=["contiguous", "masked"])
def test_packed_layouts(packed: PackedLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=(3, 4), dtype=FP8, out_dtype=BF16, scale_dim=3, hidden=48)
    once(Job(case, 2, monkeypatch, packed=packed, arch="sm_100a"), case, 0, packed)


@pytest.mark.parametrize("partial_sums", [False, True], ids=["", "partial sums"])
@pytest.mark.parametrize("returns", [False, True], ids=["", "returns"])
@pytest.mark.parametrize("tokens", [3, 5], ids=["packets", "plain rows"])
@pytest.mark.usefixtures("few_packets")
def test_a_full_expert_gives_zeros(
    tokens: int, returns: bool, partial_sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pairs beyond an expert's last row, nobody waits for a result."""
    if returns:
        monkeypatch.setattr(nvlink, "RESULT_PACKET_BYTES", 1)
    case = Case(tokens=(tokens,), experts=2, top_k=1, routing="one_expert", partial_sums=partial_sums)
    exchange = Exchange(job := Job(case, 2, monkeypatch, packed=PackedLayout(4, 4)), case)
    exchange.dispatch()
    job.run()
    assert [given.counts.tolist() for given in exchange.given] == [[4], [0]]
    exchange.combine()
    job.run()
    held = [tokens, 4 - tokens] if tokens < 4 else [4, 0]
    for out, batch, count in zip(exchange.outs, exchange.batches, held, strict=True):
        expected = expected_out(case, batch, job.layout)
        expected[count:] = 0
        assert same_bits(out, expected)


@pytest.fixture
def few_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 4 tokens on, plain rows."""
    monkeypatch.setattr(nvlink, "PACKET_TOKENS", 3)


ROWS = {
    "some": Case(tokens=(21, 18)),
    "one rank has few": Case(tokens=(21, 2)),
    "a bound": Case(tokens=(20, 5), rows=(5, 0)),
    "skips": Case(tokens=(0, 6), routing="skips"),
    "duplicates": Case(tokens=(5, 4), routing="duplicates"),
    "odd experts": Case(tokens=(18, 5), experts=5, dtype=BF16, accumulate=True),
    "fp8 with scales to bf16": Case(tokens=(5, 3), dtype=FP8, out_dtype=BF16, scale_dim=3, hidden=2096),
    "quantised by a launch": Case(tokens=(5, 2), quantized=BLOCKS_FP8, hidden=272),
    "one-byte scales": Case(tokens=(5, 4), dtype=FP8, out_dtype=BF16, scale_dim=5, scale_dtype=torch.uint8, hidden=48),
    "top 17": Case(tokens=(5, 4), top_k=17, experts=37),
    "rows of several pieces": Case(tokens=(6, 4), hidden=3600, dtype=BF16),
}

ROWS |= {f"{name}, partial sums": replace(case, partial_sums=True) for name, case in ROWS.items()}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.usefixtures("few_packets")
def test_plain_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(ROWS[name], 2, monkeypatch, max_tokens=MOST)
    once(job, ROWS[name], 0)
    assert [int(moe.rows_sent) for moe in job.moes] == [sent(job, ROWS[name], rank) for rank in range(2)]


RETURNS = (
    "T-ZERO-RANK: none on the first", "T-ZERO-BOUND", "R-NEG1: some skipped", "R-DUP", "R-NONDIV: 5 experts",
    "R-NONDIV: fewer experts than ranks", "bf16 with accumulate", "quantised to fp8", "top 32",
)  # fmt: skip


RETURNS += tuple(f"{name}, partial sums" for name in RETURNS if f"{name}, partial sums" in SMALL)


@pytest.mark.parametrize("name", RETURNS)
def test_packets_whose_results_return_as_plain_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "RESULT_PACKET_BYTES", 1)
    once(Job(SMALL[name], 2, monkeypatch, max_tokens=MOST), SMALL[name], 0)


def sent(job: Job, case: Case, rank: int) -> int:
    """Pairs for the other rank's experts."""
    batch = Batch.of(case, rank)
    ids = batch.routing.ids[: batch.live]
    here = job.moes[rank].local_experts
    return int(((ids >= 0) & ((ids < here.start) | (ids >= here.stop))).sum())


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(case := Case(), 2, monkeypatch)
    (x, routing), _ = Exchange(job, case).arguments(0)
    with job.cluster.on(0):
        held = job.moes[0].dispatch(x, routing)
        with pytest.raises(RuntimeError, match="larger in_flight"):
            job.moes[0].dispatch(x, routing)
        with pytest.raises(RuntimeError, match="another all-to-all"):
            job.moes[1].combine_send(held.x, held)
        with pytest.raises(KernelArgumentError, match="expert_out: rows are not contiguous"):
            job.moes[0].exchange.combine_send(held.x.T.contiguous().T, held.handle.received, 3)
        with pytest.raises(ValueError, match="out is"):
            job.moes[0].combine(held.x, held, out=x[:1])
