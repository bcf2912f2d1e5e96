"""Which rows the kernels of the experts multiply together: segments of up to so many rows of one expert.

Segments are numbered by expert, then row. All of this happens in every block, in shared memory.
"""

from __future__ import annotations

from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.expert_slots import scan_starts, shared_integers
from rose_dist.kernels.dsl import Int32, Int64, cute, cutlass, range_constexpr
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.variants import WARP


def load_factors(rescales: list[Any], experts: int, threads: int) -> Any:
    """The bits of each rescaling of the experts that this thread counts; the last one's beyond."""
    return [
        [vector.scalar(rescale + Int64(_own(first, experts)) * 4, Int32)[0] for rescale in rescales]
        for first in range(0, experts, threads)
    ]


def load_experts(counts: Any, offsets: Any, factors: Any, experts: int, threads: int) -> Any:
    """Number, rows, first row and factors of the experts that this thread counts; the last one's beyond."""
    mine = []
    for first, own in zip(range(0, experts, threads), factors, strict=True):
        at = Int64(_own(first, experts))
        start = Int32(ptx.load_relaxed_u64(offsets + at * 8, "gpu"))
        count = Int32(ptx.load_relaxed(counts + at * 4, "gpu"))
        mine.append((cute.arch.thread_idx()[0] + first, count, start, *own))
    return mine


def _own(first: int, experts: int) -> Any:
    return vector.min_of(cute.arch.thread_idx()[0] + first, Int32(experts - 1))


@cute.jit
def count_segments(
    mine: list[Any], starts: cute.Tensor, rows: cutlass.Constexpr, experts: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Where each expert's segments start, into Int32 [experts + 1]; the last is their number."""
    needed, totals = shared_integers(experts), shared_integers(threads // WARP)
    for i in range_constexpr(len(mine)):
        expert, count = mine[i][:2]
        if expert < experts:
            needed[expert] = (count + (rows - 1)) // rows
    cute.arch.sync_threads()
    scan_starts(needed, starts, totals, PackedLayout(), experts, threads)


@cute.jit
def list_segments(
    mine: list[Any], starts: cute.Tensor, segments: list[cute.Tensor], base: Int32, end: Int32,
    rows: cutlass.Constexpr, experts: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Of segments `base` to `end`: the expert, its first row, its rows, and the bits of its factors."""
    for i in range_constexpr(len(mine)):
        expert, count, start = mine[i][:3]
        if expert < experts:
            own = starts[expert]
            for segment in range(vector.max_of(own, base), vector.min_of(starts[expert + 1], end)):
                done = (segment - own) * rows
                segments[0][segment - base] = Int32(expert)
                segments[1][segment - base] = start + done
                segments[2][segment - base] = vector.min_of(count - done, Int32(rows))
                for j in range_constexpr(3, len(segments)):
                    segments[j][segment - base] = mine[i][j]
    cute.arch.sync_threads()


@cute.jit
def list_even_segments(
    mine: list[Any], segments: list[cute.Tensor], rows: cutlass.Constexpr, experts: cutlass.Constexpr,
    threads: cutlass.Constexpr, unit: cutlass.Constexpr = 1,
) -> Int32:  # fmt: skip
    """All segments, as `list_segments`; returns their number.

    Those of an expert have the same number of rows, up to one, or a multiple of `unit` except for the last; and those
    with most come first: blocks that take every so manieth item then have about the same work.
    """
    sizes, starts = shared_integers(experts), shared_integers(experts + 1)
    even = [_even_rows(count, rows, unit) for _, count, _, _ in mine]
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


def _even_rows(count: Any, rows: int, unit: int) -> Any:
    """Most rows of an expert's segments, if they are as even as multiples of `unit` can be."""
    needed = vector.max_of((count + (rows - 1)) // rows, Int32(1))
    each = (count + (needed - 1)) // needed
    return each if unit == 1 else (each + (unit - 1)) // unit * unit


@cute.jit
def _larger_than(sizes: cute.Tensor, own: Int32, count: cutlass.Constexpr) -> Int32:
    """How many of `sizes`, all of them different, are larger than number `own`."""
    size, larger = sizes[own], Int32(0)
    for other in cutlass.range(count, unroll=16):
        larger += Int32(sizes[other] > size)
    return larger
