"""Gated activations against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.formats import FP8, MXFP4, MXFP8, NVFP4, BlockFormat, ScaleLayout
from rose_dist.kernels.quantize import dequantize, reference
from rose_dist.kernels.swiglu import Gate, Rows, activate_quantized, clamped_swiglu, silu_mul

LIMIT = 7.0


def exact(gate: Gate, x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    if gate is Gate.SILU:
        left, right = wide.chunk(2, -1)
        return left / (1 + (-left).exp()) * right
    left, right = wide[:, 0::2].clamp(max=LIMIT), wide[:, 1::2].clamp(-LIMIT, LIMIT)
    return left / (1 + (-1.702 * left).exp()) * (right + 1)


def activate(gate: Gate, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return silu_mul(x, **options) if gate is Gate.SILU else clamped_swiglu(x, limit=LIMIT, **options)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.double() - wanted).abs()
    assert (error <= wanted.abs() * (2**-8 if got.dtype is torch.bfloat16 else 2**-10) + 1e-6).all(), error.max()


@pytest.mark.parametrize("gate", list(Gate))
@pytest.mark.parametrize("columns", [2880, 1536])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matches_float64(gpu: Any, row_counts: tuple[int, ...], gate: Gate, columns: int, dtype: torch.dtype) -> None:
    for rows in row_counts:
        x = (torch.randn(rows, 2 * columns) * 5).to(dtype)
        assert_close(gpu.plain(activate(gate, gpu.tensor(x))), exact(gate, x))


def test_many_rows_of_few_columns(gpu: Any) -> None:
    x = (torch.randn(9 * gpu.info.sms + 1, 128) * 5).bfloat16()
    for gate in Gate:
        assert_close(gpu.plain(activate(gate, gpu.tensor(x))), exact(gate, x))


def test_extremes(gpu: Any) -> None:
    x = torch.zeros(1, 64).bfloat16()
    x[0, :8] = torch.tensor([-1e30, 3.0, 1e30, 1e30, math.nan, 1.0, 1.0, math.nan])
    got = gpu.plain(clamped_swiglu(gpu.tensor(x), limit=LIMIT))[0, :4].double()
    assert got[0] == 0
    assert abs(got[1] - LIMIT / (1 + math.exp(-1.702 * LIMIT)) * (LIMIT + 1)) < 0.25
    assert got[2:].isnan().all()


def test_bias_by_expert_and_skipped_rows(gpu: Any) -> None:
    rows, columns = 6, 2880
    x, bias = (torch.randn(rows, 2 * columns) * 3).bfloat16(), (torch.randn(3, 2 * columns) * 2).bfloat16()
    experts = torch.tensor([2, 0, -1, 1, 1, 2], dtype=torch.int32)
    which = Rows(live=gpu.tensor(torch.tensor([5], dtype=torch.int32)), experts=gpu.tensor(experts))
    out = gpu.plain(clamped_swiglu(gpu.tensor(x), limit=LIMIT, bias=gpu.tensor(bias), rows=which))
    live = [0, 1, 3, 4]
    wide = x.double() + bias.double()[experts.clamp(min=0).long()]
    assert_close(out[live], exact(Gate.CLAMPED_SWIGLU, wide[live]))
    assert (out[[2, 5]].view(torch.int16) == -23131).all()  # 0xA5A5: never written


@pytest.mark.parametrize("gate", list(Gate))
@pytest.mark.parametrize("fmt", [FP8, MXFP8, MXFP4], ids=str)
def test_quantised_output(gpu: Any, gate: Gate, fmt: BlockFormat) -> None:
    x = (torch.randn(3, 2 * 2880) * 3).bfloat16()
    codes, scales = activate_quantized(gate, gpu.tensor(x), fmt, limit=LIMIT)
    wanted = exact(gate, x).float()
    wanted_codes, _ = reference(wanted, fmt)
    same = (gpu.plain(codes).view(torch.uint8) == wanted_codes.view(torch.uint8)).float().mean()
    assert same > 0.998
    got = gpu.plain(dequantize(codes, scales, fmt, dtype=torch.float32))
    assert (got - wanted).abs().max() < wanted.abs().max() * (0.3 if fmt is MXFP4 else 0.13)


def test_rows_by_list(gpu: Any) -> None:
    """As a dispatch leaves them: −1 for none, experts by place, other ranks' and dead tokens' ids beyond those here."""
    x, bias = (torch.randn(9, 2 * 256) * 3).bfloat16(), torch.randn(3, 2 * 256).bfloat16()
    places, ids = torch.tensor([7, -1, 0, 3, 5, -1]).int(), torch.tensor([12, 4, 10, 11, -1, 4000]).int()
    rows = Rows(places=gpu.tensor(places), experts=gpu.tensor(ids), first_expert=10)
    out = gpu.plain(clamped_swiglu(gpu.tensor(x), limit=LIMIT, bias=gpu.tensor(bias), rows=rows))
    live = [7, 0, 3]
    assert_close(out[live], exact(Gate.CLAMPED_SWIGLU, x.double()[live] + bias.double()[[2, 0, 1]]))
    assert (out[[1, 2, 4, 5, 6, 8]].view(torch.int16) == -23131).all()  # 0xA5A5: never written
    many = Rows(places=gpu.tensor(torch.arange(8).repeat(9 * gpu.info.sms).int()))
    assert_close(
        gpu.plain(clamped_swiglu(gpu.tensor(x), limit=LIMIT, rows=many))[:8], exact(Gate.CLAMPED_SWIGLU, x[:8])
    )


def test_scales_of_groups_of_rows(gpu: Any) -> None:
    """[groups, group rows, blocks] by columns, as DeepGEMM's masked GEMM wants them; dead rows have none."""
    x, experts = (torch.randn(16, 2 * 320) * 3).bfloat16(), torch.tensor([0, 0, 0, -1, -1, -1, -1, -1] * 2).int()
    rows = Rows(experts=gpu.tensor(experts))
    codes, scales = activate_quantized(
        Gate.CLAMPED_SWIGLU, gpu.tensor(x), FP8, layout=ScaleLayout.COLUMNS, group_rows=8, limit=LIMIT, rows=rows
    )
    assert (tuple(scales.shape), scales.stride()) == ((2, 8, 3), (24, 1, 8))
    plain_codes, plain_scales = activate_quantized(Gate.CLAMPED_SWIGLU, gpu.tensor(x), FP8, limit=LIMIT, rows=rows)
    live = experts >= 0
    assert torch.equal(gpu.plain(scales).reshape(16, 3)[live], gpu.plain(plain_scales)[live])
    assert torch.equal(*(gpu.plain(c).view(torch.uint8)[live] for c in (codes, plain_codes)))
    assert (gpu.plain(scales).reshape(16, 3)[~live].view(torch.int32) == -0x5A5A5A5B).all(), "never written"
    with pytest.raises(KernelArgumentError, match="group_rows: is 5"):
        activate_quantized(Gate.SILU, gpu.tensor(x), FP8, layout=ScaleLayout.COLUMNS, group_rows=5)


