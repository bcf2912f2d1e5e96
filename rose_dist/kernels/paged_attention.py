"""Attention over a paged cache with per-head sinks, in torch operations that need nothing from the host.

They run on any device, can be captured in a CUDA graph and are the oracle of faster kernels. In the online softmax the
sink stands once: softmax([scale · q·K, sink]) without the sink's column, times V.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    first: Tensor,
    lengths: Tensor,
    sinks: Tensor,
    *,
    window: int | None,
    block_size: int,
    scale: float,
    out: Tensor,
) -> None:
    """One query a sequence, at the sequence's last position.

    Args:
        q: [n, query heads, head_dim]; query head h reads key head h · key heads / query heads.
        keys, values: [slots, key heads, head_dim], one layer's cache; block b is slots b · block_size and on.
        tables: int32 [n, most blocks], the blocks of each sequence; what stands behind the last one is any block.
        first: int32 [n], index, counted in blocks from the sequence's start, of `tables[:, 0]`.
        lengths: int32 [n], tokens of each sequence, the query's included; 0: no sequence, whose output is zeros.
        sinks: [query heads], logits.
        window: tokens that a query sees, its own included; None sees all.
        out: [n, query heads, head_dim], written.
    """
    n, query_heads, head_dim = q.shape
    key_heads = keys.shape[1]
    width = tables.shape[1]
    if window is not None:
        width = min(width, -(-window // block_size) + 1)
        # The table may still hold a block that the window has left.
        skipped = ((lengths - window).clamp(min=0) // block_size - first).clamp(min=0)
        tables = tables.gather(1, (skipped[:, None] + _range(width, q)).clamp(max=tables.shape[1] - 1).long())
        first = first + skipped
    slots = (tables[:, :width, None] * block_size + _range(block_size, q)).view(n, -1).long()
    positions = first[:, None] * block_size + _range(width * block_size, q)
    visible = positions < lengths[:, None]
    if window is not None:
        visible &= positions >= (lengths - window)[:, None]
    k, v = (x[slots].transpose(1, 2) for x in (keys, values))
    grouped = q.reshape(n, key_heads, -1, head_dim)
    scores = (grouped @ k.transpose(2, 3)).float() * scale
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    column = sinks.float().view(1, key_heads, -1, 1).expand(n, -1, -1, 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1].to(q.dtype)
    # Padding may read slots that hold no number.
    v = v.masked_fill(~visible[:, None, :, None], 0.0)
    out.copy_((weights @ v).view(n, query_heads, head_dim))


def prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    sinks: Tensor,
    *,
    start: int,
    first: int,
    window: int | None,
    scale: float,
    out: Tensor,
) -> None:
    """Neighbouring tokens of one sequence, causal.

    Args:
        q: [tokens, query heads, head_dim], at positions `start` and on.
        slots: int64 [keys], the cache slots of positions `first` to `start + tokens − 1`.
        out: [tokens, query heads, head_dim], written.

    Others as `decode`. Works in pieces of queries, so that the scores stay below `SCORES` elements.
    """
    tokens, query_heads, head_dim = q.shape
    key_heads = keys.shape[1]
    group = query_heads // key_heads
    piece = max(1, SCORES // (query_heads * slots.shape[0]))
    column = sinks.float().view(key_heads, group, 1, 1)
    for begin in range(0, tokens, piece):
        end = min(begin + piece, tokens)
        low = first if window is None else max(first, start + begin - window + 1)
        high = start + end
        seen = slots[low - first : high - first]
        k, v = keys[seen].permute(1, 2, 0)[:, None], values[seen].transpose(0, 1)[:, None]
        queries = q[begin:end].view(end - begin, key_heads, group, head_dim).permute(1, 2, 0, 3)
        scores = (queries @ k).float() * scale
        key, query = _range(high - low, q) + low, (_range(end - begin, q) + start + begin)[:, None]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        scores.masked_fill_(hidden, -torch.inf)
        scores = torch.cat([scores, column.expand(-1, -1, end - begin, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :-1].to(q.dtype)
        out[begin:end] = (weights @ v).permute(2, 0, 1, 3).reshape(end - begin, query_heads, head_dim)


SCORES = 1 << 28
"""Elements of the largest matrix of scores."""


def _range(end: int, like: Tensor) -> Tensor:
    return torch.arange(end, dtype=torch.int32, device=like.device)
