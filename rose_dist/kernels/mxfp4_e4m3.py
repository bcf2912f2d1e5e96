"""MXFP4 weights and rows in FP8: what a Hopper GPU's tensor cores multiply at twice the rate of bf16.

- A weight is its code's value times 2^(s - t) in e4m3, where 2^s is its block's scale and 2^t its matrix row's largest;
  a row's results are multiplied by 2^t. That is exact for s from t - 11 on. A block further below counts as if its
  scale were 2^(t - 11): what it gets wrong stays below 2^-11 of the largest block's weights.
- A row of x is e4m3 with one fp32 scale, by the rule of `quantize` for FP8. What SwiGLU gives with a limit is at most
  limit · (limit + 1), so the second layer's rows are e4m3 of it times 2^`ACTIVATION_EXPONENT`, which saturates.

Tensor cores keep about 14 bits of FP8's sums, as in cuBLAS's fast accumulation. Bias and activation are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.arch import device_info
from rose_dist.kernels.e4m3_tiling import E4M3_SHAPES, E4m3Shape
from rose_dist.kernels.errors import UnsupportedArchError
from rose_dist.kernels.formats import E4M3_MAX, MIN_AMAX
from rose_dist.kernels.mxfp4 import BLOCK, SCALE_BIAS, dequantize_mxfp4
from rose_dist.kernels.mxfp4_experts import ExpertLayer, ExpertRows, check_layer, launch_grouped, least_rows
from rose_dist.kernels.mxfp4_layout import EXPONENT_BIAS, PackedMxfp4
from rose_dist.kernels.row_groups import empty_groups, group_rows
from rose_dist.kernels.swiglu import ALPHA

SPAN = 11
"""Powers of two that a matrix row's scales may differ by."""
FACTOR_BIAS = EXPONENT_BIAS + SCALE_BIAS + SPAN - 5
"""A row's results are multiplied by 2^(its largest stored scale byte - this): e4m3's codes start at a scale of 2^-5."""
ACTIVATION_EXPONENT = 3
LEAST_ROWS = 33
"""Rows of the largest expert from which on rows in FP8 serve: below, memory is what takes time."""


def takes(rows: ExpertRows) -> bool:
    """Whether these are so many that rows in FP8 pay. A decode step's hardly ever are. What the dispatch has made of
    them stands.
    """
    return rows.most >= LEAST_ROWS if rows.groups is None else rows.groups.cells.dtype is torch.uint8


def expert_mlp_e4m3(
    x: Tensor, gate_up: ExpertLayer, down: ExpertLayer, rows: ExpertRows, *, limit: float, alpha: float = ALPHA
) -> Tensor:
    """`mxfp4_experts.expert_mlp` with rows in FP8.

    Args:
        x: bf16 [rows, columns], on the CPU also fp32; of expert e the rows `offsets[e]` to `offsets[e] + counts[e]`.
        gate_up, down: as there.

    Returns:
        [rows, outputs] of x's dtype. Rows of no expert are unwritten.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit, and for too many rows.
        UnsupportedArchError: on a GPU that is not Hopper.
    """
    _check(x, gate_up, down, rows)
    if not x.is_cuda:
        return reference(x, gate_up, down, rows, limit, alpha)
    if not launch.device(x).arch.hopper:
        raise UnsupportedArchError(f"rows in FP8 run on Hopper only, this GPU is {launch.device(x).arch}")
    out = torch.empty(x.shape[0], down.weight.rows, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        groups = rows.groups or group_rows(x, rows.counts, rows.offsets, torch.uint8)
        h = empty_groups(groups.cells.shape[0], gate_up.weight.rows // 2, torch.uint8, x.device)
        shape = E4M3_SHAPES.select(max(rows.most, least_rows(x, gate_up.weight)))
        launch_gemm(groups.cells, groups.scales, gate_up, rows, h, shape, alpha=alpha, limit=limit)
        launch_gemm(h, None, down, rows, out, shape, alpha=0.0, limit=0.0)
    return out


def launch_gemm(
    codes: Tensor, scales: Tensor | None, layer: ExpertLayer, rows: ExpertRows, out: Tensor, shape: E4m3Shape, *,
    alpha: float, limit: float,
) -> None:  # fmt: skip
    """One layer: with `scales` the first, whose results are codes in `out`; without, the second, in bf16."""
    from rose_dist.kernels.cute import mxfp4_experts_e4m3 as cute  # noqa: PLC0415 - it loads the compiler

    tiling = shape.tiling(layer.weight.columns // BLOCK)
    launch_grouped(cute.launcher, codes, scales, layer, rows, out, tiling, scales is not None, alpha, limit)


def require(device: torch.device) -> None:
    """Raises `UnsupportedArchError` where rows can't be in FP8."""
    if device.type != "cuda":
        raise UnsupportedArchError(f"--moe-activations fp8 needs a Hopper GPU, not {device}; choose bf16")
    arch = device_info(device.index).arch
    if not arch.hopper:
        raise UnsupportedArchError(f"--moe-activations fp8 needs a Hopper GPU, this one is {arch}; choose bf16")


def e4m3_codes(values: Tensor) -> Tensor:
    """Values rounded to e4m3, saturating, in their own dtype."""
    rounded = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return rounded.to(values.dtype)


def dequantize_near(weight: PackedMxfp4, expert: int) -> Tensor:
    """fp32 [rows, columns]: the weights as the kernels take them, scales 2^`SPAN` below their row's largest raised."""
    blocks, scales = weight.load(expert)
    least = scales.amax(1, keepdim=True).int() - SPAN
    return dequantize_mxfp4(blocks, torch.maximum(scales.int(), least).to(torch.uint8), torch.float32)


def reference(
    x: Tensor, gate_up: ExpertLayer, down: ExpertLayer, rows: ExpertRows, limit: float, alpha: float = ALPHA
) -> Tensor:
    """`expert_mlp_e4m3` in torch, on any device, but for the tensor cores' precision. Rows of no expert are 0."""
    out = x.new_zeros(x.shape[0], down.weight.rows)
    up = 2.0**ACTIVATION_EXPONENT
    for expert, (start, count) in enumerate(zip(rows.offsets.tolist(), rows.counts.tolist(), strict=False)):
        if not count:
            continue
        part = slice(start, start + count)
        wide = x[part].float()
        scale = wide.abs().amax(1, keepdim=True).clamp(min=MIN_AMAX) * (1.0 / E4M3_MAX)
        y = e4m3_codes(wide * (1.0 / scale)) @ dequantize_near(gate_up.weight, expert).T * scale
        y = y if gate_up.bias is None else y + gate_up.bias[expert].float()
        gate, linear = y[:, 0::2].clamp(max=limit), y[:, 1::2].clamp(-limit, limit)
        h = e4m3_codes(gate * torch.sigmoid(alpha * gate) * (linear + 1) * up)
        z = h @ dequantize_near(down.weight, expert).T / up
        out[part] = (z if down.bias is None else z + down.bias[expert].float()).to(x.dtype)
    return out


@checks.once
def _check(x: Tensor, gate_up: ExpertLayer, down: ExpertLayer, rows: ExpertRows) -> None:
    checks.shape("x", x, None, gate_up.weight.columns)
    checks.dtype("x", x, torch.bfloat16, *(() if x.is_cuda else (torch.float32,)))
    checks.dense("x", x)
    check_layer(*gate_up, x, rows)
    if down.weight.columns * 2 != gate_up.weight.rows:
        raise checks.fail("down.weight", f"has {down.weight.columns} columns; needs {gate_up.weight.rows // 2}")
    check_layer(*down, x, rows)
