"""Tensor-parallel GPUs inside data-parallel ones, emulated: they share out their tokens and gather the sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.comm.all_to_all import nvlink
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.nvlink import NvLink, exchange_layout
from rose_dist.comm.all_to_all.protocol import Dispatched, Routing
from rose_dist.comm.all_to_all.split_tokens import SplitTokens, part_of
from rose_dist.comm.layout import Layout
from rose_dist.comm.symmetric_memory import Region
from rose_dist.kernels.all_reduce import AllReduce, Sizes
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.formats import FP8
from tests.comm.emulated import SMS, Cluster
from tests.comm.oracle import Batch, Case, expected_out, expected_rows, run_experts
from tests.comm.test_all_to_all import BF16, same_bits
from tests.comm.test_nvlink_gpu import DEVICE, One

CASES = {
    "uneven": Case(tokens=(5, 2), hidden=64, dtype=BF16),
    "fewer tokens than ranks": Case(tokens=(1, 0), hidden=64, dtype=BF16),
    "a bound": Case(tokens=(6, 5), rows=(2, 4), hidden=64, dtype=BF16),
    "accumulate and a bound": Case(tokens=(6, 5), rows=(4, 0), hidden=64, dtype=BF16, accumulate=True),
    "skips": Case(tokens=(4, 3), hidden=64, dtype=BF16, routing="skips"),
    "quantised": Case(tokens=(3, 2), hidden=128, quantized=FP8),
    "plain rows": Case(tokens=(9, 7), hidden=64, dtype=BF16),
}


class SplitJob:
    """On every rank of a layout. Rank r's regions: that of all ranks, and that of its TP group."""

    def __init__(self, case: Case, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks = layout.world
        self.case, self.layout = case, layout
        part = exchange_layout(part_of(case.config, layout.tp), ranks, 1)
        sizes = Sizes(layout.tp, case.hidden, case.config.expert_dtype, case.config.max_tokens, SMS)
        self.cluster = Cluster(ranks, part.region_bytes, monkeypatch)
        machine, all_regions = self.cluster.peers.machine, tuple(self.cluster.peers.addresses[:ranks])
        own = [machine.zeros(sizes.region_bytes, torch.uint8, gpu=gpu, name=f"sums of {gpu}") for gpu in range(ranks)]
        options = GpuOptions(device=DEVICE, layout=PackedLayout())
        self.moes = []
        for rank in range(ranks):
            place, first = layout.at(rank), rank // layout.tp * layout.tp
            with self.cluster.on(rank):
                regions = tuple(region.data_ptr() for region in own[first : first + layout.tp])
                reduce = AllReduce(sizes, DEVICE, place.tp_rank, regions)

                def inner(config: Any, rank: int = rank) -> NvLink:
                    take = lambda size: Region(torch.empty(0), all_regions)  # noqa: E731
                    return NvLink(config, One(rank, ranks), options, take, SMS)

                self.moes.append(SplitTokens(case.config, One(place.tp_rank, layout.tp), inner, reduce))

    def run(self) -> list[torch.Tensor]:
        """Checks what is dispatched; gives what combine leaves."""
        given, outs, tensor = [], [], self.cluster.tensor
        for rank, moe in enumerate(self.moes):
            batch = self.batch(rank)
            with self.cluster.on(rank):
                routing = Routing(tensor(batch.routing.ids), tensor(batch.routing.weights))
                rows = None if self.case.rows is None else tensor(torch.tensor([batch.live], dtype=torch.int32))
                given.append(moe.dispatch(tensor(batch.given), routing, rows=rows))
        self.cluster.peers.run()
        for rank, moe in enumerate(self.moes):
            self.check(given[rank], rank)
            with self.cluster.on(rank):
                outs.append(tensor(self.batch(rank).before))
                results = tensor(run_experts(self.case, given[rank], moe.local_experts, 0))
                moe.combine(results, given[rank], out=outs[-1], accumulate=self.case.accumulate)
        self.cluster.peers.run()
        return outs

    def batch(self, rank: int) -> Batch:
        return Batch.of(self.case, self.layout.at(rank).dp_rank)

    def check(self, dispatched: Dispatched, rank: int) -> None:
        expected = expected_rows(self.case, self.layout, rank)
        assert dispatched.counts.tolist() == [len(pairs) for pairs in expected]
        for start, pairs in zip(dispatched.offsets.tolist(), expected, strict=False):
            for row, (replica, token) in enumerate(pairs, start):
                assert same_bits(dispatched.x[row], Batch.of(self.case, replica).x[token])


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "plain rows":
        monkeypatch.setattr(nvlink, "PACKET_TOKENS", 2)
    case, layout = CASES[name], Layout(4, tp=2, dp=2, ep=4)
    for seed in range(2):
        job = SplitJob(replace(case, seed=seed), layout, monkeypatch)
        for rank, out in enumerate(job.run()):
            assert same_bits(out, expected_out(job.case, job.batch(rank), layout))
