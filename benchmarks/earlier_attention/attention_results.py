"""Merging the results of blocks that share a request, for `paged_attention_decode`.

A result is, for each query head of a key head, the sums Σ exp2(s − m) · v, the largest score m and the sum of weights
Σ exp2(s − m), scores in base 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.earlier_attention.paged_attention import partial_floats
from rose_dist.kernels import ptx, ptx_numbers, vector, warp_matrix
from rose_dist.kernels.dsl import TYPES, Float32, Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.variants import WARP

WARPS = 4
"""A block."""
THREADS = WARPS * WARP
AT_ONCE = 64
"""fp32 of other blocks' results that a thread has in flight when it merges."""
NOTHING = -1e30
"""The largest of no scores: finite, so that no difference of two is NaN."""


@dataclass(frozen=True)
class Results:
    """Results of `rows` query heads: in shared memory one a warp of the block, in global memory one a split. Every
    thread merges some dimensions of one head.
    """

    head_dim: int
    rows: int
    dtype: torch.dtype

    @property
    def pitch(self) -> int:
        """fp32 of one query head's result."""
        return partial_floats(self.head_dim)

    @property
    def bytes(self) -> int:
        return self.rows * self.pitch * 4

    @property
    def each(self) -> int:
        """Dimensions a thread merges."""
        return self.head_dim * self.rows // THREADS

    def store_warp(self, held: Any, acc: Any, largest: Any, weights: Any) -> None:
        """Sums, largest scores and sums of weights of this warp, a row each query head."""
        thread = cute.arch.thread_idx()[0]
        g, j = thread % WARP // 4, thread % 4
        for half in range(self.rows // 8):
            row = Uint32(held.toint()) + Uint32((thread // WARP * self.rows + g + 8 * half) * (self.pitch * 4))
            total = vector.group_sum(weights[half], 4)
            for block in range(self.head_dim // 64):
                for k in range(2):
                    for first in (0, 4):
                        words = [acc[4 * (8 * block + first + n) + 2 * half + k] for n in range(4)]
                        warp_matrix.store_shared_16b(
                            row + Uint32(block * 256) + Uint32((2 * j + k) * 32) + Uint32(first * 4), words
                        )
            # All four lanes of a row have the same; they write the same.
            last = [largest[half], total, total, total]
            warp_matrix.store_shared_16b(row + Uint32(self.head_dim * 4), last)

    @cute.jit
    def finish(
        self, held: cute.Pointer, arrived: cute.Tensor, out: Int64, partials: Int64, counter: Int64, sinks: Int64,
        first_head: Int32, group: Int32, split: Int32, splits: Int32, value_scale: Float32,
    ) -> None:  # fmt: skip
        """Merge the warps' results, and those of all splits if this block is the last of them. A block barrier before
        it has made the warps' results visible; another one in it says that they have been read.

        counter: u32, 0 between launches. Every block of a request's splits adds 1 after it has written its result
        (release), and whoever comes last has thereby seen the others' (acquire) and sets it back.
        """
        thread = cute.arch.thread_idx()[0]
        row, column = thread * self.each // self.head_dim, thread * self.each % self.head_dim
        sink = Float32(NOTHING)
        if (sinks != 0) & (row < group):
            sink = vector.scalar(sinks + Int64(first_head + row) * 4, Float32)[0] * Float32(1 / math.log(2))
        state = self.merge(
            [self.read_shared(held, warp, row, column) for warp in range(WARPS)], self.nothing(), [True] * WARPS
        )
        target = out + Int64(row * self.head_dim + column) * self.dtype.itemsize
        mine = partials + Int64(row * self.pitch) * 4
        if splits == 1:
            if row < group:
                self.write(target, state, sink, value_scale)
            cute.arch.sync_threads()
        else:
            if row < group:
                self.write_partial(mine + Int64(split) * self.bytes, column, state)
            cute.arch.sync_threads()
            if thread == 0:
                arrived[0] = ptx.fetch_add(counter, Uint32(1), "gpu")
            cute.arch.sync_threads()
            if arrived[0] == Uint32(splits - 1):
                if row < group:
                    self.write(target, self.merge_splits(mine, column, splits), sink, value_scale)
                if thread == 0:
                    ptx.store_relaxed(counter, Uint32(0), "gpu")

    def nothing(self) -> Any:
        """(largest score, sum of weights, sums) of no keys."""
        return Float32(NOTHING), Float32(0.0), [Float32(0.0)] * self.each

    def merge(self, parts: Any, state: Any, valid: Any) -> Any:
        """`state` and then `parts`, one after another."""
        largest, weights, sums = state
        for (other, more, added), counts in zip(parts, valid, strict=True):
            top = cute.arch.fmax(largest, other)
            factor = vector.select(counts, exp2(other - top), Float32(0.0))
            top = vector.select(counts, top, largest)
            keep = exp2(largest - top)
            weights = weights * keep + more * factor
            sums = [a * keep + b * factor for a, b in zip(sums, added, strict=True)]
            largest = top
        return largest, weights, sums

    def read_shared(self, held: Any, warp: int, row: Any, column: Any) -> Any:
        """A warp's result for this thread's dimensions."""
        place = Uint32(held.toint()) + Uint32(warp * self.bytes) + Uint32(row * (self.pitch * 4))
        sums = [
            ptx_numbers.from_bits(word)
            for i in range(0, self.each, 4)
            for word in warp_matrix.load_shared_16b(place + Uint32(column * 4) + Uint32(i * 4))
        ]
        last = warp_matrix.load_shared_16b(place + Uint32(self.head_dim * 4))
        return ptx_numbers.from_bits(last[0]), ptx_numbers.from_bits(last[1]), sums

    def read_partial(self, partial: Any, column: Any) -> Any:
        """Another block's result for this thread's dimensions."""
        sums = [
            ptx_numbers.from_bits(word)
            for i in range(0, self.each, 4)
            for word in ptx.load_16b(partial + Int64(column + i) * 4)
        ]
        last = ptx.load_16b(partial + self.head_dim * 4)
        return ptx_numbers.from_bits(last[0]), ptx_numbers.from_bits(last[1]), sums

    def write_partial(self, partial: Any, column: Any, state: Any) -> None:
        largest, weights, sums = state
        for i in range(0, self.each, 4):
            ptx.store_16b(partial + Int64(column + i) * 4, tuple(ptx_numbers.bits(value) for value in sums[i : i + 4]))
        last = ptx_numbers.bits(weights)
        # Every thread of the row writes the same.
        ptx.store_16b(partial + self.head_dim * 4, (ptx_numbers.bits(largest), last, last, last))

    @cute.jit
    def merge_splits(self, partials: Int64, column: Int32, splits: Int32) -> Any:
        """All splits in their order."""
        batch = AT_ONCE // self.each
        size = self.bytes
        sums = cute.make_rmem_tensor(self.each, Float32)
        sums.fill(0.0)
        largest, weights = Float32(NOTHING), Float32(0.0)
        for first in range(0, splits, batch):
            places = [vector.min_of(first + i, splits - 1) for i in range(batch)]
            parts = [self.read_partial(partials + Int64(place) * size, column) for place in places]
            state = (largest, weights, [sums[i] for i in range(self.each)])
            largest, weights, added = self.merge(parts, state, [first + i < splits for i in range(batch)])
            for i in range_constexpr(self.each):
                sums[i] = added[i]
        return largest, weights, [sums[i] for i in range(self.each)]

    def write(self, address: Any, state: Any, sink: Any, value_scale: Any) -> None:
        """The sums over all weights, the sink's among them."""
        largest, weights, sums = state
        top = cute.arch.fmax(largest, sink)
        keep = exp2(largest - top)
        total = weights * keep + exp2(sink - top)
        share = keep * value_scale * cute.arch.rcp_approx(total)
        kind = TYPES[self.dtype]
        words = [(value * share).to(kind) for value in sums]
        vector.store_words(address, words, kind, min(16, self.each * self.dtype.itemsize))


def exp2(x: Any) -> Any:
    return cute.math.exp2(x, fastmath=True)
