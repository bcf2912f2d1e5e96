"""y = x Wᵀ + b by whatever is fastest for so many rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels.linear import linear
from rose_dist.kernels.small_linear import fits, small_linear


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """
    Args:
        x: [rows, in].
        weight: [out, in].
        bias: [out] or None.
        out_dtype: `x`'s or fp32; None: `x`'s.

    Returns:
        [rows, out]. Few rows on a GPU are rounded once, to `out_dtype`; others to `x`'s dtype first.
    """
    if x.is_cuda and fits(x, weight):
        return small_linear(x, weight, bias, out_dtype=out_dtype)
    y = linear(x, weight, bias)
    return y if out_dtype is None else y.to(out_dtype)
