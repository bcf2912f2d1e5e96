"""y = x Wᵀ + b of at most 16 rows: the weights are read once, as fast as memory gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.linear import linear
from rose_dist.kernels.variants import LINEAR_SHAPES

MAX_ROWS = 16
INPUT_MULTIPLE, OUTPUT_MULTIPLE = 32, 16


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `small_linear` takes these on a GPU. Layers of other sizes are cuBLAS's."""
    return (
        0 < x.shape[0] <= MAX_ROWS
        and x.dtype == weight.dtype == torch.bfloat16
        and weight.shape[1] % INPUT_MULTIPLE == 0
        and weight.shape[0] % OUTPUT_MULTIPLE == 0
    )


def small_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x Wᵀ + b.

    Args:
        x: bf16 [rows, in]; up to 16 rows, which may be strided.
        weight: bf16 [out, in]; `in` a multiple of 32, `out` of 16. Not to be written by the launch just before: it is
            read while that one still runs.
        bias: bf16 [out] or None.
        out_dtype: bfloat16, the default, or float32.

    Returns:
        [rows, out]. Sums are fp32, rounded once; a row's result does not depend on the others.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit.
    """
    out_dtype = out_dtype or x.dtype
    _check(x, weight, bias, out_dtype)
    if not x.is_cuda:
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(out_dtype)
    from rose_dist.kernels.cute import small_linear as cute  # noqa: PLC0415 - it loads the compiler

    rows, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    launcher = cute.launcher(
        launch.device(x).arch, inputs, LINEAR_SHAPES.select(rows), -(-rows // 8), out_dtype == torch.float32
    )
    launch.run(launcher, x, x, x.stride(0), weight, bias, out, rows, outputs)
    return out


@checks.once
def _check(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    check_few_rows(x, weight, bias, MAX_ROWS)
    if bias is not None:
        checks.dense("bias", bias)
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise checks.fail("out_dtype", f"is {out_dtype}; allowed: torch.bfloat16, torch.float32")


def check_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, most: int) -> None:
    """Of the layers whose weights stream past up to `most` rows. Where bias has to begin is theirs to check."""
    checks.shape("weight", weight, None, None)
    outputs, inputs = weight.shape
    checks.shape("x", x, None, inputs)
    checks.dtype("x", x, torch.bfloat16)
    checks.dtype("weight", weight, torch.bfloat16)
    checks.rows("x", x)
    checks.dense("weight", weight)
    checks.same_device("weight", weight, x.device)
    checks.multiple("weight's inputs", inputs, INPUT_MULTIPLE, "a warp reads 32 at a time")
    checks.multiple("weight's outputs", outputs, OUTPUT_MULTIPLE, "tensor cores give 16 at a time")
    if not 0 < x.shape[0] <= most:
        raise checks.fail("x", f"has {x.shape[0]} rows; allowed are 1 … {most}")
    if bias is not None:
        checks.shape("bias", bias, outputs)
        checks.dtype("bias", bias, torch.bfloat16)
        checks.same_device("bias", bias, x.device)
