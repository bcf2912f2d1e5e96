"""Every all-to-all against the plain loop of `oracle`, bit by bit; the matrix follows published bugs of others."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose_dist.comm.all_to_all.create import create
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Dispatched, Routing
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import Groups, World
from rose_dist.kernels.formats import FP8 as BLOCKS_FP8
from rose_dist.kernels.formats import MXFP8
from tests.comm.oracle import Batch, Case, expected_out, expected_rows, run_experts
from tests.ranks import run_ranks

LAYOUTS = {
    "one rank": Layout(1, tp=1, dp=1, ep=1),
    "ep2": Layout(2, tp=1, dp=2, ep=2),
    "tp2 ep2": Layout(2, tp=2, dp=1, ep=2),
    "tp2 ep1": Layout(2, tp=2, dp=1, ep=1),
    "ep3": Layout(3, tp=1, dp=3, ep=3),
    "tp3 ep3": Layout(3, tp=3, dp=1, ep=3),
    "dp4 ep4": Layout(4, tp=1, dp=4, ep=4),
    "dp4 ep2": Layout(4, tp=1, dp=4, ep=2),
    "tp2 dp2 ep4": Layout(4, tp=2, dp=2, ep=4),
    "tp2 dp2 ep2": Layout(4, tp=2, dp=2, ep=2),
    "tp4 ep2": Layout(4, tp=4, dp=1, ep=2),
    "tp2 dp3 ep3": Layout(6, tp=2, dp=3, ep=3),
    "tp3 dp2 ep6": Layout(6, tp=3, dp=2, ep=6),
    "tp2 dp3 ep1": Layout(6, tp=2, dp=3, ep=1),
}

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

CASES = {
    "T-ZERO-RANK: none on the first": Case(tokens=(0, 4)),
    "T-ZERO-RANK: none on the second": Case(tokens=(4, 0)),
    "T-ZERO-BOUND": Case(tokens=(4, 4), rows=(0, 3)),
    "T-ZERO-ALL": Case(tokens=(0,)),
    "T-ZERO-RECV": Case(routing="one_expert"),
    "T-ONE": Case(tokens=(1,)),
    "T-ODD": Case(tokens=(63, 129), top_k=2),
    "T-256": Case(tokens=(257, 1), top_k=2),
    "T-PADROWS": Case(tokens=(8, 8), rows=(5, 2)),
    "R-NEG1: some skipped": Case(routing="skips"),
    "R-NEG1: all skipped": Case(routing="all_skipped"),
    "R-DUP": Case(routing="duplicates"),
    "R-HOT": Case(tokens=(40,), routing="last_expert"),
    "R-IDENT": Case(tokens=(33,), routing="same"),
    "R-NONDIV: 5 experts": Case(experts=5),
    "R-NONDIV: 7 experts, bf16": Case(experts=7, dtype=BF16),
    "R-NONDIV: fewer experts than ranks": Case(experts=1, top_k=1),
    "R-ELOCAL1": Case(experts=4, top_k=1),
    "R-MANYEXPERTS": Case(experts=1030, tokens=(20,)),
    "S-2880": Case(hidden=2880, dtype=BF16),
    "S-16384": Case(hidden=16384, tokens=(2, 1)),
    "bf16 with accumulate": Case(dtype=BF16, accumulate=True),
    "fp32 with accumulate and a bound": Case(accumulate=True, tokens=(6,), rows=(4, 6)),
    "fp8 with scales to bf16": Case(dtype=FP8, out_dtype=BF16, scale_dim=3, hidden=2880),
    "fp8 with one-byte scales": Case(dtype=FP8, out_dtype=BF16, scale_dim=1, scale_dtype=torch.uint8, hidden=48),
    "quantised to fp8, 2880": Case(quantized=BLOCKS_FP8, hidden=2880),
    "quantised to mxfp8, with a bound": Case(quantized=MXFP8, hidden=208, tokens=(6,), rows=(4, 6)),
    **{f"R-TOPK {k}": Case(top_k=k, experts=37, tokens=(6, 9)) for k in (1, 2, 3, 6, 8, 9, 10, 16, 22, 32)},
}

PARTIAL = (
    "T-ZERO-RANK: none on the first", "T-ZERO-BOUND", "R-NEG1: some skipped", "R-NEG1: all skipped", "R-DUP", "R-IDENT",
    "R-NONDIV: 7 experts, bf16", "R-NONDIV: fewer experts than ranks", "bf16 with accumulate",
    "fp8 with scales to bf16", "quantised to mxfp8, with a bound", "R-TOPK 9", "R-TOPK 32",
)  # fmt: skip
CASES |= {f"{name}, partial sums": replace(CASES[name], partial_sums=True) for name in PARTIAL}


def dispatch(moe: AllToAll, case: Case, batch: Batch) -> Dispatched:
    rows = None if case.rows is None else torch.tensor([batch.live], dtype=torch.int32)
    return moe.dispatch(batch.given, batch.routing, scales=batch.given_scales, rows=rows)


@dataclass(frozen=True)
class Expected:
    """What one rank must receive and get back."""

    x: list[torch.Tensor]
    """Rows of each local expert."""
    scales: list[torch.Tensor]
    out: torch.Tensor

    @classmethod
    def of(cls, case: Case, groups: Groups) -> Expected:
        layout, place = groups.layout, groups.place
        batches = [Batch.of(case, replica) for replica in range(layout.dp)]
        x, scales = [], []
        for pairs in expected_rows(case, layout, place.rank):
            x.append(torch.stack([batches[replica].x[token] for replica, token in pairs]) if pairs else torch.empty(0))
            if case.config.scale_dim:
                rows = [batches[replica].scales[token] for replica, token in pairs]  # type: ignore[index]
                scales.append(torch.stack(rows) if rows else torch.empty(0))
        return cls(x, scales, expected_out(case, batches[place.dp_rank], layout))

    def check_dispatched(self, dispatched: Dispatched) -> None:
        assert dispatched.counts.dtype == torch.int32
        assert dispatched.offsets.dtype == torch.int64
        assert dispatched.counts.tolist() == [len(rows) for rows in self.x]
        assert dispatched.offsets[-1] == dispatched.x.shape[0]
        starts = dispatched.offsets.tolist()
        for start, rows in zip(starts, self.x, strict=False):
            assert not len(rows) or same_bits(dispatched.x[start : start + len(rows)], rows)
        for start, rows in zip(starts, self.scales, strict=False):
            assert dispatched.scales is not None
            assert not len(rows) or same_bits(dispatched.scales[start : start + len(rows)], rows)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def check_cases(world: World, layout: Layout, cases: dict[str, Case]) -> int:
    """Rows that this rank sent, over all cases."""
    groups = world.groups(layout)
    sent = 0
    for name, case in cases.items():
        moe = create(case.config, groups)
        batch = Batch.of(case, groups.place.dp_rank)
        expected = Expected.of(case, groups)
        for _ in range(3):
            dispatched = dispatch(moe, case, batch)
            expected.check_dispatched(dispatched)
            out = batch.before.clone()
            results = run_experts(case, dispatched, moe.local_experts, groups.place.expert_slice)
            results = results.T.contiguous().T  # any strides
            moe.combine(results, dispatched, out=out, accumulate=case.accumulate)
            assert same_bits(out, expected.out), name
        sent += int(moe.rows_sent)
    groups.free()
    return sent


@pytest.mark.mpi(6)
@pytest.mark.parametrize("name", LAYOUTS)
def test_matrix(name: str) -> None:
    layout = LAYOUTS[name]
    sent = run_ranks(layout.world, check_cases, layout, CASES)
    assert all(sent) == (layout.moe_mode == "data_parallel"), "only data-parallel experts send rows"


@pytest.mark.mpi(3)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    layout=st.sampled_from([LAYOUTS[name] for name in ("one rank", "ep2", "tp2 ep2", "ep3", "tp3 ep3")]),
    tokens=st.tuples(*[st.integers(0, 20)] * 3),
    experts=st.integers(1, 40),
    top_k=st.integers(1, 32),
    routing=st.sampled_from(["uniform", "one_expert", "last_expert", "same", "skips", "all_skipped", "duplicates"]),
    dtype=st.sampled_from([torch.float32, BF16]),
    accumulate=st.booleans(),
    partial_sums=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_routing(layout: Layout, **fields: object) -> None:
    run_ranks(layout.world, check_cases, layout, {"drawn": Case(**fields)})  # type: ignore[arg-type]


def check_back_to_back(world: World, layout: Layout) -> None:
    """M-BACKTOBACK: two micro-batches in flight, halves interleaved, ranks out of step, new routing each time."""
    groups = world.groups(layout)
    case = Case(tokens=(9, 4, 0), experts=5, hidden=2880)
    moe = create(case.config, groups)
    delay = random.Random(world.rank)
    for step in range(20):
        cases = [replace(case, seed=2 * step), replace(case, seed=2 * step + 1)]
        batches = [Batch.of(case, groups.place.dp_rank) for case in cases]
        outs = [batch.before.clone() for batch in batches]
        handles = [moe.dispatch_send(batch.x, batch.routing) for batch in batches]
        time.sleep(delay.random() * 2e-3)
        dispatched = [moe.dispatch_recv(handle) for handle in handles]
        for case_, packed in zip(cases, dispatched, strict=True):
            Expected.of(case_, groups).check_dispatched(packed)
            moe.combine_send(run_experts(case_, packed, moe.local_experts, groups.place.expert_slice), packed)
            time.sleep(delay.random() * 2e-3)
        for case_, batch, packed, out in zip(cases, batches, dispatched, outs, strict=True):
            moe.combine_recv(packed, out=out)
            assert same_bits(out, expected_out(case_, batch, layout))
    groups.free()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("name", ["one rank", "ep3", "tp2 dp2 ep4", "tp4 ep2"])
def test_two_in_flight(name: str) -> None:
    run_ranks(LAYOUTS[name].world, check_back_to_back, LAYOUTS[name])


def check_created_again(world: World) -> None:
    for seed in range(20):
        check_cases(world, LAYOUTS["tp2 dp2 ep4"], {"again": Case(seed=seed)})


@pytest.mark.mpi(4)
def test_created_twenty_times() -> None:
    run_ranks(4, check_created_again)


def check_refusals(world: World, layout: Layout) -> None:
    groups = world.groups(layout)
    case = Case(tokens=(8,))
    moe = create(case.config, groups)
    batch = Batch.of(case, groups.place.dp_rank)
    ids, weights = batch.routing.ids, batch.routing.weights
    more = torch.zeros(9, case.hidden)
    refused = [
        (more, Routing(torch.zeros(9, 4, dtype=torch.int32), torch.zeros(9, 4)), {}, "9 tokens .* 8"),
        (batch.x[:, :8], batch.routing, {}, "x is"),
        (batch.x.to(BF16), batch.routing, {}, "float32, got .*bfloat16"),
        (batch.x, Routing(ids[:, :3], weights), {}, "routing.ids"),
        (batch.x, Routing(ids.long(), weights), {}, "int32"),
        (batch.x, Routing(ids, weights[:7]), {}, "routing.weights"),
        (batch.x, Routing(ids.clone().fill_(8), weights), {}, "−1 to 7, got 8"),
        (batch.x, Routing(ids.clone().fill_(-2), weights), {}, "−1 to 7, got -2"),
        (batch.x, batch.routing, {"rows": 9}, "rows is 0 to the 8"),
        (batch.x, batch.routing, {"scales": torch.zeros(8, 1)}, "built for 0 scales"),
    ]
    for x, routing, options, message in refused:
        with pytest.raises(ValueError, match=message):
            moe.dispatch(x, routing, **options)
    check_handle_refusals(moe, create(case.config, groups), case, batch)
    groups.free()


def check_handle_refusals(moe: AllToAll, other: AllToAll, case: Case, batch: Batch) -> None:
    dispatched = dispatch(moe, case, batch)
    results = torch.zeros_like(dispatched.x)
    out = torch.empty_like(batch.x)
    with pytest.raises(ValueError, match="expert_out"):
        moe.combine(results[:, :8], dispatched, out=out)
    with pytest.raises(RuntimeError, match="another all-to-all"):
        other.combine(results, dispatched, out=out)
    with pytest.raises(RuntimeError, match="due is combine_send"):
        moe.combine_recv(dispatched, out=out)
    moe.combine_send(results, dispatched)
    with pytest.raises(ValueError, match="out is"):
        moe.combine_recv(dispatched, out=out[:7])
    moe.combine_recv(dispatched, out=out)
    with pytest.raises(RuntimeError, match="combined"):
        moe.combine(results, dispatched, out=out)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("name", ["one rank", "ep2", "tp2 ep2", "tp2 dp2 ep4"])
def test_refusals(name: str) -> None:
    run_ranks(LAYOUTS[name].world, check_refusals, LAYOUTS[name])


def check_disagreement(world: World, layout: Layout, field: str, value: object) -> None:
    config = Case().config
    if world.rank == world.size - 1:
        config = replace(config, **{field: value})  # type: ignore[arg-type]
    groups = world.groups(layout)
    with pytest.raises(ValueError, match=f"disagree on {field}: rank 0"):
        create(config, groups)
    groups.free()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("name", ["ep2", "tp2 ep2"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 64), ("hidden", 32), ("num_experts", 9), ("top_k", 3), ("dtype", BF16), ("scale_dim", 1)],
)
def test_disagreement_raises_on_every_rank(name: str, field: str, value: object) -> None:
    run_ranks(LAYOUTS[name].world, check_disagreement, LAYOUTS[name], field, value)


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", 0), ("top_k", 33), ("num_experts", 0), ("hidden", 0), ("max_tokens", 0)]
)
def test_config_refuses(field: str, value: int) -> None:
    sizes = {"num_experts": 8, "top_k": 2, "hidden": 16, "max_tokens": 4} | {field: value}
    with pytest.raises(ValueError, match=f"{field} is .*got {value}"):
        AllToAllConfig(**sizes)  # type: ignore[arg-type]
