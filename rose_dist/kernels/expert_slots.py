"""Which packed row each (token, place in the top k) pair gets: by expert, then token, then place.

The order is that of a stable sort by expert, so it depends on the routing alone and not on which block came first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import checks

MAX_EXPERTS = 2048
MAX_K = 32
MAX_PAIRS = 2048
"""Most (token, place) pairs that every block counts for itself; their experts are kept in shared memory."""


@dataclass(frozen=True)
class PackedLayout:
    """Where each expert's rows start in the packed buffer.

    Without `rows_per_expert` experts follow one another, each at a multiple of `alignment` rows: 1 for kernels that
    take any start, 128 for DeepGEMM's contiguous layout. With it, expert e starts at row e · rows_per_expert, which is
    DeepGEMM's masked layout; pairs beyond an expert's last row are dropped (a token that names an expert once needs
    one row there, so `rows_per_expert` ≥ the most tokens is enough without duplicates).
    """

    alignment: int = 1
    rows_per_expert: int = 0

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise checks.fail("alignment", f"is {self.alignment}; must be at least 1")
        if self.rows_per_expert < 0 or self.rows_per_expert % self.alignment:
            raise checks.fail("rows_per_expert", f"is {self.rows_per_expert}; must be a multiple of {self.alignment}")

    def capacity(self, pairs: int, experts: int) -> int:
        """Rows that a buffer needs for any routing of so many pairs; a multiple of `alignment`."""
        if self.rows_per_expert:
            return experts * self.rows_per_expert
        most = pairs + min(pairs, experts) * (self.alignment - 1)
        return most // self.alignment * self.alignment

    def starts(self, counts: Tensor) -> Tensor:
        """[experts] counts to int64 [experts + 1]: where each expert's rows start, and where the last one's end."""
        padded = torch.full_like(counts, self.rows_per_expert, dtype=torch.int64)
        if not self.rows_per_expert:
            padded = (counts.long() + self.alignment - 1) // self.alignment * self.alignment
        return torch.cat([padded.new_zeros(1), padded.cumsum(0)])


COMPACT = PackedLayout()
"""Experts' rows side by side."""


def reference(
    ids: Tensor, live: int, first_expert: int, experts: int, layout: PackedLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots int32 [tokens, k] (−1: none), counts int32 [experts] and starts int64 [experts + 1] in torch.

    `ids` int32 [tokens, k]; ids that are not `first_expert` … `first_expert + experts − 1` have no slot, and neither
    have tokens from `live` on.
    """
    local = ids.long() - first_expert
    held = (local >= 0) & (local < experts)
    held[live:] = False
    keys = torch.where(held, local, experts).flatten()
    order = keys.argsort(stable=True)
    counts = torch.bincount(keys, minlength=experts + 1)[:experts]
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rank = torch.empty_like(keys)
    rank[order] = torch.arange(keys.numel())
    rank = rank - first[keys.clamp(max=experts)]
    held = held.flatten()
    if layout.rows_per_expert:
        held = held & (rank < layout.rows_per_expert)
        counts = counts.clamp(max=layout.rows_per_expert)
    starts = layout.starts(counts)
    slots = torch.where(held, starts[keys] + rank, -1)
    return slots.to(torch.int32).view(ids.shape), counts.to(torch.int32), starts
