"""What ends a mixture-of-experts block and begins the next layer: combine, residual and RMS norm in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch, moe_combine
from rose_dist.kernels.rms_norm import rms_norm
from rose_dist.kernels.row_tiling import MAX_THREADS

VECTOR_BYTES = 16


def takes(hidden: int, dtype: torch.dtype) -> bool:
    """Whether `combine_norm` serves such rows: a thread for every 16 bytes."""
    size = hidden * dtype.itemsize
    return size % VECTOR_BYTES == 0 and size // VECTOR_BYTES <= MAX_THREADS


def combine_norm(
    rows: Tensor, slots: Tensor, weights: Tensor, residual: Tensor, norm_weight: Tensor, eps: float,
    live_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add each token's weighted sum to `residual`, in place, and normalise that.

    Args:
        rows: the experts' results [packed rows, hidden]. On a GPU the launch that makes them must wait for those before
            it before it lets others begin, and write none of the rest, which is read while it runs.
        slots: int32 [tokens, k], each pair's row, −1 for nothing.
        weights: fp32 [tokens, k].
        residual: [tokens, hidden] of the rows' dtype.
        norm_weight: [hidden] of the rows' dtype. Not to be written by the launches just before.
        live_rows: int32 [1] on a GPU; tokens from there on are not looked at, and their results any. Of few tokens it
            costs more to read than it saves.

    Returns:
        [tokens, hidden] of the rows' dtype. Sums are rounded to it before the residual is added, and that sum before it
        is normalised, as `combine` and `add_rms_norm` do one after the other.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit.
    """
    check(rows, slots, weights, residual, norm_weight)
    checks.live_rows(live_rows, rows.device)
    tokens, hidden = residual.shape
    if not rows.is_cuda:
        residual += moe_combine.reference(rows, slots, weights).to(rows.dtype)
        return rms_norm(residual, norm_weight, eps)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    if tokens:
        from rose_dist.kernels.cute import combine_norm as cute  # noqa: PLC0415 - it loads the compiler

        launcher = cute.launcher(launch.device(out).arch, slots.shape[1], hidden, rows.dtype, live_rows is not None)
        launch.run(
            launcher, out, rows, rows.stride(0), slots, weights, residual, residual, norm_weight, out, live_rows,
            eps, tokens,
        )  # fmt: skip
    return out


def check(rows: Tensor, slots: Tensor, weights: Tensor, residual: Tensor, norm_weight: Tensor) -> None:
    """Raises `KernelArgumentError` for what `combine_norm` does not take."""
    checks.shape("rows", rows, None, None)
    checks.dtype("rows", rows, torch.bfloat16, torch.float16, torch.float32)
    checks.rows("rows", rows)
    hidden = rows.shape[1]
    if not takes(hidden, rows.dtype):
        raise checks.fail("rows", f"have {hidden} elements; needs a multiple of 16 bytes, at most {MAX_THREADS} times")
    checks.shape("slots", slots, None, None)
    checks.shape("residual", residual, slots.shape[0], hidden)
    checks.shape("norm_weight", norm_weight, hidden)
    for name, tensor in (("residual", residual), ("norm_weight", norm_weight)):
        checks.dtype(name, tensor, rows.dtype)
        checks.same_device(name, tensor, rows.device)
        checks.dense(name, tensor)
    for name, tensor, dtype in (("slots", slots, torch.int32), ("weights", weights, torch.float32)):
        checks.shape(name, tensor, *slots.shape)
        checks.dtype(name, tensor, dtype)
        checks.same_device(name, tensor, rows.device)
        checks.dense(name, tensor, 4)
