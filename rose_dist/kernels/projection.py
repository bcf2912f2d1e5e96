"""y = x Wᵀ + b by whatever is fastest for so many rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels.linear import linear
from rose_dist.kernels.linear_add import MAX_ROWS, all_at_once, linear_add
from rose_dist.kernels.linear_rotary import linear_rotary, takes
from rose_dist.kernels.qk_norm import PagedCache
from rose_dist.kernels.rotary import rotate_and_store
from rose_dist.kernels.small_linear import fits, small_linear


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """
    Args:
        x: [rows, in].
        weight: [out, in].
        bias: [out] or None.
        out_dtype: `x`'s or fp32; None: `x`'s.

    Returns:
        [rows, out]. On a GPU they are rounded once, to `out_dtype`, unless there is a bias and rows are many; elsewhere
        to `x`'s dtype first.
    """
    if x.is_cuda and fits(x, weight):
        return small_linear(x, weight, bias, out_dtype=out_dtype)
    if x.is_cuda and out_dtype in (None, x.dtype) and all_at_once(x, weight):
        # A router: its weights come while the launch before still runs, where cuBLAS takes two launches behind it.
        return linear_add(x, weight, bias, None)
    if x.is_cuda and bias is None and out_dtype not in (None, x.dtype):
        # To widen bf16 logits took 77 us for 128 rows of a vocabulary of 201,088, beside 305 for the product.
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    y = linear(x, weight, bias)
    return y if out_dtype is None else y.to(out_dtype)


def project_heads(
    x: Tensor, weight: Tensor, bias: Tensor, key_heads: int, cos: Tensor, sin: Tensor, cache: PagedCache
) -> Tensor:
    """Queries of x, with keys and values in the cache.

    Args:
        x: [rows, in].
        weight: [heads · head_dim, in], of the query heads, then the key heads, then the value heads.
        bias: [heads · head_dim].
        cos, sin: fp32 [rows, head_dim / 2].
        cache: [slots, key heads, head_dim].

    Returns:
        [rows, query heads, head_dim], rotated.
    """
    heads, head_dim = weight.shape[0] // (2 * cos.shape[1]), 2 * cos.shape[1]
    if x.is_cuda and 0 < x.shape[0] <= MAX_ROWS and takes(weight, head_dim, cache.keys.dtype):
        return linear_rotary(x, weight, bias, key_heads, cos, sin, cache)
    return rotate_and_store(project(x, weight, bias).view(x.shape[0], heads, head_dim), key_heads, cos, sin, cache)
