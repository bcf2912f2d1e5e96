"""Attention of one query a request over a paged cache; what it computes: `rose_dist.kernels.paged_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector, warp_matrix
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.attention_tiling import TILE
from rose_dist.kernels.cute.attention_products import Products
from rose_dist.kernels.cute.attention_results import NOTHING, THREADS, WARPS, Results
from rose_dist.kernels.cute.kv_blocks import Paged, block_of, table_of
from rose_dist.kernels.cute.kv_tiles import Tiles
from rose_dist.kernels.cute.split_items import Batch, Part, after, group_of_block, is_whole, run_of_block
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
from rose_dist.kernels.paged_attention import UNLIMITED
from rose_dist.kernels.variants import WARP

MOST_STAGES = 6
SM_SHARED_BYTES, BLOCK_OVERHEAD_BYTES = 228 << 10, (1 << 10) + 128
"""Shared memory of an SM, Hopper's and Blackwell's, and what a block takes beside tiles and scalars."""


@cache
def launcher(
    arch: Arch, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, heads: int, wide_group: bool,
    block_tiles: int, early: bool, gives_way: bool,
) -> jit.Launcher:  # fmt: skip
    return jit.load(
        DecodeAttention(arch, dtype, cache_dtype, head_dim, heads, wide_group, block_tiles, early, gives_way)
    )


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
    gives_way: bool = False
    """With `early`: whether the next launch may begin at once (`attention_tiling.gives_way`)."""

    @property
    def blocks_per_sm(self) -> int:
        """While one waits or merges, the others' copies keep the memory busy. A thread of two may have 255 registers,
        of three 168, which is enough for one small head, whose parts have few bytes.
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
        return Results(self.head_dim, self.heads, self.rows, self.dtype, THREADS)

    @property
    def products(self) -> Products:
        return Products(self.tiles, self.rows)

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
        # Whole teams (`split_items`).
        teams = vector.min_of(requests * most_splits, vector.max_of(sms * self.blocks_per_sm // groups, Int32(1)))
        self.kernel(
            q, q_stride, keys, values, slot_stride, head_stride, tables, table_stride, first_blocks, lengths, live_rows,
            sinks, out, partials, counters, requests, groups, group, window, most_splits, scale,
            value_scale,
        ).launch(
            grid=[teams * groups, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True,
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
        # Every warp's results, at a part's end.
        sums = [rings + Uint32(warp * self.ring_bytes + self.distance * self.tiles.bytes) for warp in range(WARPS)]
        ring = rings + Uint32(cute.arch.thread_idx()[0] // WARP * self.ring_bytes)
        queries = cute.make_rmem_tensor(self.heads * self.rows // 8 * (self.head_dim // 8), Uint32)
        # What each thread has merged of a request whose parts are all this block's.
        merged = Uint32(cute.arch.alloc_smem(Uint32, THREADS * self.results.kept_words, alignment=16).toint())
        if const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
        if const_expr(self.gives_way or not self.early):
            cute.arch.griddepcontrol_launch_dependents()
        paged = Paged(keys, values, slot_stride, head_stride, tables, table_stride, first_blocks)
        batch = Batch(lengths, requests, vector.live_rows(live_rows, requests), window, most_splits, groups)
        part, line_end = run_of_block(batch)
        row, length, split, place, begin, end = part.values
        ptx.exit_if(row < 0)  # and leave room
        head = group_of_block(batch)
        table, blocks = self.look_up(paged, batch, part)
        newest = vector.select(Boolean(self.early), (length - 1) // TILE, Int32(UNLIMITED))
        self.start(ring, paged, batch, part, head, blocks, Int32(0), newest)
        # The first of this block's parts of the request, and whether those are all that there are.
        opening, alone = split, is_whole(batch, part, line_end)
        block = blocks[-1]
        # Whatever is read behind the wait comes behind the weights that the next launch asks for.
        sink = self.results.sink(sinks, head * (self.heads * group), group)
        following = after(batch, part, line_end)
        next_row, next_length, next_split, next_place, next_begin, next_end = following.values
        next_table, next_blocks = self.look_up(paged, batch, following)
        if const_expr(self.early):
            cute.arch.griddepcontrol_wait()
        self.load_queries(q, q_stride, row, head, group, queries)
        if const_expr(self.early):
            self.start(ring, paged, batch, part, head, blocks, newest, Int32(UNLIMITED))
        if const_expr(self.early and not self.gives_way):
            cute.arch.griddepcontrol_launch_dependents()
        while row >= 0:
            current = Part(row, length, split, place, begin, end)
            following = Part(next_row, next_length, next_split, next_place, next_begin, next_end)
            self.attend(ring, scalars, paged, batch, current, head, table, block, queries, scale)
            # The next part's copies are on their way while this one's results are merged.
            self.start(ring, paged, batch, following, head, next_blocks, Int32(0), Int32(UNLIMITED))
            changes = next_row != row
            self.results.meet()
            work = Int64(row) * groups + head
            self.results.finish(
                sums, scalars, arrived, merged,
                out + work * (self.heads * self.head_dim * self.dtype.itemsize) * group,
                partials + work * most_splits * self.results.part_bytes, counters + work * 4, sink,
                group, split, opening, batch.splits(length), alone, changes, value_scale,
            )  # fmt: skip
            row, length, split, place, begin, end = following.values
            opening = vector.select(changes, split, opening)
            alone = vector.select(changes, is_whole(batch, following, line_end), alone)
            table, block = next_table, next_blocks[-1]
            self.load_queries(q, q_stride, row, head, group, queries)
            following = after(batch, following, line_end)
            next_row, next_length, next_split, next_place, next_begin, next_end = following.values
            next_table, next_blocks = self.look_up(paged, batch, following)

    @cute.jit
    def load_queries(
        self, q: Int64, q_stride: Int64, row: Int32, head: Int32, group: Int32, queries: cute.Tensor
    ) -> None:  # fmt: skip
        """Of a part, if there is one."""
        if row >= 0:
            first = Int64(row) * q_stride + Int64(head) * (group * self.heads * self.head_dim)
            self.products.load_queries(q + first * self.dtype.itemsize, group, queries)

    def range_of(self, batch: Batch, part: Part) -> tuple[Any, Any]:
        """This warp's first tile of a part, and where the part ends."""
        first = batch.first(part.length)
        end = vector.select(part.request >= 0, part.end, part.begin)
        return first + part.begin + cute.arch.thread_idx()[0] // WARP, first + end

    def look_up(self, paged: Paged, batch: Batch, part: Part) -> tuple[Any, list[Any]]:
        """The request's table, and the blocks of this warp's first tiles and of the one after those. All are asked for
        at once.
        """
        row = Int64(vector.max_of(part.request, Int32(0)))
        tile, end = self.range_of(batch, part)
        table = table_of(paged.tables, paged.table_stride, paged.first_blocks, row)
        blocks = [block_of(table, tile + stage * WARPS, end, self.block_tiles) for stage in range(self.distance + 1)]
        return table, blocks

    def start(
        self, ring: Any, paged: Paged, batch: Batch, part: Part, head: Any, blocks: list[Any], lower: Any, upper: Any
    ) -> None:  # fmt: skip
        """Start copying this warp's first tiles, those of `lower` … `upper` − 1 among them: a group of copies each."""
        first, end = self.range_of(batch, part)
        for stage in range(self.distance):
            tile = first + stage * WARPS
            self.copy_if(
                (tile >= lower) & (tile < upper), ring + Uint32(stage * self.tiles.bytes), paged, head,
                blocks[stage], tile, batch.low(part.length), part.length, end,
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

    @cute.jit
    def attend(
        self, ring: Uint32, scalars: cute.Tensor, paged: Paged, batch: Batch, part: Part, head: Int32, table: Int64,
        block: Int32, queries: cute.Tensor, scale: Float32,
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
        tile, end = self.range_of(batch, part)
        low = batch.low(part.length)
        count = vector.max_of((end - tile + (WARPS - 1)) // WARPS, Int32(0))
        # Where the ring is read, and where it is filled.
        full, free = ring, ring + Uint32(self.distance * self.tiles.bytes)
        for i in cutlass.range(count, unroll=1):
            ahead = tile + (i + self.distance) * WARPS
            warp_matrix.await_copies(self.distance - 1)
            self.copy_if(Boolean(True), free, paged, head, block, ahead, low, part.length, end)
            block = block_of(table, ahead + WARPS, end, self.block_tiles)
            self.products.multiply(full, queries, acc, largest, weights, tile + i * WARPS, low, part.length, scale)
            full, free = self.next_stage(ring, full), self.next_stage(ring, free)
        # Other lanes have read what this one is about to overwrite.
        cute.arch.sync_warp()
        for octet in range_constexpr(octets):
            pair = [2 * octet, 2 * octet + 1]
            self.results.store_warp(
                ring + Uint32(self.distance * self.tiles.bytes), scalars, cute.arch.thread_idx()[0] // WARP, 8 * octet,
                [acc[size * octet + i] for i in range(size)], [largest[i] for i in pair], [weights[i] for i in pair],
            )  # fmt: skip

    def next_stage(self, ring: Any, place: Any) -> Any:
        """The place after `place` in the ring."""
        after = place + Uint32(self.tiles.bytes)
        return Uint32(vector.select(after == ring + Uint32(self.ring_bytes), ring, after))
