"""Attention of one query a request over a paged cache; what it computes: `rose_dist.kernels.paged_attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector, warp_matrix
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.attention_results import NOTHING, THREADS, WARPS, Results, exp2
from rose_dist.kernels.cute.kv_tiles import Tiles, seen
from rose_dist.kernels.cute.split_items import Batch, Part, after, last_begins, run_of_block
from rose_dist.kernels.dsl import (
    Boolean,
    Float32,
    Int32,
    Int64,
    Stream,
    Uint32,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.paged_attention import TILE, UNLIMITED
from rose_dist.kernels.variants import WARP

MOST_STAGES = 6
SM_SHARED_BYTES, BLOCK_OVERHEAD_BYTES = 228 << 10, (1 << 10) + 128
"""Shared memory of an SM, Hopper's and Blackwell's, and what a block takes beside tiles and scalars."""
ROW_BYTES = 256
"""Neighbouring bytes of a token that a warp reads, if there are so many: with pieces of 128 bytes no kernel has come to
much more than half the copy rate on H200."""
WIDE_DIMENSIONS = 128
"""Of a token's neighbouring heads, all that a thread has registers for with 16 query heads a key head."""


def heads_together(key_heads: int, head_dim: int, dtype: torch.dtype, wide_group: bool) -> int:
    """Neighbouring key heads that one block reads, if a token's lie side by side."""
    heads = ROW_BYTES // (head_dim * dtype.itemsize)
    if wide_group:
        heads = min(heads, WIDE_DIMENSIONS // head_dim)
    return math.gcd(max(heads, 1), key_heads)


@cache
def launcher(
    arch: Arch, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, heads: int, wide_group: bool,
    block_tiles: int, early: bool,
) -> jit.Launcher:  # fmt: skip
    return jit.load(DecodeAttention(arch, dtype, cache_dtype, head_dim, heads, wide_group, block_tiles, early))


@dataclass(frozen=True)
class Paged:
    """One layer's cache and who has which blocks; traced values, strides in elements."""

    keys: Any
    values: Any
    slot_stride: Any
    head_stride: Any
    tables: Any
    table_stride: Any
    first_blocks: Any


@dataclass(frozen=True)
class DecodeAttention(jit.Kernel):
    """A block takes equal runs of tiles for some key heads: parts of one or several requests' keys (`split_items`). Of
    a key head, its query heads are the rows of one matrix product, so every key and value is read once. A warp takes
    every fourth tile of 16 keys of a part (`kv_tiles`).

    The block's warps merge in shared memory, in the order of warps. A request's parts are merged in their order: by the
    block that has them all as it goes, else through global memory by the block that is the last to be done with its
    own, which also adds the sink (`attention_results`). Both ways give the same bits.
    """

    dtype: torch.dtype
    """bf16, of queries and results."""
    cache_dtype: torch.dtype
    head_dim: int
    heads: int
    """Key heads a block."""
    wide_group: bool
    """More than 8 query heads a key head."""
    block_tiles: int
    """Tiles a cache block."""
    early: bool
    """Whether the launch before writes nothing but queries and each request's last key and value."""

    @property
    def blocks_per_sm(self) -> int:
        """While one waits or merges, the others' copies keep the memory busy. A thread of two may have 255 registers, of
        three 168, which is enough for one small head, whose parts have few bytes.
        """
        return 3 if self.results.rows * self.head_dim <= 512 else 2

    @property
    def rows(self) -> int:
        """Query heads a key head, padded."""
        return 16 if self.wide_group else 8

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.head_dim, self.heads, self.cache_dtype)

    @property
    def results(self) -> Results:
        return Results(self.head_dim, self.heads * self.rows, self.dtype)

    @property
    def stages(self) -> int:
        """Tiles in a warp's ring, as many as shared memory has room for."""
        scalars = WARPS * self.results.rows * 8 + THREADS * self.results.kept_words * 4
        room = SM_SHARED_BYTES // self.blocks_per_sm - BLOCK_OVERHEAD_BYTES - scalars
        return min(room // (WARPS * self.tiles.bytes), MOST_STAGES)

    @property
    def distance(self) -> int:
        """Tiles on their way while one is multiplied. A warp's results lie in the stages beyond, at a part's end, when
        the next part's first tiles are on their way already."""
        return self.stages - -(-self.results.bytes // self.tiles.bytes)

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.tiles.bytes

    @cute.jit
    def __call__(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        tables: Int64, table_stride: Int64, first_blocks: Int64, lengths: Int64, live_rows: Int64, sinks: Int64,
        out: Int64, partials: Int64, counters: Int64, requests: Int32, groups: Int32, group: Int32,
        window: Int32, most_splits: Int32, scale: Float32, value_scale: Float32, sms: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Strides in elements; groups: of key heads; group: query heads a key head; `scale` is that of the scores times
        log2 e.
        """
        blocks = vector.min_of(requests * groups * most_splits, sms * self.blocks_per_sm)
        self.kernel(
            q, q_stride, keys, values, slot_stride, head_stride, tables, table_stride, first_blocks, lengths, live_rows,
            sinks, out, partials, counters, requests, groups, group, window, most_splits, scale,
            value_scale,
        ).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=self.blocks_per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        tables: Int64, table_stride: Int64, first_blocks: Int64, lengths: Int64, live_rows: Int64, sinks: Int64,
        out: Int64, partials: Int64, counters: Int64, requests: Int32, groups: Int32, group: Int32,
        window: Int32, most_splits: Int32, scale: Float32, value_scale: Float32,
    ) -> None:  # fmt: skip
        rings = Uint32(cute.arch.alloc_smem(Uint32, WARPS * self.ring_bytes // 4, alignment=16).toint())
        scalars = self.results.allocate_scalars()
        arrived = cute.make_tensor(cute.arch.alloc_smem(Uint32, 1), cute.make_layout(1))
        ring = rings + Uint32(cute.arch.thread_idx()[0] // WARP * self.ring_bytes)
        queries = cute.make_rmem_tensor(self.heads * self.rows // 8 * (self.head_dim // 8), Uint32)
        # What each thread has merged of a request whose parts are all this block's.
        merged = Uint32(cute.arch.alloc_smem(Uint32, THREADS * self.results.kept_words, alignment=16).toint())
        if const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        paged = Paged(keys, values, slot_stride, head_stride, tables, table_stride, first_blocks)
        batch = Batch(lengths, requests, vector.live_rows(live_rows, requests), window, most_splits, groups)
        part, line_end = run_of_block(batch)
        row, length, head, split, place = self.unpack(part)
        table, blocks = self.look_up(paged, batch, part)
        if const_expr(self.early):
            newest = (length - 1) // TILE
            self.start(ring, paged, batch, part, blocks, Int32(0), newest)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self.start(ring, paged, batch, part, blocks, newest, Int32(UNLIMITED))
        else:
            self.start(ring, paged, batch, part, blocks, Int32(0), Int32(UNLIMITED))
        # The first of this block's parts of the request, and whether those are all that there are.
        opening, alone = split, (split == 0) & (last_begins(batch, part) < line_end)
        block = blocks[-1]
        while row >= 0:
            first = Int64(row) * q_stride + Int64(head) * (group * self.heads * self.head_dim)
            self.load_queries(q + first * self.dtype.itemsize, group, queries)
            current = Part(row, length, head, split, place)
            following = after(batch, current, line_end)
            next_table, next_blocks = self.look_up(paged, batch, following)
            self.attend(ring, scalars, paged, batch, current, table, block, queries, scale)
            # The next part's copies are on their way while this one's results are merged.
            self.start(ring, paged, batch, following, next_blocks, Int32(0), Int32(UNLIMITED))
            changes = (following.request != row) | (following.group != head)
            cute.arch.sync_threads()
            work = Int64(row) * groups + head
            self.finish(
                rings, scalars, arrived, merged,
                out + work * (self.heads * self.head_dim * self.dtype.itemsize) * group,
                partials + work * most_splits * self.results.part_bytes, counters + work * 4, sinks,
                head * (self.heads * group), group, split, opening, batch.splits(length), alone, changes, value_scale,
            )  # fmt: skip
            row, length, head, split, place = self.unpack(following)
            opening = vector.select(changes, split, opening)
            alone = vector.select(changes, (split == 0) & (last_begins(batch, following) < line_end), alone)
            table, block = next_table, next_blocks[-1]

    def unpack(self, part: Part) -> tuple[Any, ...]:
        return part.request, part.length, part.group, part.split, part.place

    def look_up(self, paged: Paged, batch: Batch, part: Part) -> tuple[Any, list[Any]]:
        """The request's table, and the blocks of this warp's first tiles and of the one after those. All are asked for
        at once.
        """
        row = Int64(vector.max_of(part.request, Int32(0)))
        _, begin, end = batch.part(part.length, part.split)
        end = vector.select(part.request >= 0, end, begin)
        table = paged.tables + (row * paged.table_stride - self.first_block(paged.first_blocks, row)) * 4
        tile = begin + cute.arch.thread_idx()[0] // WARP
        return table, [self.block_of(table, tile + stage * WARPS, end) for stage in range(self.distance + 1)]

    def start(
        self, ring: Any, paged: Paged, batch: Batch, part: Part, blocks: list[Any], lower: Any, upper: Any
    ) -> None:  # fmt: skip
        """Start copying this warp's first tiles, those of `lower` … `upper` − 1 among them: a group of copies each."""
        low, begin, end = batch.part(part.length, part.split)
        end = vector.select(part.request >= 0, end, begin)
        for stage in range(self.distance):
            tile = begin + (cute.arch.thread_idx()[0] // WARP + stage * WARPS)
            self.copy_if(
                (tile >= lower) & (tile < upper), ring + Uint32(stage * self.tiles.bytes), paged, part.group,
                blocks[stage], tile, low, part.length, end,
            )  # fmt: skip

    @cute.jit
    def copy_if(
        self, wanted: Boolean, stage: Uint32, paged: Paged, head: Int32, block: Int32, tile: Int32, low: Int32,
        high: Int32, end: Int32,
    ) -> None:  # fmt: skip
        """If `wanted`, a group of copies: of a tile, none from tile `end` on."""
        if wanted:
            if tile < end:
                heads = Int64(head * self.heads) * paged.head_stride * self.cache_dtype.itemsize
                slot = (Int64(block) * self.block_tiles + tile % self.block_tiles) * TILE
                self.tiles.copy(
                    stage, paged.keys + heads, paged.values + heads, paged.slot_stride, slot, tile, low, high
                )  # fmt: skip
            warp_matrix.commit_copies()

    def load_queries(self, q: Any, group: Any, queries: Any) -> None:
        """Of every key head, query heads g and g + 8 in the order that `Tiles.keys` has."""
        g = cute.arch.thread_idx()[0] % WARP // 4
        words = [
            word
            for head in range(self.heads)
            for half in range(self.rows // 8)
            for word in self.tiles.queries(
                q + Int64(head * group) * (self.head_dim * self.dtype.itemsize), g + 8 * half, group
            )
        ]
        for i, word in enumerate(words):
            queries[i] = word

    @cute.jit
    def first_block(self, first_blocks: Int64, row: Int64) -> Int64:
        """What block the request's table starts with."""
        first = Int32(0)
        if first_blocks != 0:
            first = vector.scalar(first_blocks + row * 4, Int32)[0]
        return Int64(first)

    @cute.jit
    def block_of(self, table: Int64, tile: Int32, end: Int32) -> Int32:
        """The cache block of a tile; any for a tile beyond the last."""
        block = Int32(0)
        if tile < end:
            block = vector.scalar(table + Int64(tile // self.block_tiles) * 4, Int32)[0]
        return block

    @cute.jit
    def attend(
        self, ring: Uint32, scalars: cute.Tensor, paged: Paged, batch: Batch, part: Part, table: Int64, block: Int32,
        queries: cute.Tensor, scale: Float32,
    ) -> None:  # fmt: skip
        """This warp's share of a part's tiles; into the ring and `scalars`."""
        size = self.head_dim // 4
        acc = cute.make_rmem_tensor(size * self.heads * self.rows // 8, Float32)
        acc.fill(0.0)
        # For query heads 2j and 2j + 1 of eight: the largest score, and this lane's own part of the sum of weights.
        octets = self.heads * self.rows // 8
        largest, weights = cute.make_rmem_tensor(2 * octets, Float32), cute.make_rmem_tensor(2 * octets, Float32)
        largest.fill(NOTHING)
        weights.fill(0.0)
        low, begin, end = batch.part(part.length, part.split)
        tile = begin + cute.arch.thread_idx()[0] // WARP
        count = vector.max_of((end - tile + (WARPS - 1)) // WARPS, Int32(0))
        # Where the ring is read, and where it is filled.
        full, free = ring, ring + Uint32(self.distance * self.tiles.bytes)
        for i in cutlass.range(count, unroll=1):
            ahead = tile + (i + self.distance) * WARPS
            warp_matrix.await_copies(self.distance - 1)
            self.copy_if(Boolean(True), free, paged, part.group, block, ahead, low, part.length, end)
            block = self.block_of(table, ahead + WARPS, end)
            self.multiply(full, queries, acc, largest, weights, tile + i * WARPS, low, part.length, scale)
            full, free = self.next_stage(ring, full), self.next_stage(ring, free)
        # Other lanes have read what this one is about to overwrite.
        cute.arch.sync_warp()
        for octet in range_constexpr(octets):
            pair = [2 * octet, 2 * octet + 1]
            self.results.store_warp(
                ring + Uint32(self.distance * self.tiles.bytes), scalars, 8 * octet,
                [acc[size * octet + i] for i in range(size)], [largest[i] for i in pair], [weights[i] for i in pair],
            )  # fmt: skip

    def next_stage(self, ring: Any, place: Any) -> Any:
        """The place after `place` in the ring."""
        after = place + Uint32(self.tiles.bytes)
        return Uint32(vector.select(after == ring + Uint32(self.ring_bytes), ring, after))

    @cute.jit
    def multiply(
        self, stage: Uint32, queries: cute.Tensor, acc: cute.Tensor, largest: cute.Tensor, weights: cute.Tensor,
        tile: Int32, low: Int32, high: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        """One tile: scores, weights, and the weighted sum of values. Keys are the rows of the scores and dimensions
        those of the sums, query heads the columns of both, eight at a time.
        """
        first = tile * TILE + cute.arch.thread_idx()[0] % WARP // 4
        shown = [seen(first + 8 * n, low, high) for n in range(2)]
        # Octets of query heads one beside the other, as each is a chain of operations that wait for one another.
        scores = [c for head in range(self.heads) for c in self.scores(stage, head, queries)]
        factors = []
        for octet, c in enumerate(scores):
            # Keys g and g + 8 of column 2j + k.
            for k in range_constexpr(2):
                at = 2 * octet + k
                values = [vector.select(shown[n], c[2 * n + k], Float32(-math.inf)) for n in range(2)]
                top = cute.arch.fmax(values[0], values[1])
                for offset in (4, 8, 16):
                    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
                top = cute.arch.fmax(top * scale, largest[at])
                factor = exp2(largest[at] - top)
                c[k], c[2 + k] = (exp2(value * scale - top) for value in values)
                weights[at] = weights[at] * factor + (c[k] + c[2 + k])
                largest[at] = top
                factors.append(factor)
        shares = [[warp_matrix.transpose(self.tiles.pair(c[2 * n], c[2 * n + 1])) for n in range(2)] for c in scores]
        for head in range_constexpr(self.heads):
            self.add_values(stage, head, shares, factors, acc)

    def scores(self, stage: Any, head: int, queries: Any) -> list[Any]:
        """q · k of a head, for every octet of its query heads."""
        words, each = self.head_dim // 8, self.rows // 8
        keys, sums = self.tiles.keys(stage, head), []
        for octet in range(head * each, head * each + each):
            c = [Float32(0.0)] * 4
            for step, a in enumerate(keys):
                at = octet * words + 2 * step
                c = self.tiles.multiply_add(c, a, [queries[at], queries[at + 1]])
            sums.append(c)
        return sums

    def add_values(self, stage: Any, head: int, shares: Any, factors: Any, acc: Any) -> None:
        """acc · factor + values · shares; products in the order of `Tiles.values`, of every octet of query heads."""
        each = self.rows // 8
        for piece in range(self.tiles.value_pieces):
            for n, values in enumerate(self.tiles.values(stage, head, piece)):
                for octet in range(head * each, head * each + each):
                    at = octet * (self.head_dim // 4) + 4 * (4 * piece + n)
                    c = [acc[at + i] * factors[2 * octet + i % 2] for i in range(4)]
                    for i, value in enumerate(self.tiles.multiply_add(c, values, shares[octet])):
                        acc[at + i] = value

    @cute.jit
    def finish(
        self, rings: Uint32, scalars: cute.Tensor, arrived: cute.Tensor, merged: Uint32, out: Int64, parts: Int64,
        counter: Int64, sinks: Int64, first_head: Int32, group: Int32, split: Int32, opening: Int32, splits: Int32,
        alone: Boolean, last: Boolean, value_scale: Float32,
    ) -> None:  # fmt: skip
        """Merge the warps' results of part `split`, and further parts of the request: with those before, if this block
        has all of them (`alone`), else with all, if this is the block's `last` and all others are done. A block barrier
        before it has made the warps' results visible; another one in it says that they have been read.

        counter: u32, 0 between launches. Every block adds the number of its parts, from `opening` on, after it has
        written them (release); who completes the number has thereby seen the others' (acquire) and sets it back.
        """
        results = self.results
        row, column = results.place()
        # With fewer query heads than rows, some have nothing to write.
        head, query = row // self.rows, row % self.rows
        mine = first_head + head * group + query
        sink = Float32(NOTHING)
        if (sinks != 0) & (query < group):
            sink = vector.scalar(sinks + Int64(mine) * 4, Float32)[0] * Float32(1 / math.log(2))
        target = out + Int64((head * group + query) * self.head_dim + column) * self.dtype.itemsize
        own = parts + Int64(row * results.pitch) * 4
        place = rings + Uint32(self.distance * self.tiles.bytes)
        state = results.merge_warps([place + Uint32(warp * self.ring_bytes) for warp in range(WARPS)], scalars)
        if alone:
            if split == 0:
                results.keep(merged, results.nothing())
            whole = results.merge([state], results.kept(merged), [True])
            if last & (query < group):
                results.write(target, whole, sink, value_scale)
            results.keep(merged, whole)
        elif query < group:
            results.write_part(own + Int64(split) * results.part_bytes, column, state)
        cute.arch.sync_threads()
        if last & (alone == False):  # noqa: E712 - traced
            thread = cute.arch.thread_idx()[0]
            if thread == 0:
                arrived[0] = ptx.fetch_add(counter, Uint32(split - opening + 1), "gpu")
            cute.arch.sync_threads()
            if arrived[0] + Uint32(split - opening + 1) == Uint32(splits):
                if query < group:
                    results.write(target, results.merge_parts(own, column, splits), sink, value_scale)
                if thread == 0:
                    ptx.store_relaxed(counter, Uint32(0), "gpu")
