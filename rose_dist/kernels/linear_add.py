"""x Wᵀ + b of a few rows, and a residual if there is one, with the weights on their way before x is there."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.linear import linear
from rose_dist.kernels.linear_shapes import fits_resident
from rose_dist.kernels.small_linear import INPUT_MULTIPLE, OUTPUT_MULTIPLE, check_few_rows

MAX_ROWS = 8
"""Columns of a tensor core's operand. More rows would need registers that hold weights on their way."""
MOST_ROWS = 128
"""Of `linear_add`: each 8 rows have blocks of their own, which read the weights again."""


def fits(weight: Tensor) -> bool:
    """Whether the launches that start like this one take such a weight [out, in]."""
    aligned = weight.shape[1] % INPUT_MULTIPLE == 0 and weight.shape[0] % OUTPUT_MULTIPLE == 0
    return aligned and weight.dtype is torch.bfloat16 and fits_resident(weight.shape[1])


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """residual + (x Wᵀ + b), the product rounded before it is added, as a linear layer alone would.

    Args:
        x: bf16 [rows, in], up to 128 rows, which may be strided. With more than 8 the weights should be few.
        weight: bf16 [out, in]; `in` a multiple of 32, `out` of 16. Neither it nor the bias may be written by the
            launches just before: they are read while those still run.
        bias: bf16 [out] or None.
        residual: bf16 [rows, out], dense, or None for nothing.

    Returns:
        bf16 [rows, out]. A row's result does not depend on the others.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit.
    """
    check(x, weight, bias, MOST_ROWS)
    rows, outputs = x.shape[0], weight.shape[0]
    if residual is not None:
        checks.shape("residual", residual, rows, outputs)
        checks.dtype("residual", residual, torch.bfloat16)
        checks.same_device("residual", residual, x.device)
        checks.dense("residual", residual, 4)
    if not x.is_cuda:
        product = reference(x, weight, bias)
        return product if residual is None else residual + product
    from rose_dist.kernels.cute import linear_add as cute  # noqa: PLC0415 - it loads the compiler

    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    launcher = cute.launcher(launch.device(x).arch, weight.shape[1], rows > MAX_ROWS)
    launch.run(launcher, x, x, x.stride(0), weight, bias, residual, out, rows, outputs)
    return out


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b in fp32, rounded once."""
    return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def all_at_once(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_add` takes these on a GPU with one block an SM at most, and so at once."""
    if not (x.dtype is torch.bfloat16 and 0 < x.shape[0] <= MOST_ROWS and fits(weight)):
        return False
    return weight.shape[0] // OUTPUT_MULTIPLE * -(-x.shape[0] // MAX_ROWS) <= launch.device(x).sms


def check(x: Tensor, weight: Tensor, bias: Tensor | None, most: int = MAX_ROWS) -> None:
    """Of the layers that take up to `most` rows."""
    check_few_rows(x, weight, bias, most)
    if not fits_resident(weight.shape[1]):
        raise checks.fail("weight", f"has {weight.shape[1]} inputs, which are too many, or have too few divisors")
    if bias is not None:
        checks.dense("bias", bias, 4)
