"""`Local` on a GPU against the plain loop of `oracle`, over the matrix that the CPU implementations pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.protocol import Routing
from rose_dist.comm.layout import Layout
from rose_dist.kernels.combine_norm import combine_norm
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.moe_dispatch import PackedRows
from tests.comm.oracle import Batch, Case, expected_out, expected_rows, run_experts
from tests.comm.oracle import expert as one_expert
from tests.comm.test_all_to_all import BF16, CASES, FP8, same_bits
from tests.kernels.conftest import gpu  # noqa: F401

ONE = Layout(1, tp=1, dp=1, ep=1)
DEVICE = torch.device("cuda", 0)


def moved(gpu: Any, tensor: torch.Tensor | None) -> torch.Tensor | None:  # noqa: F811
    return None if tensor is None else gpu.tensor(tensor)


def once(gpu: Any, moe: Local, case: Case) -> None:  # noqa: F811
    batch = Batch.of(case, 0)
    routing = Routing(gpu.tensor(batch.routing.ids), gpu.tensor(batch.routing.weights))
    rows = None if case.rows is None else gpu.tensor(torch.tensor([batch.live], dtype=torch.int32))
    dispatched = moe.dispatch(gpu.tensor(batch.given), routing, scales=moved(gpu, batch.given_scales), rows=rows)
    plain = replace(
        dispatched, x=gpu.plain(dispatched.x), counts=gpu.plain(dispatched.counts),
        offsets=gpu.plain(dispatched.offsets),
        scales=None if dispatched.scales is None else gpu.plain(dispatched.scales),
    )  # fmt: skip
    check_rows(case, batch, plain)
    results = run_experts(case, plain, moe.local_experts, 0)
    out = gpu.tensor(batch.before)
    moe.combine(gpu.tensor(results), dispatched, out=out, accumulate=case.accumulate)
    assert same_bits(gpu.plain(out), expected_out(case, batch, ONE))


def check_rows(case: Case, batch: Batch, plain: Any) -> None:
    for expert, pairs in enumerate(expected_rows(case, ONE, 0)):
        start, count = int(plain.offsets[expert]), int(plain.counts[expert])
        assert count == len(pairs)
        tokens = [token for _, token in pairs]
        assert not count or same_bits(plain.x[start : start + count], batch.x[tokens])
        if count and batch.scales is not None:
            assert same_bits(plain.scales[start : start + count], batch.scales[tokens])


SMALL = {name: case for name, case in CASES.items() if max(case.tokens) < 200 and not case.partial_sums}


@pytest.mark.parametrize("name", SMALL)
def test_matrix(gpu: Any, name: str) -> None:  # noqa: F811
    case = SMALL[name]
    moe = Local(case.config, gpu=GpuOptions(device=DEVICE))
    for seed in range(2):
        once(gpu, moe, replace(case, seed=seed))


@pytest.mark.parametrize("layout", [PackedLayout(128), PackedLayout(16, 16)])
def test_layouts(gpu: Any, layout: PackedLayout) -> None:  # noqa: F811
    case = Case(tokens=(9,), dtype=FP8, out_dtype=BF16, scale_dim=3, hidden=2880)
    once(gpu, Local(case.config, gpu=GpuOptions(device=DEVICE, layout=layout)), case)


def test_few_tokens_have_a_layout_of_their_own(gpu: Any) -> None:  # noqa: F811
    """With scales by columns: [experts, rows, scales] for few tokens, [rows, scales] for more."""
    few, many = PackedLayout(16, 16), PackedLayout(16)
    options = GpuOptions(device=DEVICE, layout=many, few_layout=few, column_scales=True)
    case = Case(tokens=(20,), dtype=FP8, out_dtype=BF16, scale_dim=3, hidden=64)
    moe = Local(case.config, gpu=options)
    for tokens, layout in ((9, few), (16, few), (20, many), (3, few)):
        batch = Batch.of(replace(case, tokens=(tokens,)), 0)
        routing = Routing(gpu.tensor(batch.routing.ids), gpu.tensor(batch.routing.weights))
        dispatched = moe.dispatch(gpu.tensor(batch.x), routing, scales=moved(gpu, batch.scales))
        rows = dispatched.x.shape[0]
        assert dispatched.layout == layout
        assert rows == layout.capacity(tokens * case.top_k, case.experts)
        scales = dispatched.scales
        assert scales is not None
        assert scales.stride()[-2:] == (1, 16 if layout == few else rows)
        assert tuple(scales.shape) == ((case.experts, 16, 3) if layout == few else (rows, 3))
        plain = replace(
            dispatched, x=gpu.plain(dispatched.x), counts=gpu.plain(dispatched.counts),
            offsets=gpu.plain(dispatched.offsets), scales=gpu.plain(scales).reshape(rows, 3),
        )  # fmt: skip
        check_rows(replace(case, tokens=(tokens,)), batch, plain)
        del dispatched, plain  # its buffers are free again
    most = moe.gpu._buffers(DEVICE).x.shape[0] if moe.gpu is not None else 0
    assert most == max(few.capacity(16 * 4, 8), many.capacity(20 * 4, 8))


def test_combine_adds_a_bias(gpu: Any) -> None:  # noqa: F811
    """Each expert's, weighted as its row; a part of the experts, so that ids don't count from 0."""
    case = Case(tokens=(7,), routing="skips", experts=4)
    batch, local = Batch.of(case, 0), range(1, 3)
    bias = torch.randn(2, case.hidden)
    for on_gpu in (False, True):
        place = gpu.tensor if on_gpu else torch.clone
        moe = Local(case.config, local, gpu=GpuOptions(device=DEVICE))
        routing = Routing(place(batch.routing.ids), place(batch.routing.weights))
        dispatched = moe.dispatch(place(batch.x), routing)
        plain = replace(
            dispatched, x=gpu.plain(dispatched.x), counts=gpu.plain(dispatched.counts),
            offsets=gpu.plain(dispatched.offsets),
        )  # fmt: skip
        results, out = run_experts(case, plain, local, 0), place(torch.zeros(7, case.hidden))
        moe.combine(place(results), dispatched, out=out, bias=place(bias))
        for token, ids in enumerate(batch.routing.ids.tolist()):
            total = torch.zeros(case.hidden)
            for j, number in enumerate(ids):
                if number in local:
                    row = one_expert(batch.x[token], number, 0, torch.float32) + bias[number - 1]
                    total += batch.routing.weights[token, j] * row
            torch.testing.assert_close(gpu.plain(out)[token], total)


def test_dispatches_in_flight(gpu: Any) -> None:  # noqa: F811
    """As many as built for; a dropped handle gives its buffers back."""
    case = Case()
    batch = Batch.of(case, 0)
    x, routing = gpu.tensor(batch.x), Routing(gpu.tensor(batch.routing.ids), gpu.tensor(batch.routing.weights))
    moe = Local(case.config, gpu=GpuOptions(device=DEVICE, in_flight=2))
    held = [moe.dispatch(x, routing) for _ in range(2)]
    with pytest.raises(RuntimeError, match="larger in_flight"):
        moe.dispatch(x, routing)
    del held
    once(gpu, moe, case)


def test_refuses_gpu_tensors_without_options(gpu: Any) -> None:  # noqa: F811
    case = Case()
    batch = Batch.of(case, 0)
    with pytest.raises(ValueError, match="GpuOptions"):
        Local(case.config).dispatch(gpu.tensor(batch.x), Routing(batch.routing.ids, batch.routing.weights))


def test_rows_packed_by_the_caller(gpu: Any) -> None:  # noqa: F811
    """The buffers come back after the combine, after a failure, and when a handle is dropped."""
    case = Case()
    moe = Local(case.config, gpu=GpuOptions(device=DEVICE))
    assert moe.packs_only
    assert not Local(case.config).packs_only
    assert not Local(case.config, range(1), gpu=GpuOptions(device=DEVICE)).packs_only
    assert not Local(case.config, gpu=GpuOptions(device=DEVICE, layout=PackedLayout(128))).packs_only
    batch = Batch.of(case, 0)
    tokens, k = batch.routing.ids.shape
    routing = Routing(gpu.tensor(batch.routing.ids), gpu.tensor(batch.routing.weights))

    def pack(packed: PackedRows) -> Routing:
        assert packed.slots.shape == (tokens, k)
        assert packed.x.shape[0] >= tokens * k
        return routing

    def fail(packed: PackedRows) -> Routing:
        raise KeyError

    with pytest.raises(KeyError):
        moe.dispatch_packed(tokens, fail)
    moe.dispatch_packed(tokens, pack)  # dropped
    dispatched = moe.dispatch_packed(tokens, pack)
    with pytest.raises(RuntimeError, match="larger in_flight"):
        moe.dispatch_packed(tokens, pack)
    residual, norm = torch.randn(tokens, case.hidden).to(case.dtype), torch.rand(case.hidden).to(case.dtype)
    packed = moe.gpu._free  # type: ignore[union-attr]
    dispatched.handle.packed.slots.copy_(torch.arange(tokens * k).view(tokens, k))  # type: ignore[attr-defined]
    results = gpu.tensor(torch.randn(dispatched.x.shape).to(case.dtype))
    total = gpu.tensor(residual)
    normed = moe.combine_norm(results, dispatched, total, gpu.tensor(norm), 1e-5)
    assert len(packed) == 1
    slots = torch.arange(tokens * k, dtype=torch.int32).view(tokens, k)
    wanted = combine_norm(gpu.plain(results), slots, batch.routing.weights, residual, norm, 1e-5)
    torch.testing.assert_close(gpu.plain(total), residual)
    torch.testing.assert_close(gpu.plain(normed), wanted)
    with pytest.raises(RuntimeError, match="it is combined"):
        moe.combine_norm(results, dispatched, total, gpu.tensor(norm), 1e-5)
