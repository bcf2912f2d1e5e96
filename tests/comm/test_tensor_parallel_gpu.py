"""Experts over tensor-parallel GPUs, emulated: dispatch, combine and all-reduce of all ranks, against `oracle`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.protocol import Routing
from rose_dist.comm.all_to_all.tensor_parallel import TensorParallel
from rose_dist.comm.group import Group
from rose_dist.comm.layout import Layout
from rose_dist.kernels import all_reduce
from rose_dist.kernels.all_reduce import AllReduce, Sizes
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.linear_add import linear_add
from rose_dist.kernels.rms_norm import rms_norm
from tests.comm.emulated import Cluster
from tests.comm.oracle import Batch, Case, expected_out, run_experts
from tests.comm.test_all_to_all import BF16, same_bits
from tests.kernels.peers import sum_in_rank_order

DEVICE = torch.device("cuda", 0)
SMS = 6


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rows", [1, 7, 40], ids=lambda n: f"{n} rows")
def test_sums_of_any_size(ranks: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "ONE_SHOT_BYTES", {2: 8 * 64 * 2, 3: 8 * 64 * 2})
    sizes = Sizes(ranks, 64, BF16, 40, SMS)
    cluster = Cluster(ranks, sizes.region_bytes, monkeypatch, sms=SMS)
    parts = [torch.randn(rows, 64).to(BF16) for _ in range(ranks)]
    addresses = tuple(cluster.peers.addresses[:ranks])
    results = []
    for rank in range(ranks):
        with cluster.on(rank):
            reduce = AllReduce(sizes, DEVICE, rank, addresses)
            x = cluster.tensor(parts[rank])
            results += [reduce(x), reduce(x, x)]
    cluster.peers.run(seed=rows)
    expected = sum_in_rank_order(parts).to(BF16)
    assert all(same_bits(result, expected) for result in results)


@pytest.mark.parametrize(("ranks", "inputs", "rows"), [(2, 256, 1), (2, 2048, 8), (3, 64, 3), (8, 32, 5)])
def test_linear_layers_add_up_in_their_launch(
    ranks: int, inputs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, with another exchange between, and against a launch for each step, to the bit."""
    hidden = 64
    sizes = Sizes(ranks, hidden, BF16, 40, SMS)
    cluster = Cluster(ranks, sizes.region_bytes, monkeypatch, sms=SMS)
    addresses, bias = tuple(cluster.peers.addresses[:ranks]), torch.randn(hidden).to(BF16)
    before, x = torch.randn(rows, hidden).to(BF16), torch.randn(ranks, rows, inputs).to(BF16)
    weights, results = torch.randn(ranks, hidden, inputs).to(BF16) / 16, []
    for rank in range(ranks):
        with cluster.on(rank):
            reduce = AllReduce(sizes, DEVICE, rank, addresses)
            mine, weight = cluster.tensor(x[rank]), cluster.tensor(weights[rank])
            assert reduce.takes_linear(weight)
            shift = cluster.tensor(bias) if rank == 0 else None
            together, apart = (cluster.tensor(before) for _ in range(2))
            for _ in range(2):
                reduce.add_linear(mine, weight, shift, together)
                reduce.add(linear_add(mine, weight, shift, None), apart)
            results.append((together, apart))
    cluster.peers.run(seed=rows, gang_warps=1)
    exact = before.double() + 2 * (torch.einsum("kri,koi->ro", x.double(), weights.double()) + bias.double())
    for together, apart in results:
        assert same_bits(together, apart)
        assert (together.as_subclass(torch.Tensor).double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize(
    ("ranks", "hidden", "tokens", "sms"), [(2, 64, 3, SMS), (2, 64, 8, SMS), (3, 2304, 1, 16), (2, 2880, 2, 16)]
)
def test_combine_all_reduce_and_norm_in_one_launch(
    ranks: int, hidden: int, tokens: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, against a launch for each step: sums to the bit. More tokens than clusters fit take the latter way."""
    sizes, experts = Sizes(ranks, hidden, BF16, 40, sms), 3 * tokens
    cluster, eps = Cluster(ranks, sizes.region_bytes, monkeypatch, sms=sms), 1e-5
    before, scale, results = torch.randn(tokens, hidden).to(BF16), torch.rand(hidden).to(BF16), []
    for rank in range(ranks):
        with cluster.on(rank):
            reduce = AllReduce(sizes, DEVICE, rank, tuple(cluster.peers.addresses[:ranks]))
            slots = torch.randperm(experts).view(tokens, 3).int()
            slots[torch.rand(slots.shape) < 0.4] = -1
            rows, weights = torch.randn(experts, hidden).to(BF16), torch.rand(tokens, 3)
            source = [cluster.tensor(t) for t in (rows, slots, weights)]
            factors, together, apart = (cluster.tensor(t) for t in (scale, before, before))
            for _ in range(2):
                rms_norm(apart, factors, eps, ends_chain=True)  # as the experts' launch, waits for those before
                normed = reduce.combine_norm(*source, together, factors, eps)
                reduce.combine(*source, apart, tokens=tokens, accumulate=True)
            results.append((normed, together, apart))
    cluster.peers.run(seed=tokens, gang_warps=1)
    for normed, together, apart in results:
        assert same_bits(together, apart)
        assert same_bits(normed, results[0][0])
        x = apart.as_subclass(torch.Tensor).double()
        wanted = x * (x.square().mean(1, keepdim=True) + eps).rsqrt() * scale.double()
        assert ((normed.as_subclass(torch.Tensor).double() - wanted).abs() <= wanted.abs() * 2**-7 + 1e-6).all()


CASES = {
    "decode": Case(tokens=(5,), hidden=64, dtype=BF16),
    "decode with accumulate": Case(tokens=(5,), hidden=64, dtype=BF16, accumulate=True),
    "decode with a bound": Case(tokens=(6,), hidden=64, dtype=BF16, rows=(4,)),
    "skips": Case(tokens=(5,), hidden=64, dtype=BF16, routing="skips"),
    "all on one rank": Case(tokens=(5,), hidden=64, dtype=BF16, routing="last_expert"),
    "odd experts": Case(tokens=(5,), hidden=64, experts=5),
    "prefill": Case(tokens=(20,), hidden=64, dtype=BF16),
    "prefill with accumulate and a bound": Case(tokens=(20,), hidden=64, dtype=BF16, accumulate=True, rows=(17,)),
    "no tokens": Case(tokens=(0,), hidden=64, dtype=BF16),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout", [Layout(2, tp=2, dp=1, ep=2), Layout(3, tp=3, dp=1, ep=3), Layout(2, tp=2, dp=1, ep=1)], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_dispatch_and_combine(layout: Layout, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, ranks = CASES[name], layout.tp
    monkeypatch.setattr(all_reduce, "ONE_SHOT_BYTES", dict.fromkeys((2, 3), 10 * 64 * 4))
    sizes = Sizes(ranks, case.hidden, case.dtype, case.config.max_tokens, SMS)
    cluster = Cluster(ranks, sizes.region_bytes, monkeypatch, sms=SMS)
    batch = Batch.of(case, 0)
    waiting = []
    for rank in range(ranks):
        with cluster.on(rank):
            reduce = AllReduce(sizes, DEVICE, rank, tuple(cluster.peers.addresses[:ranks]))
            place = layout.at(rank)
            moe = TensorParallel(
                case.config, Group(None), place.expert_range(case.experts), GpuOptions(device=DEVICE), reduce
            )
            routing = Routing(cluster.tensor(batch.routing.ids), cluster.tensor(batch.routing.weights))
            rows = None if case.rows is None else cluster.tensor(torch.tensor([batch.live], dtype=torch.int32))
            waiting.append((moe, place, moe.dispatch(cluster.tensor(batch.x), routing, rows=rows)))
    cluster.peers.run()
    outs = []
    for rank, (moe, place, dispatched) in enumerate(waiting):
        with cluster.on(rank):
            results = run_experts(case, dispatched, moe.local_experts, place.expert_slice)
            outs.append(cluster.tensor(batch.before))
            moe.combine(cluster.tensor(results), dispatched, out=outs[-1], accumulate=case.accumulate)
    cluster.peers.run()
    assert all(same_bits(out, expected_out(case, batch, layout)) for out in outs)


@pytest.mark.parametrize("tokens", [5, 20], ids=["one launch", "several"])
def test_combine_adds_a_bias(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sliced experts' ranks the first adds it, so that the sum has it once."""
    case, layout = Case(tokens=(tokens,), hidden=64, dtype=BF16), Layout(2, tp=2, dp=1, ep=1)
    monkeypatch.setattr(all_reduce, "ONE_SHOT_BYTES", {2: 10 * 64 * 4})
    sizes = Sizes(2, case.hidden, case.dtype, tokens, SMS)
    cluster, batch = Cluster(2, sizes.region_bytes, monkeypatch, sms=SMS), Batch.of(case, 0)
    bias = torch.randn(case.experts, case.hidden).to(BF16)
    options, waiting, outs = GpuOptions(device=DEVICE, late_bias=True), [], []
    for rank in range(2):
        with cluster.on(rank):
            reduce = AllReduce(sizes, DEVICE, rank, tuple(cluster.peers.addresses[:2]))
            moe = TensorParallel(case.config, Group(None), range(case.experts), options, reduce)
            routing = Routing(cluster.tensor(batch.routing.ids), cluster.tensor(batch.routing.weights))
            waiting.append((moe, moe.dispatch(cluster.tensor(batch.x), routing)))
    cluster.peers.run()
    for rank, (moe, dispatched) in enumerate(waiting):
        with cluster.on(rank):
            results = cluster.tensor(run_experts(case, dispatched, moe.local_experts, layout.at(rank).expert_slice))
            outs.append(cluster.tensor(batch.before))
            moe.combine(results, dispatched, out=outs[-1], bias=cluster.tensor(bias) if rank == 0 else None)
    cluster.peers.run()
    added = (batch.routing.weights[:, :, None] * bias.float()[batch.routing.ids.long()]).sum(1)
    for out in outs:
        wanted = expected_out(case, batch, layout).float() + added
        assert (out.as_subclass(torch.Tensor).float() - wanted).norm() < 5e-3 * wanted.norm()


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(2, 64, BF16, 4, SMS)
    cluster = Cluster(2, sizes.region_bytes, monkeypatch, sms=SMS)
    reduce = AllReduce(sizes, DEVICE, 0, tuple(cluster.peers.addresses[:2]))
    with pytest.raises(KernelArgumentError, match="5 rows; this all-reduce was built for 4"):
        reduce(cluster.tensor(torch.zeros(5, 64, dtype=BF16)))
    with pytest.raises(KernelArgumentError, match=r"dtype is torch\.float32"):
        reduce(cluster.tensor(torch.zeros(4, 64)))
    with pytest.raises(KernelArgumentError, match="ranks: is 9"):
        Sizes(9, 64, BF16, 4, SMS)
    config = Case(hidden=64, tokens=(5,), dtype=BF16).config
    with pytest.raises(ValueError, match="does not fit"):
        TensorParallel(config, Group(None), range(4), GpuOptions(device=DEVICE), reduce)
    with pytest.raises(ValueError, match="need an all-reduce"):
        TensorParallel(config, Group(None), range(4), GpuOptions(device=DEVICE))
