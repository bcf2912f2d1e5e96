"""What ends one layer and begins the next, of one token: combine, residual, norm, and queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import checks, combine_norm, launch, linear_rotary
from rose_dist.kernels.qk_norm import PagedCache

MOST_INPUTS, MOST_CHOSEN = 4096, 32
"""Of a row, and its experts."""


@dataclass(frozen=True)
class Unsummed:
    """One token's layer output before its experts' results are added up, and the norm that comes then.

    Arguments as for `combine_norm.combine_norm`, with rows in bf16. What is read is read early: nothing but `rows` may
    be written by the launch just before, which must wait before it lets others begin.
    """

    rows: Tensor
    slots: Tensor
    weights: Tensor
    residual: Tensor
    norm_weight: Tensor
    eps: float


def takes(tokens: int, weight: Tensor, top_k: int) -> bool:
    """Whether `combine_rotary` serves so many tokens, with a projection that `linear_rotary` takes."""
    return tokens == 1 and weight.shape[1] <= MOST_INPUTS and top_k <= MOST_CHOSEN


def combine_rotary(
    x: Unsummed, weight: Tensor, bias: Tensor, key_heads: int, cos: Tensor, sin: Tensor, cache: PagedCache
) -> tuple[Tensor, Tensor]:
    """`linear_rotary` of what `combine_norm` gives, to the bit, in one launch.

    Returns:
        The queries, bf16 [1, query heads, head_dim], and the sum [1, hidden]: not in place of `x.residual`.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit.
    """
    _check(x, weight, bias, key_heads, cos, sin, cache)
    if not x.rows.is_cuda:
        total = x.residual.clone()
        normed = combine_norm.combine_norm(x.rows, x.slots, x.weights, total, x.norm_weight, x.eps)
        return linear_rotary.linear_rotary(normed, weight, bias, key_heads, cos, sin, cache), total
    from rose_dist.kernels.cute import combine_rotary as cute  # noqa: PLC0415 - it loads the compiler

    head_dim = 2 * cos.shape[1]
    query_heads = weight.shape[0] // head_dim - 2 * key_heads
    total = torch.empty(x.residual.shape, dtype=x.residual.dtype, device=x.residual.device)
    out = torch.empty(1, query_heads, head_dim, dtype=total.dtype, device=total.device)
    launcher = cute.launcher(launch.device(out).arch, weight.shape[1], head_dim, x.slots.shape[1])
    launch.run(
        launcher, out, x.rows, x.rows.stride(0), x.slots, x.weights, x.residual, total, x.norm_weight, weight, bias,
        cos, sin, cache.slots, cache.keys, cache.values, cache.keys.stride(0), cache.keys.stride(1), out, x.eps,
        query_heads, key_heads,
    )  # fmt: skip
    return out, total


def _check(
    x: Unsummed, weight: Tensor, bias: Tensor, key_heads: int, cos: Tensor, sin: Tensor, cache: PagedCache
) -> None:
    combine_norm.check(x.rows, x.slots, x.weights, x.residual, x.norm_weight)
    linear_rotary.check(x.residual, weight, bias, key_heads, cos, sin, cache)
    if not takes(x.residual.shape[0], weight, x.slots.shape[1]):
        (tokens, inputs), chosen = x.residual.shape, x.slots.shape[1]
        allowed = f"1 token of {MOST_INPUTS} elements and {MOST_CHOSEN} experts"
        (tokens, inputs), chosen = x.residual.shape, x.slots.shape[1]
        allowed = f"1 token of {MOST_INPUTS} elements and {MOST_CHOSEN} experts"
        raise checks.fail("x", f"has {tokens} tokens of {inputs} elements and {chosen} experts; at most {allowed}")
