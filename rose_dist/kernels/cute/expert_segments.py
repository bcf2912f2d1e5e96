"""Which rows the kernels of the experts multiply together: segments of up to so many rows of one expert.

Segments are numbered by expert, then row. All of this happens in every block, in shared memory.
"""

from __future__ import annotations

from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.expert_slots import scan_starts, shared_integers
from rose_dist.kernels.dsl import Int32, Int64, Uint32, cute, cutlass, range_constexpr
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.variants import WARP


def load_experts(counts: Any, offsets: Any, rescale: Any, experts: int, threads: int) -> Any:
    """Number, rows, first row and rescaling's bits of the experts that this thread counts; the last one's beyond.

    Past L1, which may be older than this launch where that has not waited for the one before.
    """
    mine = []
    for first in range(0, experts, threads):
        expert = cute.arch.thread_idx()[0] + first
        at = Int64(vector.min_of(expert, Int32(experts - 1)))
        start = Int32(ptx.load_relaxed_u64(offsets + at * 8, "gpu"))
        factor = vector.scalar(rescale + at * 4, Int32)[0]
        mine.append((expert, Int32(ptx.load_relaxed(counts + at * 4, "gpu")), start, factor))
    return mine


@cute.jit
def count_choice(
    ids: Int64, live_rows: Int64, first_expert: Int32, tokens: Int32, histogram: cute.Tensor, starts: cute.Tensor,
    top_k: cutlass.Constexpr, experts: cutlass.Constexpr, threads: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Rows of each expert into Int32 [experts], and where they start, into Int32 [experts + 1], in `PackedLayout()`.

    Addresses: ids int32 [tokens, top_k], live_rows int32 [1] or 0; read past L1.
    """
    thread, totals = cute.arch.thread_idx()[0], shared_integers(threads // WARP)
    for first in range_constexpr(0, experts, threads):
        if thread + first < experts:
            histogram[thread + first] = Int32(0)
    live = tokens
    if live_rows != 0:
        live = vector.min_of(Int32(ptx.load_relaxed(live_rows, "gpu")), tokens)
    cute.arch.sync_threads()
    # Ids of dead tokens are read too: they need not wait for the number of live ones.
    for pair in range(thread, tokens * top_k, threads):
        expert = Int32(ptx.load_relaxed(ids + Int64(pair) * 4, "gpu")) - first_expert
        if (expert >= 0) & (expert < experts) & (pair < live * top_k):
            ptx.add_shared(Uint32(histogram.iterator.toint()) + Uint32(expert) * Uint32(4), Uint32(1))
    cute.arch.sync_threads()
    scan_starts(histogram, starts, totals, PackedLayout(), experts, threads)


def counted_experts(histogram: Any, starts: Any, rescale: Any, experts: int, threads: int) -> Any:
    """What `load_experts` gives, after `count_choice`."""
    mine = []
    for first in range(0, experts, threads):
        expert = cute.arch.thread_idx()[0] + first
        at = vector.min_of(expert, Int32(experts - 1))
        mine.append((expert, histogram[at], starts[at], vector.scalar(rescale + Int64(at) * 4, Int32)[0]))
    return mine


@cute.jit
def count_segments(
    mine: list[Any], starts: cute.Tensor, rows: cutlass.Constexpr, experts: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Where each expert's segments start, into Int32 [experts + 1]; the last is their number."""
    needed, totals = shared_integers(experts), shared_integers(threads // WARP)
    for i in range_constexpr(len(mine)):
        expert, count, _, _ = mine[i]
        if expert < experts:
            needed[expert] = (count + (rows - 1)) // rows
    cute.arch.sync_threads()
    scan_starts(needed, starts, totals, PackedLayout(), experts, threads)


@cute.jit
def list_segments(
    mine: list[Any], starts: cute.Tensor, segments: list[cute.Tensor], base: Int32, end: Int32,
    rows: cutlass.Constexpr, experts: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Of segments `base` to `end`: the expert, its first row, its rows, and the bits of the rescaling."""
    for i in range_constexpr(len(mine)):
        expert, count, start, factor = mine[i]
        if expert < experts:
            own = starts[expert]
            for segment in range(vector.max_of(own, base), vector.min_of(starts[expert + 1], end)):
                done = (segment - own) * rows
                segments[0][segment - base] = Int32(expert)
                segments[1][segment - base] = start + done
                segments[2][segment - base] = vector.min_of(count - done, Int32(rows))
                segments[3][segment - base] = factor
    cute.arch.sync_threads()


@cute.jit
def list_even_segments(
    mine: list[Any], segments: list[cute.Tensor], rows: cutlass.Constexpr, experts: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """All segments, as `list_segments`; returns their number.

    Those of an expert have the same number of rows, up to one, and those with most come first: blocks that take every
    so manieth item then have about the same work.
    """
    sizes, starts = shared_integers(experts), shared_integers(experts + 1)
    even = [_even_rows(count, rows) for _, count, _, _ in mine]
    for i in range_constexpr(len(mine)):
        if mine[i][0] < experts:
            sizes[mine[i][0]] = even[i] * experts + (experts - 1 - mine[i][0])
    cute.arch.sync_threads()
    places = [Int32(experts) for _ in mine]
    for i in range_constexpr(len(mine)):
        if mine[i][0] < experts:
            places[i] = _larger_than(sizes, mine[i][0], experts)
    placed = [(place, *own[1:]) for place, own in zip(places, mine, strict=True)]
    count_segments(placed, starts, rows, experts, threads)
    for i in range_constexpr(len(mine)):
        expert, count, start, factor = mine[i]
        if expert < experts:
            own, end, each = starts[places[i]], starts[places[i] + 1], even[i]
            for segment in range(own, end):
                done = (segment - own) * each
                segments[0][segment] = Int32(expert)
                segments[1][segment] = start + done
                segments[2][segment] = vector.min_of(count - done, each)
                segments[3][segment] = factor
    cute.arch.sync_threads()
    return starts[experts]


def _even_rows(count: Any, rows: int) -> Any:
    """Most rows of an expert's segments, if they are as even as can be."""
    needed = vector.max_of((count + (rows - 1)) // rows, Int32(1))
    return (count + (needed - 1)) // needed


@cute.jit
def _larger_than(sizes: cute.Tensor, own: Int32, count: cutlass.Constexpr) -> Int32:
    """How many of `sizes`, all of them different, are larger than number `own`."""
    size, larger = sizes[own], Int32(0)
    for other in cutlass.range(count, unroll=16):
        larger += Int32(sizes[other] > size)
    return larger
