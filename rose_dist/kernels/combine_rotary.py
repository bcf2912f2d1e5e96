"""What lies between the experts of one layer and the attention of the next, for one token, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.combine_norm import check as check_combine
from rose_dist.kernels.combine_norm import combine_norm
from rose_dist.kernels.linear_rotary import check, linear_rotary
from rose_dist.kernels.qk_norm import PagedCache


@dataclass(frozen=True)
class Unsummed:
    """One token's experts' results before they are added to the residual and normalised, as `combine_norm` takes them.

    The launch that makes `rows` must wait for those before it before it lets others begin, as all that stream experts
    do; and it writes nothing else of this.
    """

    rows: Tensor
    """bf16 [packed rows, hidden]."""
    slots: Tensor
    """int32 [1, k]."""
    weights: Tensor
    """fp32 [1, k]."""
    residual: Tensor
    """bf16 [1, hidden]."""
    norm_weight: Tensor
    """bf16 [hidden]."""
    eps: float


def combine_rotary(
    x: Unsummed, weight: Tensor, bias: Tensor, key_heads: int, cos: Tensor, sin: Tensor, cache: PagedCache, *,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`combine_norm`, then `linear_rotary`, to the bit.

    Returns:
        The queries, bf16 [1, query heads, head_dim], and the new residual, a tensor of its own.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit.
    """
    check_combine(x.rows, x.slots, x.weights, x.residual, x.norm_weight)
    checks.shape("residual", x.residual, 1, None)
    total = torch.empty(x.residual.shape, dtype=x.residual.dtype, device=x.residual.device)
    if not x.rows.is_cuda:
        total.copy_(x.residual)
        normed = combine_norm(x.rows, x.slots, x.weights, total, x.norm_weight, x.eps)
        return linear_rotary(normed, weight, bias, key_heads, cos, sin, cache), total
    check(x.residual, weight, bias, key_heads, cos, sin, cache)
    from rose_dist.kernels.cute import combine_rotary as cute  # noqa: PLC0415 - it loads the compiler

    head_dim = 2 * cos.shape[1]
    query_heads = weight.shape[0] // head_dim - 2 * key_heads
    out = torch.empty(1, query_heads, head_dim, dtype=total.dtype, device=total.device)
    launcher = cute.launcher(launch.device(out).arch, weight.shape[1], head_dim, x.slots.shape[1])
    launch.run(
        launcher, out, x.rows, x.rows.stride(0), x.slots, x.weights, x.residual, total, x.norm_weight, weight, bias,
        cos, sin, cache.slots, cache.keys, cache.values, cache.keys.stride(0), cache.keys.stride(1), out, ahead,
        0 if ahead is None else ahead.nbytes, query_heads, key_heads, x.eps,
    )  # fmt: skip
    return out, total
