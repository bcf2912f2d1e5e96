"""The decode attention that `benchmarks/results/h200/attention.md` of 2026-11-30 measured, to compare with: a block for
each key head and each 128 or more keys of a request. To be deleted once both have been measured in one run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import launch

TILE = 16
MIN_TILES = 8
MAX_BLOCKS = 256


@dataclass(frozen=True)
class DecodeWorkspace:
    """Where the blocks that share a request leave their results."""

    partials: Tensor
    counters: Tensor

    @classmethod
    def allocate(
        cls, *, requests: int, query_heads: int, key_heads: int, head_dim: int, context: int, device: torch.device
    ) -> DecodeWorkspace:
        splits = max(1, min(-(-context // TILE) // MIN_TILES, MAX_BLOCKS // key_heads))
        rows = 8 if query_heads // key_heads <= 8 else 16
        shape = (requests, key_heads, splits, rows, partial_floats(head_dim))
        counters = torch.zeros(requests, key_heads, dtype=torch.int32, device=device)
        return cls(torch.empty(shape, dtype=torch.float32, device=device), counters)


def partial_floats(head_dim: int) -> int:
    """fp32 of a query head in a partial result."""
    return head_dim + 4


def decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, first: Tensor | None, lengths: Tensor, sinks: Tensor, *,
    window: int | None, block_size: int, scale: float, out: Tensor, workspace: DecodeWorkspace,
) -> Tensor:  # fmt: skip
    """As `rose_dist.kernels.paged_attention.decode`, unchecked."""
    from benchmarks.earlier_attention import paged_attention_decode as cute  # noqa: PLC0415 - it loads the compiler

    requests, query_heads, head_dim = q.shape
    key_heads = keys.shape[1]
    group = query_heads // key_heads
    device = launch.device(q)
    launcher = cute.launcher(device.arch, q.dtype, keys.dtype, head_dim, group > 8, block_size // TILE)
    launch.run(
        launcher, q, q, q.stride(0), keys, values, keys.stride(0), keys.stride(1), tables, tables.stride(0), first,
        lengths, None, sinks, out, workspace.partials, workspace.counters, requests, key_heads, group,
        1 << 30 if window is None else window, workspace.partials.shape[2], scale / math.log(2), 1.0, device.sms,
    )  # fmt: skip
    return out
