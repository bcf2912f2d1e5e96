"""Attention over a paged KV cache with per-head sinks: the CPU implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionBlock:
    """Queries of one shape that attend together: many one-token queries, or one sequence's chunk.

    rows: the queries' rows in the step's token batch, in order.
    slots: int64 [sequences · keys], flat cache slots of each sequence's keys, padded with any valid slot.
    mask: [sequences, 1, queries or 1, keys], of the activations' dtype; 0 where a query sees a key, −inf elsewhere.
    """

    rows: slice
    slots: Tensor
    mask: Tensor

    @property
    def sequences(self) -> int:
        return self.mask.shape[0]


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, block: AttentionBlock, scale: float, sinks: Tensor, target: Tensor
) -> None:
    """softmax([scale · q·K, sink]) without the sink's column, times V.

    Flash attention leaves out the sink; with its log-sum-exp the sink's share of the denominator is taken off
    afterwards: exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse − sink). The sink so enters once, whatever the splits.

    Args:
        q: [tokens, query heads, head_dim], the whole step's; query head h reads key head h · key heads / query heads.
        keys, values: [slots, key heads, head_dim], one layer's cache.
        sinks: [query heads], logits.
        target: like `q`, dense; the block's rows are written.
    """
    q, target = q[block.rows], target[block.rows]
    tokens, query_heads, head_dim = q.shape
    key_heads = keys.shape[1]
    group = query_heads // key_heads
    n = block.sequences
    k = keys.index_select(0, block.slots).view(n, -1, key_heads, head_dim)
    v = values.index_select(0, block.slots).view(n, -1, key_heads, head_dim)
    if tokens == n:
        # One query a sequence: the query heads of a key head stand where flash attention expects positions.
        queries = q.view(n, key_heads, group, head_dim)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    else:
        assert n == 1
        queries = q.view(tokens, key_heads, group, head_dim).permute(1, 2, 0, 3)
        k, v = (x[0].transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, k, v, 0.0, False, attn_mask=block.mask, scale=scale
    )
    if tokens == n:
        share = torch.sigmoid(lse - sinks.view(key_heads, group))
        torch.mul(out, share[..., None].to(out.dtype), out=target.view(n, key_heads, group, head_dim))
    else:
        share = torch.sigmoid(lse - sinks.view(key_heads, group, 1))
        by_heads = target.view(tokens, key_heads, group, head_dim).permute(1, 2, 0, 3)
        torch.mul(out, share[..., None].to(out.dtype), out=by_heads)
