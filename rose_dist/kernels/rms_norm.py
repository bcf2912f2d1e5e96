"""Root-mean-square normalisation, alone or fused with the residual addition before it and quantisation after it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch
from rose_dist.kernels.formats import BlockFormat, BlockOutput, ScaleLayout
from rose_dist.kernels.quantize import quantize
from rose_dist.kernels.row_tiling import (
    LONG_ROW_BYTES,
    QUANTIZE_SHAPES,
    ROW_SHAPES,
    SHORT_QUANTIZE_SHAPES,
    SHORT_ROW_BYTES,
    RowShape,
)

MAX_HIDDEN = 16384


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, weight_bias: float = 0.0, out: Tensor | None = None,
    ends_chain: bool = False,
) -> Tensor:  # fmt: skip
    """Scale every row of `x` to unit root mean square, times `weight`.

    Args:
        x: [rows, hidden], fp32, fp16 or bf16; rows may be strided.
        weight: [hidden], of `x`'s dtype or fp32.
        eps: added to the mean square.
        weight_bias: added to every weight (1.0 where a checkpoint stores offsets from one).
        out: [rows, hidden] of `x`'s dtype to write to; may be `x`.
        ends_chain: the next launch on the stream may read what those before this one have written before it waits.

    Returns:
        [rows, hidden] of `x`'s dtype. Computed in fp32: x · rsqrt(mean(x²) + eps) · weight, then rounded once.

    Raises:
        KernelArgumentError: on a GPU, for a shape, dtype, stride or address that the kernel can't take.
    """
    if not x.is_cuda:
        result = _reference(x, weight, eps, weight_bias)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, eps, weight_bias, out=out, ends_chain=ends_chain)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_bias: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)`, and the sum as the next residual.

    The sum is rounded to the residual's dtype before it is normalised, as the reference models do.

    Args:
        x, residual: [rows, hidden] of one dtype.

    Returns:
        normed, new residual: [rows, hidden] each.
    """
    if not x.is_cuda:
        total = x + residual
        return _reference(total, weight, eps, weight_bias), total
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, weight, eps, weight_bias, residual=residual, total=total, out=out)
    return out, total


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor,
    eps: float,
    fmt: BlockFormat,
    *,
    layout: ScaleLayout = ScaleLayout.ROWS,
    residual: Tensor | None = None,
    weight_bias: float = 0.0,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`quantize(rms_norm(x + residual))` without rounding to `x`'s dtype between the two.

    Args:
        residual: [rows, hidden] of `x`'s dtype, or None to normalise `x` itself.
        fmt, layout, global_scale: as for `quantize`.

    Returns:
        codes, scales: as `quantize` gives them; and the new residual, None without one.
    """
    if not x.is_cuda:
        total = None if residual is None else x + residual
        normed = _reference_fp32(x if total is None else total, weight, eps, weight_bias)
        return *quantize(normed, fmt, layout=layout, global_scale=global_scale), total
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    checks.global_scale(fmt, global_scale, x.device)
    codes, scales = launch.empty_quantized(fmt, layout, x.shape[0], x.shape[1], x.device)
    _launch(
        x, weight, eps, weight_bias, residual=residual, total=total, out=codes, scales=scales,
        quantized=BlockOutput(fmt, layout, x.shape[1]), global_scale=global_scale,
    )  # fmt: skip
    return codes, scales, total


def _reference_fp32(x: Tensor, weight: Tensor, eps: float, weight_bias: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + weight_bias)


def _reference(x: Tensor, weight: Tensor, eps: float, weight_bias: float) -> Tensor:
    if x.dtype == weight.dtype == torch.float32 and weight_bias == 0.0:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return _reference_fp32(x, weight, eps, weight_bias).to(x.dtype)


def _launch(
    x: Tensor, weight: Tensor, eps: float, weight_bias: float, *, out: Tensor, residual: Tensor | None = None,
    total: Tensor | None = None, quantized: BlockOutput | None = None, scales: Tensor | None = None,
    global_scale: Tensor | None = None, ends_chain: bool = False,
) -> None:  # fmt: skip
    launcher, padded_rows = _prepare(x, weight, residual, total, out, weight_bias, quantized, ends_chain)
    rows = x.shape[0]
    if rows:
        launch.run(
            launcher, x, x, x.stride(0), weight, residual, 0 if residual is None else residual.stride(0), total,
            out, out.stride(0), scales, padded_rows, global_scale, rows, eps,
        )  # fmt: skip


@checks.once
def _prepare(
    x: Tensor, weight: Tensor, residual: Tensor | None, total: Tensor | None, out: Tensor, weight_bias: float,
    quantized: BlockOutput | None, ends_chain: bool,
) -> tuple[jit.Launcher, int]:  # fmt: skip
    """The kernel for arguments that have been checked, and the rows of the scales."""
    _check(x, weight, residual, out if quantized is None else None)
    rows, hidden = x.shape
    device = launch.device(x)
    pointers = [t.data_ptr() for t in (x, weight, out, residual, total) if t is not None]
    row_bytes = hidden * x.element_size()
    vector_bytes = launch.widest(device.arch, x.stride(0) * x.element_size(), row_bytes, *pointers)
    shape = row_shape(row_bytes, rows // device.sms, residual is not None, quantized is not None)
    from rose_dist.kernels.cute import rms_norm as cute  # noqa: PLC0415 - it loads the compiler

    launcher = cute.launcher(
        device.arch, x.dtype, weight.dtype, hidden, shape, vector_bytes, weight_bias, residual is not None, quantized,
        ends_chain or row_bytes > LONG_ROW_BYTES,
    )  # fmt: skip
    return launcher, 0 if quantized is None else quantized.layout.padded_rows(rows)


def row_shape(row_bytes: int, rows_for_each_sm: int, residual: bool, quantized: bool) -> RowShape:
    """How a norm spreads its rows."""
    short = row_bytes <= SHORT_ROW_BYTES
    if quantized and short and not residual:
        return SHORT_QUANTIZE_SHAPES.select(rows_for_each_sm)
    shape = (QUANTIZE_SHAPES if quantized else ROW_SHAPES).select(rows_for_each_sm)
    if row_bytes > LONG_ROW_BYTES and not rows_for_each_sm:
        # H200, 64 rows of 7168: 1.48 for 1.65 us, 1.73 for 1.77 with a residual; the same with quantised results.
        return replace(shape, bytes=32)
    # H200, 2^20 rows of 128: 254 for 258 us without quantisation, 222 for 233 with FP8, 242 for 252 with MXFP8.
    return replace(shape, clusters=True) if short and residual and shape.streams else shape


def _check(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor | None) -> None:
    checks.shape("x", x, None, None)
    checks.dtype("x", x, torch.bfloat16, torch.float16, torch.float32)
    checks.rows("x", x)
    checks.multiple("x's hidden size", x.shape[1], 16 // x.element_size(), "rows are read 16 bytes at a time")
    if x.shape[1] > MAX_HIDDEN:
        raise checks.fail("x", f"hidden size is {x.shape[1]}; at most {MAX_HIDDEN}")
    checks.shape("weight", weight, x.shape[1])
    checks.dtype("weight", weight, x.dtype, torch.float32)
    checks.same_device("weight", weight, x.device)
    checks.dense("weight", weight)
    for name, other in (("residual", residual), ("out", out)):
        if other is not None:
            checks.shape(name, other, *x.shape)
            checks.dtype(name, other, x.dtype)
            checks.same_device(name, other, x.device)
            checks.rows(name, other)
