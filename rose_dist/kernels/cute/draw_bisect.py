"""A token drawn the likeliest first from more tokens than are sorted: its place is found by bisection."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import vector
from rose_dist.kernels.cute.cluster_row import (
    VECTOR,
    ClusterRow,
    octaves,
    ordered,
    pick,
    share,
    unordered,
    weight,
)
from rose_dist.kernels.cute.mxfp4_operands import load_shared_floats
from rose_dist.kernels.draw import RowSplit
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Uint32, Uint64, cute, range_constexpr

LEAST_KEY = 0x007FFFFF
"""`ordered` of −inf."""


@dataclass(frozen=True)
class BisectedDraw:
    """Part of a kernel. A place in the sorted row is a logit and an id: before it are the larger logits, and of the
    equal ones those of lower ids. Every step is a pass over the row and a sum over the cluster.
    """

    split: RowSplit

    @property
    def row(self) -> ClusterRow:
        return ClusterRow(self.split)

    @cute.jit
    def choose(
        self, row: Int32, partials: Int32, told: Int32, most: Float32, scale: Float32, rest: Float32, top_k: Int32,
        least: Uint32, top_p: Uint64, number: Uint64, out: Int64, columns: Int32,
    ) -> None:  # fmt: skip
        """Arguments: as `SortedDraw.choose` has them. The next turn is 1."""
        key, last = Uint32(LEAST_KEY), columns - 1
        turn, none = Int32(1), Uint32(0)
        if top_k > 0:
            key, last, turn = self.find(
                row, partials, told, turn, most, scale, rest, Boolean(True), Uint64(Uint32(top_k)), columns
            )
        whole = self.sum(row, partials, told, turn, most, scale, rest, Boolean(False), key, last, none)
        turn ^= 1
        if top_p != Uint64(0):
            key, last, turn = self.find(
                row, partials, told, turn, most, scale, rest, Boolean(False), share(top_p, whole), columns
            )
        inside = self.sum(row, partials, told, turn, most, scale, rest, Boolean(False), key, last, least)
        turn ^= 1
        target = cute.arch.mul_hi(number, inside) + Uint64(1)
        key, last, turn = self.find(row, partials, told, turn, most, scale, rest, Boolean(False), target, columns)
        if (self.row.rank() == 0) & (cute.arch.thread_idx()[0] == 0):
            vector.scalar(out, Int64)[0] = Int64(last)

    @cute.jit
    def find(
        self, row: Int32, partials: Int32, told: Int32, turn: Int32, most: Float32, scale: Float32, rest: Float32,
        by_count: Boolean, wanted: Uint64, columns: Int32,
    ) -> tuple[Uint32, Int32, Int32]:  # fmt: skip
        """The first place up to which, itself included, `wanted` tokens or weights come; the last one if none."""
        low, high, none = Uint32(LEAST_KEY), ordered(most), Uint32(0)
        while low < high:
            middle = high - (high - low) // Uint32(2)
            reached = self.sum(row, partials, told, turn, most, scale, rest, by_count, middle, columns, none)
            turn ^= 1
            if reached >= wanted:
                low = middle
            else:
                high = middle - Uint32(1)
        first, last = Int32(0), columns - 1
        while first < last:
            half = (first + last) // 2
            reached = self.sum(row, partials, told, turn, most, scale, rest, by_count, low, half, none)
            turn ^= 1
            if reached >= wanted:
                last = half
            else:
                first = half + 1
        return low, last, turn

    @cute.jit
    def sum(
        self, row: Int32, partials: Int32, told: Int32, turn: Int32, most: Float32, scale: Float32, rest: Float32,
        by_count: Boolean, key: Uint32, last: Int32, least: Uint32,
    ) -> Uint64:  # fmt: skip
        """Tokens, or weights from `least` on, of the logits above `key`'s and of the equal ones up to id `last`."""
        bound, mine = unordered(key), Uint64(0)
        for step in range(self.split.steps):
            values = load_shared_floats(self.row.place(row, step))
            for i in range_constexpr(VECTOR):
                value = values[i]
                if (value > bound) | ((value == bound) & (self.row.index(step) + i <= last)):
                    own = weight(octaves(value, most, scale, rest))
                    own = pick(own >= least, own, Uint32(0))
                    mine += Uint64(pick(by_count, Uint32(1), own))
        total, _, _ = self.row.row_sum(partials, told, turn, mine)
        return total
