"""What the kernels that assign packed rows share: ids, shared memory, and where each expert starts."""

from __future__ import annotations

from typing import Any

from rose_dist.kernels import vector
from rose_dist.kernels.dsl import Int32, Int64, Uint8, Uint16, Uint32, const_expr, cute, cutlass, range_constexpr
from rose_dist.kernels.variants import WARP


def shared_integers(count: int) -> Any:
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
def scatter_scales(
    source: Int64, packed: Int64, slot: Int32, group_rows: Int32, blocks: cutlass.Constexpr, lane: Int32,
    lanes: cutlass.Constexpr,
) -> None:  # fmt: skip
    """A row's fp32 scales into its places of [groups, blocks, group_rows], by `lanes` threads."""
    first = Int64(slot // group_rows) * blocks * group_rows + slot % group_rows
    for at in range(lane, blocks, lanes):
        target = packed + (first + Int64(at) * group_rows) * 4
        vector.scalar(target, Uint32)[0] = vector.scalar(source + Int64(at) * 4, Uint32)[0]


@cute.jit
def local_expert(ids: Int64, pair: Int32, first_expert: Int32, experts: cutlass.Constexpr) -> Int32:
    """A pair's expert counted from `first_expert`, −1 if not among the `experts`. ids: address of int32 [pairs]."""
    local = vector.scalar(ids + Int64(pair) * 4, Int32)[0] - first_expert
    held = Int32(-1)
    if (local >= 0) & (local < experts):
        held = local
    return held


@cute.jit
def scan_starts(  # noqa: PLR0912 - half of them are decided at compile time
    counts: cute.Tensor, starts: cute.Tensor, totals: cute.Tensor, layout: cutlass.Constexpr,
    experts: cutlass.Constexpr, threads: cutlass.Constexpr,
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


def _padded(count: Any, layout: Any) -> Any:
    if layout.alignment == 1:
        return count
    return (count + (layout.alignment - 1)) // layout.alignment * layout.alignment
