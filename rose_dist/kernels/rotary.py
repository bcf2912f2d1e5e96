"""Rotary position embedding of queries and keys, and the keys' and values' way into the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import qk_norm
from rose_dist.kernels.qk_norm import PagedCache, Rotary, reference_rotary


def rotate_and_store(qkv: Tensor, key_heads: int, cos: Tensor, sin: Tensor, cache: PagedCache) -> Tensor:
    """Rotate the NeoX halves of every query and key head, (a, b) → (a·cos − b·sin, b·cos + a·sin), and write keys and
    values to the cache.

    Args:
        qkv: [tokens, query heads + 2 · key heads, head_dim], a fused projection's output; overwritten.
        cos, sin: fp32 [tokens, head_dim / 2], already scaled by YaRN's concentration.
        cache: keys, values [slots, key heads, head_dim], and each token's slot.

    Returns:
        The rotated queries [tokens, query heads, head_dim], a view of `qkv`.
    """
    q, k, v = qkv.split_with_sizes([qkv.shape[1] - 2 * key_heads, key_heads, key_heads], 1)
    if qkv.is_cuda:
        qk_norm.qk_norm_rope_cache(q, k, v, cache, cos, sin)
        return q
    _rotate(qkv[:, :-key_heads], cos, sin)
    cache.keys.index_copy_(0, cache.slots, k)
    cache.values.index_copy_(0, cache.slots, v)
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Every head of `x` [tokens, heads, head_dim], in place."""
    if x.dtype != torch.float32:
        x.copy_(reference_rotary(x, cos, sin, Rotary.NEOX))
        return
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, dim=-1)
    rotated = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