@pytest.mark.parametrize("gate", list(Gate))
@pytest.mark.parametrize("fmt", [FP8, NVFP4], ids=str)
def test_quantised_rows_for_every_processor(gpu: Any, gate: Gate, fmt: BlockFormat) -> None:
    """So many that lanes take several vectors at a time."""
    rows, columns = 8 * gpu.info.sms + 1, 144
    x = (torch.randn(rows, 2 * columns) * 3).bfloat16()
    scale = torch.tensor([16.0]) if fmt is NVFP4 else None
    moved = None if scale is None else gpu.tensor(scale)
    codes, _ = activate_quantized(gate, gpu.tensor(x), fmt, limit=LIMIT, global_scale=moved)
    wanted_codes, _ = reference(exact(gate, x).float(), fmt, scale)
    same = gpu.plain(codes).view(torch.uint8) == wanted_codes.view(torch.uint8)
    assert same.float().mean() > 0.998
    assert same.any(-1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 128)}, "gate_up: dtype is torch.float32"),
        ({"x": torch.zeros(2, 48).bfloat16()}, "gate_up's columns: is 48"),
        ({"bias": torch.zeros(3, 128).bfloat16()}, "rows.experts: is needed"),
        ({"live": torch.zeros(1)}, "live_rows: dtype"),
        ({"experts": torch.zeros(2, dtype=torch.int64)}, "rows.experts: dtype"),
        ({"bias": torch.zeros(3, 64).bfloat16(), "experts": torch.zeros(2, dtype=torch.int32)}, "bias: shape"),
    ],
)
def test_bad_arguments(gpu: Any, change: dict[str, torch.Tensor], message: str) -> None:
    given = {name: gpu.tensor(t) for name, t in {"x": torch.zeros(2, 128).bfloat16(), **change}.items()}
    rows = Rows(live=given.get("live"), experts=given.get("experts"))
    with pytest.raises(KernelArgumentError, match=message):
        clamped_swiglu(given["x"], limit=LIMIT, bias=given.get("bias"), rows=rows)
