"""A token drawn the likeliest first: what top-k and top-p may leave is gathered from all blocks and sorted by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.cluster_row import (
    VECTOR,
    ClusterRow,
    octaves,
    ordered,
    pick,
    read,
    share,
    unordered,
    weight,
    write,
)
from rose_dist.kernels.cute.draw_bisect import BisectedDraw
from rose_dist.kernels.cute.mxfp4_operands import load_shared_floats
from rose_dist.kernels.draw import WEIGHT_BITS, RowSplit
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Uint32, Uint64, cute, range_constexpr

OCTAVES = WEIGHT_BITS + 1
"""Halvings beyond which a weight is 0."""
EDGE = 1.0001
"""Above what rounding does to a weight."""
ALL = (1 << 64) - 1


@dataclass(frozen=True)
class SortedDraw:
    """Part of a kernel.

    A histogram over the halvings of the weights, a bin a thread, tells where top-k, or else top-p, must have cut; a
    bin's upper edge bounds the weights in it. What lies above is sorted by (logit, id), and then every sum is exact.
    """

    split: RowSplit

    @property
    def row(self) -> ClusterRow:
        return ClusterRow(self.split)

    def allocate(self) -> Any:
        """Shared address of a u32 a bin, then the last bin that counts and how many tokens have been gathered."""
        return Int32(cute.arch.alloc_smem(Uint32, self.split.threads + 4, alignment=16).toint())

    @cute.jit
    def choose(
        self, row: Int32, partials: Int32, told: Int32, bins: Int32, space: Int64, most: Float32, scale: Float32,
        rest: Float32, top_k: Int32, least: Uint32, top_p: Uint64, number: Uint64, total: Uint64, out: Int64,
        columns: Int32,
    ) -> None:  # fmt: skip
        """Arguments: as `DrawRows.choose` has them; `total` is the sum of all weights. The next turn is 0."""
        threads = self.split.threads
        outside = total - share(top_p, total)
        self.count(row, bins, most, scale, rest)
        self.cut(bins, partials, top_k, outside)
        self.gather(row, bins, space, most, scale, rest)
        mine = read(bins + threads * 4 + 4, Uint32)
        self.row.tell(told, Int32(0), Uint32(0), mine)
        found = Uint32(0)
        for block in range_constexpr(self.split.blocks):
            found += read(told + block * 8, Uint32)
        if found > Uint32(self.split.candidates):
            BisectedDraw(self.split).choose(
                row, partials, told, most, scale, rest, top_k, least, top_p, number, out, columns
            )
        elif self.row.rank() == 0:
            size = Int32(2)
            while size < Int32(found):
                size *= 2
            self.collect(row, told, space, Int32(found), size)
            self.sort(row, size)
            self.draw(
                row, partials, bins, Int32(found), size, most, scale, rest, top_k, least, top_p, number, total, out
            )

    @cute.jit
    def count(self, row: Int32, bins: Int32, most: Float32, scale: Float32, rest: Float32) -> None:
        """This block's elements by bin; then the other blocks' counts may be read too."""
        thread, threads = cute.arch.thread_idx()[0], self.split.threads
        write(bins + thread * 4, Uint32(0))
        if thread == 0:
            write(bins + threads * 4, Uint32(threads - 1))
            write(bins + threads * 4 + 4, Uint32(0))
        cute.arch.sync_threads()
        for step in range(self.split.steps):
            values = load_shared_floats(self.row.place(row, step))
            for i in range_constexpr(VECTOR):
                place = octaves(values[i], most, scale, rest) * Float32(threads / OCTAVES)
                bin_address = Uint32(bins) + Uint32(Int32(place)) * Uint32(4)
                ptx.add_shared_where(place < Float32(threads), bin_address, Uint32(1))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def cut(self, bins: Int32, partials: Int32, top_k: Int32, outside: Uint64) -> None:
        """Find the last bin that may hold a kept token: by count or, without top-k, the first behind which no more
        than the weight `outside` can lie.
        """
        thread = cute.arch.thread_idx()[0]
        counted = Uint32(0)
        for block in range_constexpr(self.split.blocks):
            counted += ptx.cluster_load_shared(Uint32(bins + thread * 4), Uint32(block))
        edge = weight(Float32(thread) * Float32(OCTAVES / self.split.threads))
        bound = Uint32(edge.to(Float32) * Float32(EDGE)) + Uint32(1)
        by_count = top_k > 0
        mine = Uint64(counted) * pick(by_count, Uint64(1), Uint64(bound))
        reached, total = self.row.block_scan(partials, mine)
        wanted = pick(by_count, Uint64(Uint32(top_k)), total)
        spare = pick(by_count, Uint64(0), outside)
        enough = Boolean(reached + spare >= wanted)
        already = Boolean(reached - mine + spare >= wanted) & (thread > 0)
        if enough & (already == 0):
            write(bins + self.split.threads * 4, Uint32(thread))
        cute.arch.sync_threads()

    @cute.jit
    def gather(self, row: Int32, bins: Int32, space: Int64, most: Float32, scale: Float32, rest: Float32) -> None:
        """Keys of this block's elements up to the last bin, in any order, into its part of the workspace."""
        threads = self.split.threads
        beyond = Float32(Int32(read(bins + threads * 4, Uint32)) + 1)
        target = space + Int64(self.row.rank()) * (self.split.candidates * 8)
        for step in range(self.split.steps):
            values = load_shared_floats(self.row.place(row, step))
            for i in range_constexpr(VECTOR):
                if octaves(values[i], most, scale, rest) * Float32(threads / OCTAVES) < beyond:
                    place = ptx.fetch_add_shared(Uint32(bins + threads * 4 + 4), Uint32(1))
                    if place < Uint32(self.split.candidates):
                        key = Uint64(~ordered(values[i])) << Uint64(32) | Uint64(self.row.index(step) + i)
                        vector.scalar(target + Int64(place) * 8, Uint64)[0] = key
        cute.arch.sync_threads()

    @cute.jit
    def collect(self, row: Int32, told: Int32, space: Int64, found: Int32, size: Int32) -> None:
        """All blocks' keys into shared memory, then such as come last up to `size`."""
        thread, threads, begin = cute.arch.thread_idx()[0], self.split.threads, Int32(0)
        for block in range_constexpr(self.split.blocks):
            count = Int32(read(told + block * 8, Uint32))
            source = space + block * (self.split.candidates * 8)
            for at in range(thread, count, threads):
                key = Uint64(vector.scalar(source + Int64(at) * 8, Uint64)[0])
                write(row + (begin + at) * 8, Uint64(key))
            begin += count
        for at in range(found + thread, size, threads):
            write(row + at * 8, Uint64(ALL))
        cute.arch.sync_threads()

    @cute.jit
    def sort(self, keys: Int32, size: Int32) -> None:
        """Ascending, in place (K. E. Batcher, Sorting networks and their applications, 1968: bitonic)."""
        thread, threads = cute.arch.thread_idx()[0], self.split.threads
        run = Int32(2)
        while run <= size:
            gap = run // 2
            while gap > 0:
                for pair in range(thread, size // 2, threads):
                    low = 2 * pair - (pair & (gap - 1))
                    a, b = read(keys + low * 8, Uint64), read(keys + (low + gap) * 8, Uint64)
                    rising = (low & run) == 0
                    if (a > b) == rising:
                        write(keys + low * 8, Uint64(b))
                        write(keys + (low + gap) * 8, Uint64(a))
                cute.arch.sync_threads()
                gap = gap // 2
            run *= 2

    @cute.jit
    def draw(
        self, keys: Int32, partials: Int32, bins: Int32, found: Int32, size: Int32, most: Float32, scale: Float32,
        rest: Float32, top_k: Int32, least: Uint32, top_p: Uint64, number: Uint64, total: Uint64, out: Int64,
    ) -> None:  # fmt: skip
        """Cut what is sorted and write the token in whose share the number falls. A thread has neighbouring keys."""
        thread, threads = cute.arch.thread_idx()[0], self.split.threads
        each = vector.max_of(size // threads, Int32(1))
        begin = thread * each
        end = vector.min_of(begin + each, found)
        kept = found
        if top_k > 0:
            kept = vector.min_of(top_k, found)
        mine = Uint64(0)
        for at in range(begin, vector.min_of(end, kept)):
            mine += Uint64(self.weigh(keys, at, most, scale, rest))
        reached, whole = self.row.block_scan(partials, mine)
        before = reached - mine
        limit = share(top_p, pick(top_k > 0, whole, total))
        inside, at_first = Uint64(0), before
        for at in range(begin, vector.min_of(end, kept)):
            own = self.weigh(keys, at, most, scale, rest)
            if (before < limit) & (own >= least):
                inside += Uint64(own)
            before += Uint64(own)
        target = cute.arch.mul_hi(number, self.row.block_sum(partials, inside))
        before = at_first
        for at in range(begin, vector.min_of(end, kept)):
            own = self.weigh(keys, at, most, scale, rest)
            if (before <= target) & (target < before + Uint64(own)):
                token = read(keys + at * 8, Uint32)
                vector.scalar(out, Int64)[0] = Int64(token)
            before += Uint64(own)

    def weigh(self, keys: Any, at: Any, most: Any, scale: Any, rest: Any) -> Any:
        key = read(keys + at * 8 + 4, Uint32)
        return weight(octaves(unordered(~key), most, scale, rest))
