"""Queries, keys and values of a few rows in one launch: projection, rotary embedding, and the write into the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch, linear_add
from rose_dist.kernels.linear_add import fits, reference
from rose_dist.kernels.qk_norm import PagedCache
from rose_dist.kernels.rotary import rotate_and_store

HEAD_MULTIPLE = 16


def takes(weight: Tensor, head_dim: int, cache_dtype: torch.dtype) -> bool:
    """Whether `linear_rotary` serves such a layer on a GPU."""
    return fits(weight) and head_dim % HEAD_MULTIPLE == 0 and cache_dtype is torch.bfloat16


def linear_rotary(
    x: Tensor, weight: Tensor, bias: Tensor, key_heads: int, cos: Tensor, sin: Tensor, cache: PagedCache
) -> Tensor:
    """Project, rotate the NeoX halves of query and key heads, and write keys and values to the cache.

    Args:
        x: bf16 [rows, in], up to 8 rows, which may be strided.
        weight: bf16 [heads · head_dim, in], of the query heads, then the key heads, then the value heads; head_dim a
            multiple of 16. Neither it nor the bias may be written by the launches just before.
        bias: bf16 [heads · head_dim].
        cos, sin: fp32 [rows, head_dim / 2], already scaled by YaRN's concentration; like the weights, not written by
            the launches just before, and neither are `cache.slots`.
        cache: bf16 keys and values [slots, key heads, head_dim].

    Returns:
        The queries, bf16 [rows, query heads, head_dim]. The projection is rounded before it is rotated, as
        `rotate_and_store` does it.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit.
    """
    heads, head_dim = weight.shape[0] // (2 * cos.shape[1]), 2 * cos.shape[1]
    check(x, weight, bias, key_heads, cos, sin, cache)
    if not x.is_cuda:
        qkv = reference(x, weight, bias).view(x.shape[0], heads, head_dim)
        return rotate_and_store(qkv, key_heads, cos, sin, cache)
    from rose_dist.kernels.cute import linear_rotary as cute  # noqa: PLC0415 - it loads the compiler

    query_heads = heads - 2 * key_heads
    out = torch.empty(x.shape[0], query_heads, head_dim, dtype=x.dtype, device=x.device)
    launcher = cute.launcher(launch.device(x).arch, weight.shape[1], head_dim)
    launch.run(
        launcher, x, x, x.stride(0), weight, bias, cos, sin, cache.slots, cache.keys, cache.values,
        cache.keys.stride(0), cache.keys.stride(1), out, x.shape[0], query_heads, key_heads,
    )  # fmt: skip
    return out


def check(x: Tensor, weight: Tensor, bias: Tensor, key_heads: int, cos: Tensor, sin: Tensor, cache: PagedCache) -> None:
    """Raises `KernelArgumentError` for what `linear_rotary` does not take."""
    linear_add.check(x, weight, bias)
    rows, head_dim = x.shape[0], 2 * cos.shape[1]
    checks.multiple("head_dim", head_dim, HEAD_MULTIPLE, "a block has 16 outputs of one head")
    if weight.shape[0] % head_dim or weight.shape[0] // head_dim <= 2 * key_heads:
        raise checks.fail("weight", f"has {weight.shape[0]} outputs; needs whole heads of {head_dim}, some of queries")
    for name, table in (("cos", cos), ("sin", sin)):
        checks.shape(name, table, rows, head_dim // 2)
        checks.dtype(name, table, torch.float32)
        checks.same_device(name, table, x.device)
        checks.dense(name, table, 4)
    checks.indices("slots", cache.slots, rows, x.device)
    for name, stored in (("cache.keys", cache.keys), ("cache.values", cache.values)):
        checks.shape(name, stored, None, key_heads, head_dim)
        checks.dtype(name, stored, torch.bfloat16)
        checks.same_device(name, stored, x.device)
        checks.rows(name, stored, align=2)
    if cache.keys.stride() != cache.values.stride():
        raise checks.fail("cache.values", "must have the strides of cache.keys")
