"""Rotary position embedding, applied in place to queries and keys."""

from __future__ import annotations

from torch import Tensor


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the NeoX halves of every head in place: (a, b) → (a·cos − b·sin, b·cos + a·sin).

    Args:
        q: [tokens, query heads, head_dim].
        k: [tokens, key heads, head_dim].
        cos, sin: [tokens, head_dim / 2], of the same dtype, already scaled by YaRN's concentration.
    """
    for x in (q, k):
        half = x.shape[-1] // 2
        c, s = cos[:, None], sin[:, None]
        first, second = x[..., :half], x[..., half:]
        rotated = first * c - second * s
        second.mul_(c).add_(first * s)
        first.copy_(rotated)
