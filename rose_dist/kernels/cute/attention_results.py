"""Merging the results of blocks that share a request, for `paged_attention_decode`.

A result is, for each query head of a key head, the sums Σ exp2(s − m) · v, the largest score m and the sum of weights
Σ exp2(s − m), scores in base 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import ptx, ptx_numbers, vector, warp_matrix
from rose_dist.kernels.dsl import TYPES, Boolean, Float32, Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.paged_attention import partial_floats
from rose_dist.kernels.variants import WARP

WARPS = 4
"""Among which a part's tiles are dealt out in turn, so many results has a block of each query head."""
THREADS = WARPS * WARP
AT_ONCE = 64
"""fp32 of other blocks' results that a thread has in flight when it merges."""
NOTHING = -1e30
"""The largest of no scores: finite, so that no difference of two is NaN."""


@dataclass(frozen=True)
class Results:
    """Results of `heads` key heads' query heads, `group_rows` each: in shared memory one a warp of the block, in global
    memory one a part of the keys. Every thread merges some dimensions of one head.

    A warp's sums lie in its ring of tiles, 16-byte pieces of a row in an order that spreads them over the banks; its
    largest scores and sums of weights lie elsewhere, in `Scalars`.
    """

    head_dim: int
    heads: int
    group_rows: int
    dtype: torch.dtype
    threads: int
    """That merge: the first of the block."""

    @property
    def rows(self) -> int:
        return self.heads * self.group_rows

    @property
    def bytes(self) -> int:
        """Of a warp's sums."""
        return self.rows * self.head_dim * 4

    @property
    def pitch(self) -> int:
        """fp32 of one query head's part in global memory."""
        return partial_floats(self.head_dim)

    @property
    def part_bytes(self) -> int:
        return self.rows * self.pitch * 4

    @property
    def each(self) -> int:
        """Dimensions a thread merges."""
        return self.head_dim * self.rows // self.threads

    @property
    def kept_words(self) -> int:
        """Of shared memory that a thread keeps a result in."""
        return self.each + 4

    def allocate_scalars(self) -> Any:
        """Shared memory for every warp's largest scores and sums of weights: [warp, row, 2]."""
        count = WARPS * self.rows * 2
        return cute.make_tensor(cute.arch.alloc_smem(Float32, count, alignment=16), cute.make_layout(count))

    def place(self) -> tuple[Any, Any]:
        """The row that this thread merges, and the first of its dimensions."""
        first = ptx.thread_index() * self.each
        return first // self.head_dim, first % self.head_dim

    def meet(self) -> None:
        """A barrier among the threads that merge."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    def store_warp(
        self, sums: Any, scalars: Any, warp: Any, first_row: Any, acc: list[Any], largest: Any, weights: Any
    ) -> None:  # fmt: skip
        """Rows 2j and 2j + 1 from `first_row` on, products in the order of `kv_tiles`: four sums each. warp: which one
        of `WARPS`.
        """
        thread = ptx.thread_index()
        g, j = thread % WARP // 4, thread % 4
        for k in range(2):
            row = 2 * j + (first_row + k)
            for i in range(0, len(acc), 8):
                words = [acc[i + n] for n in (k, k + 2, k + 4, k + 6)]
                warp_matrix.store_shared_16b(self.piece(sums, row, 2 * g + (i // 16 * 16 + i // 8 % 2)), words)
            total = weights[k]
            for offset in (4, 8, 16):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            # All eight lanes of a row have the same; they write the same.
            at = (warp * self.rows + row) * 2
            scalars[at] = largest[k]
            scalars[at + 1] = total

    def piece(self, sums: Any, row: Any, piece: Any) -> Any:
        """Where 4 dimensions of a row are."""
        return sums + Uint32(row * (self.head_dim * 4) + (piece ^ (row & 7)) * 16)

    def merge_warps(self, sums: list[Any], scalars: Any) -> Any:
        """This thread's share of all warps' results, in the order of warps. `sums`: where each has them."""
        row, column = self.place()
        parts = []
        for warp, first in enumerate(sums):
            words = [
                word
                for i in range(self.each // 4)
                for word in warp_matrix.load_shared_16b(self.piece(first, row, column // 4 + i))
            ]
            at = (warp * self.rows + row) * 2
            parts.append((scalars[at], scalars[at + 1], [ptx_numbers.from_bits(word) for word in words]))
        return self.merge(parts, self.nothing(), [True] * len(parts))

    def nothing(self) -> Any:
        """(largest score, sum of weights, sums) of no keys."""
        return Float32(NOTHING), Float32(0.0), [Float32(0.0)] * self.each

    def merge(self, parts: Any, state: Any, valid: Any) -> Any:
        """`state` and then `parts`, one after another; the same operations wherever it is inlined."""
        largest, weights, sums = state
        for (other, more, added), counts in zip(parts, valid, strict=True):
            top = cute.arch.fmax(largest, other)
            factor = vector.select(counts, exp2(other - top), Float32(0.0))
            top = vector.select(counts, top, largest)
            keep = exp2(largest - top)
            weights = _scaled_sum(weights, keep, more, factor)
            sums = [_scaled_sum(a, keep, b, factor) for a, b in zip(sums, added, strict=True)]
            largest = top
        return largest, weights, sums

    @cute.jit
    def sink(self, sinks: Int64, first_head: Int32, group: Int32) -> Float32:
        """That of the row which this thread merges, for scores in base 2. first_head: the block's first query head."""
        row, _ = self.place()
        head, query = row // self.group_rows, row % self.group_rows
        sink = Float32(NOTHING)
        if (sinks != 0) & (query < group):
            sink = vector.scalar(sinks + Int64(first_head + head * group + query) * 4, Float32)[0]
            sink = sink * Float32(1 / math.log(2))
        return sink

    @cute.jit
    def finish(
        self, sums: list[Any], scalars: cute.Tensor, arrived: cute.Tensor, merged: Uint32, out: Int64, parts: Int64,
        counter: Int64, sink: Float32, group: Int32, split: Int32, opening: Int32, splits: Int32, alone: Boolean,
        last: Boolean, value_scale: Float32,
    ) -> None:  # fmt: skip
        """Merge the warps' results of part `split`, and further parts of the request: with those before, if this block
        has all of them (`alone`), else with all, if this is the block's `last` and all others are done. A block barrier
        before it has made the warps' results visible; another one in it says that they have been read.

        counter: u32, 0 between launches. Every block adds the number of its parts, from `opening` on, after it has
        written them (release); who completes the number has thereby seen the others' (acquire) and sets it back.
        """
        row, column = self.place()
        # With fewer query heads than rows, some have nothing to write.
        head, query = row // self.group_rows, row % self.group_rows
        target = out + Int64((head * group + query) * self.head_dim + column) * self.dtype.itemsize
        own = parts + Int64(row * self.pitch) * 4
        state = self.merge_warps(sums, scalars)
        if alone:
            if split == 0:
                self.keep(merged, self.nothing())
            whole = self.merge([state], self.kept(merged), [True])
            if last & (query < group):
                self.write(target, whole, sink, value_scale)
            self.keep(merged, whole)
        elif query < group:
            self.write_part(own + Int64(split) * self.part_bytes, column, state)
        self.meet()
        if vector.select(alone, Boolean(False), last):
            thread = cute.arch.thread_idx()[0]
            if thread == 0:
                arrived[0] = ptx.fetch_add(counter, Uint32(split - opening + 1), "gpu")
            self.meet()
            if arrived[0] + Uint32(split - opening + 1) == Uint32(splits):
                if query < group:
                    self.write(target, self.merge_parts(own, column, splits), sink, value_scale)
                if thread == 0:
                    ptx.store_relaxed(counter, Uint32(0), "gpu")

    def keep(self, kept: Any, state: Any) -> None:
        """Put this thread's state where `kept` finds it."""
        largest, weights, sums = state
        place = kept + Uint32(ptx.thread_index() * (self.kept_words * 4))
        for i in range(0, self.each, 4):
            warp_matrix.store_shared_16b(place + Uint32(i * 4), sums[i : i + 4])
        warp_matrix.store_shared_16b(place + Uint32(self.each * 4), [largest, weights, weights, weights])

    def kept(self, kept: Any) -> Any:
        place = kept + Uint32(ptx.thread_index() * (self.kept_words * 4))
        words = [
            ptx_numbers.from_bits(word)
            for i in range(0, self.kept_words, 4)
            for word in warp_matrix.load_shared_16b(place + Uint32(i * 4))
        ]
        return words[self.each], words[self.each + 1], words[: self.each]

    def read_part(self, part: Any, column: Any) -> Any:
        """Another block's result for this thread's dimensions; `part`: of its row."""
        sums = [
            ptx_numbers.from_bits(word)
            for i in range(0, self.each, 4)
            for word in ptx.load_16b(part + Int64(column + i) * 4)
        ]
        last = ptx.load_16b(part + self.head_dim * 4)
        return ptx_numbers.from_bits(last[0]), ptx_numbers.from_bits(last[1]), sums

    def write_part(self, part: Any, column: Any, state: Any) -> None:
        largest, weights, sums = state
        for i in range(0, self.each, 4):
            ptx.store_16b(part + Int64(column + i) * 4, tuple(ptx_numbers.bits(value) for value in sums[i : i + 4]))
        last = ptx_numbers.bits(weights)
        # Every thread of the row writes the same.
        ptx.store_16b(part + self.head_dim * 4, (ptx_numbers.bits(largest), last, last, last))

    @cute.jit
    def merge_parts(self, parts: Int64, column: Int32, splits: Int32) -> Any:
        """All parts in their order."""
        batch = AT_ONCE // self.each
        size = self.part_bytes
        sums = cute.make_rmem_tensor(self.each, Float32)
        sums.fill(0.0)
        largest, weights = Float32(NOTHING), Float32(0.0)
        for first in range(0, splits, batch):
            places = [vector.min_of(first + i, splits - 1) for i in range(batch)]
            read = [self.read_part(parts + Int64(place) * size, column) for place in places]
            state = (largest, weights, [sums[i] for i in range(self.each)])
            largest, weights, added = self.merge(read, state, [first + i < splits for i in range(batch)])
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


def _scaled_sum(a: Any, by: Any, b: Any, by_too: Any) -> Any:
    """a · by + b · by_too, each product rounded, so that no compiler can choose which one to fuse."""
    return ptx_numbers.product(a, by) + ptx_numbers.product(b, by_too)
