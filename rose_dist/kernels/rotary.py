"""Rotary position embedding, applied in place to queries and keys."""

from __future__ import annotations

from torch import Tensor

from rose_dist.kernels import qk_norm


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the NeoX halves of every head in place: (a, b) → (a·cos − b·sin, b·cos + a·sin).

    Args:
        x: [tokens, heads, head_dim], the query heads and the key heads side by side.
        cos, sin: [tokens, 1, head_dim / 2], of the same dtype, already scaled by YaRN's concentration.
    """
    if x.is_cuda:
        qk_norm.rotate(x, cos.squeeze(1), sin.squeeze(1), qk_norm.Rotary.NEOX)
        return
    first, second = x.chunk(2, dim=-1)
    rotated = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
