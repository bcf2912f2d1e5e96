"""Which packed row each (token, place in the top k) pair gets: by expert, then token, then place.

The order is that of a stable sort by expert, so it depends on the routing alone and not on which block came first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import checks, vector
from rose_dist.kernels.dsl import Int32, Int64, Uint8, Uint16, Uint32, const_expr, cute, cutlass, range_constexpr
from rose_dist.kernels.variants import WARP

MAX_EXPERTS = 2048
MAX_K = 32


@dataclass(frozen=True)
class PackedLayout:
    """Where each expert's rows start in the packed buffer.

    Without `rows_per_expert` experts follow one another, each at a multiple of `alignment` rows: 1 for kernels that take
    any start, 128 for DeepGEMM's contiguous layout. With it, expert e starts at row e · rows_per_expert, which is
    DeepGEMM's masked layout; pairs beyond an expert's last row are dropped.
    """

    alignment: int = 1
    rows_per_expert: int = 0

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise checks.fail("alignment", f"is {self.alignment}; must be at least 1")
        if self.rows_per_expert < 0 or self.rows_per_expert % self.alignment:
            raise checks.fail("rows_per_expert", f"is {self.rows_per_expert}; must be a multiple of {self.alignment}")

    def capacity(self, pairs: int, experts: int) -> int:
        """Rows that a buffer needs for any routing of so many pairs."""
        if self.rows_per_expert:
            return experts * self.rows_per_expert
        return pairs + min(pairs, experts) * (self.alignment - 1)

    def starts(self, counts: Tensor) -> Tensor:
        """[experts] counts to int64 [experts + 1]: where each expert's rows start, and where the last one's end."""
        padded = torch.full_like(counts, self.rows_per_expert, dtype=torch.int64)
        if not self.rows_per_expert:
            padded = (counts.long() + self.alignment - 1) // self.alignment * self.alignment
        return torch.cat([padded.new_zeros(1), padded.cumsum(0)])


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


def shared_integers(count: int):  # type: ignore[no-untyped-def]
    """An Int32 tensor [count] in the block's shared memory, unwritten."""
    return cute.make_tensor(cute.arch.alloc_smem(Int32, count), cute.make_layout(count))


@cute.jit
def copy_bytes(
    source: Int64, target: Int64, size: cutlass.Constexpr, vector_bytes: cutlass.Constexpr, lane: Int32,
    lanes: cutlass.Constexpr,
) -> None:  # fmt: skip
    """`size` bytes by `lanes` threads, `vector_bytes` (a power of two that divides `size`) at a time."""
    dtype = {1: Uint8, 2: Uint16}.get(vector_bytes, Uint32)
    count = vector_bytes * 8 // dtype.width
    for at in range(lane, size // vector_bytes, lanes):
        offset = Int64(at) * vector_bytes
        vector.store(
            target + offset, vector.load(source + offset, dtype, count, vector_bytes), dtype, count, vector_bytes
        )


@cute.jit
def local_expert(ids: Int64, pair: Int32, first_expert: Int32, experts: cutlass.Constexpr) -> Int32:
    """A pair's expert counted from `first_expert`, −1 if it is not among the `experts`. ids: address of int32 [pairs]."""
    local = vector.scalar(ids + Int64(pair) * 4, Int32)[0] - first_expert
    held = Int32(-1)
    if (local >= 0) & (local < experts):
        held = local
    return held


@cute.jit
def scan_starts(
    counts: cute.Tensor, starts: cute.Tensor, totals: cute.Tensor, layout: cutlass.Constexpr, experts: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:  # fmt: skip
    """`layout.starts` in shared memory, by all `threads` of the block.

    counts: Int32 [experts], complete and visible to the block. starts: Int32 [experts + 1], visible to the block after
    this. totals: Int32 [warps], scratch.
    """
    thread = cute.arch.thread_idx()[0]
    if const_expr(layout.rows_per_expert > 0):
        for first in range_constexpr(0, experts + 1, threads):
            if thread + first <= experts:
                starts[thread + first] = (thread + first) * layout.rows_per_expert
        cute.arch.sync_threads()
    else:
        each = (experts + threads - 1) // threads
        warp, lane = thread // WARP, thread % WARP
        mine = Int32(0)
        for i in range_constexpr(each):
            if thread * each + i < experts:
                mine += _padded(counts[thread * each + i], layout)
        inclusive = mine
        for step in range_constexpr(5):
            below = cute.arch.shuffle_sync_up(inclusive, offset=1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                inclusive += below
        if lane == WARP - 1:
            totals[warp] = inclusive
        cute.arch.sync_threads()
        running = inclusive - mine
        for other in range_constexpr(threads // WARP):
            if other < warp:
                running += totals[other]
        for i in range_constexpr(each):
            expert = thread * each + i
            if expert < experts:
                starts[expert] = running
                running += _padded(counts[expert], layout)
                if expert == experts - 1:
                    starts[experts] = running
        cute.arch.sync_threads()


def _padded(count, layout):  # type: ignore[no-untyped-def]
    if layout.alignment == 1:
        return count
    return (count + (layout.alignment - 1)) // layout.alignment * layout.alignment
