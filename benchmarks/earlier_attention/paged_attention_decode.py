"""Attention of one query a request over a paged cache; what it computes: `rose_dist.kernels.paged_attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.earlier_attention.attention_results import NOTHING, THREADS, WARPS, Results, exp2
from benchmarks.earlier_attention.kv_tiles import Tiles, seen
from benchmarks.earlier_attention.paged_attention import TILE
from benchmarks.earlier_attention.split_items import find, tiles_of
from rose_dist.kernels import jit, vector, warp_matrix
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import (
    Float32,
    Int32,
    Int64,
    Stream,
    Uint32,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.variants import WARP

MOST_STAGES = 6
SM_SHARED_BYTES, BLOCK_OVERHEAD_BYTES = 228 << 10, (1 << 10) + 128
"""Shared memory of an SM, Hopper's and Blackwell's, and what a block takes beside tiles and results."""


@cache
def launcher(
    arch: Arch, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, wide_group: bool, block_tiles: int
) -> jit.Launcher:
    return jit.load(DecodeAttention(arch, dtype, cache_dtype, head_dim, wide_group, block_tiles))


@dataclass(frozen=True)
class DecodeAttention(jit.Kernel):
    """A block for each split of a request's keys, for each key head: the key head's query heads are the rows of one
    matrix product, so every key and value is read once. A warp takes every fourth tile of 16 keys (`kv_tiles`).

    The block's warps merge in shared memory, in the order of warps. The last block of a request's splits to arrive
    merges them all from global memory, in the order of splits, and adds the sink (`attention_results`).
    """

    dtype: torch.dtype
    """bf16, of queries and results."""
    cache_dtype: torch.dtype
    head_dim: int
    wide_group: bool
    """More than 8 query heads a key head."""
    block_tiles: int
    """Tiles a cache block."""

    @property
    def rows(self) -> int:
        """Query heads a key head, padded."""
        return 16 if self.wide_group else 8

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.head_dim, self.cache_dtype)

    @property
    def results(self) -> Results:
        return Results(self.head_dim, self.rows, self.dtype)

    @property
    def blocks_per_sm(self) -> int:
        """As registers allow: with large heads a thread needs most of 255."""
        return 3 if self.head_dim == 64 else 2

    @property
    def stages(self) -> int:
        """Tiles in a warp's ring, as many as shared memory has room for."""
        room = SM_SHARED_BYTES // self.blocks_per_sm - BLOCK_OVERHEAD_BYTES - WARPS * self.results.bytes
        return min(room // (WARPS * self.tiles.bytes), MOST_STAGES)

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.tiles.bytes

    @cute.jit
    def __call__(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        tables: Int64, table_stride: Int64, first_blocks: Int64, lengths: Int64, live_rows: Int64, sinks: Int64,
        out: Int64, partials: Int64, counters: Int64, requests: Int32, key_heads: Int32, group: Int32,
        window: Int32, most_splits: Int32, scale: Float32, value_scale: Float32, sms: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Strides in elements; `scale` is that of the scores times log2 e."""
        items = requests * key_heads * most_splits
        blocks = vector.min_of(items, sms * self.blocks_per_sm)
        self.kernel(
            q, q_stride, keys, values, slot_stride, head_stride, tables, table_stride, first_blocks, lengths, live_rows,
            sinks, out, partials, counters, requests, key_heads, group, window, most_splits, scale,
            value_scale,
        ).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=self.blocks_per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        tables: Int64, table_stride: Int64, first_blocks: Int64, lengths: Int64, live_rows: Int64, sinks: Int64,
        out: Int64, partials: Int64, counters: Int64, requests: Int32, key_heads: Int32, group: Int32,
        window: Int32, most_splits: Int32, scale: Float32, value_scale: Float32,
    ) -> None:  # fmt: skip
        ring = cute.arch.alloc_smem(Uint32, WARPS * self.ring_bytes // 4, alignment=16)
        held = cute.arch.alloc_smem(Uint32, WARPS * self.results.bytes // 4, alignment=16)
        arrived = cute.make_tensor(cute.arch.alloc_smem(Uint32, 1), cute.make_layout(1))
        mine = Uint32(ring.toint()) + Uint32(cute.arch.thread_idx()[0] // WARP * self.ring_bytes)
        queries = cute.make_rmem_tensor(self.rows // 8 * (self.head_dim // 8), Uint32)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live = vector.live_rows(live_rows, requests)
        item = cute.arch.block_idx()[0]
        first, before, row, length, split, splits = find(
            item // key_heads, Int32(0), Int32(0), lengths, requests, live, window, most_splits
        )
        table, base = self.start(
            mine, q, q_stride, keys, values, slot_stride, head_stride, tables, table_stride, first_blocks, queries, row,
            length, split, splits, item % key_heads, group, window,
        )  # fmt: skip
        while row >= 0:
            head = item % key_heads
            low, begin, end = tiles_of(length, window, split, splits)
            self.attend(
                mine, held, keys + Int64(head) * head_stride * self.cache_dtype.itemsize,
                values + Int64(head) * head_stride * self.cache_dtype.itemsize, slot_stride, table, base, queries, low,
                length, begin, end, scale,
            )  # fmt: skip
            # The next item's copies are on their way while this one's results are merged.
            item += cute.arch.grid_dim()[0]
            first, before, next_row, next_length, next_split, next_splits = find(
                item // key_heads, first, before, lengths, requests, live, window, most_splits
            )
            table, base = self.start(
                mine, q, q_stride, keys, values, slot_stride, head_stride, tables, table_stride, first_blocks, queries,
                next_row, next_length, next_split, next_splits, item % key_heads, group, window,
            )  # fmt: skip
            place = Int64(row) * key_heads + head
            cute.arch.sync_threads()
            self.results.finish(
                held, arrived, out + place * group * (self.head_dim * self.dtype.itemsize),
                partials + place * most_splits * self.results.bytes, counters + place * 4, sinks, head * group, group,
                split, splits, value_scale,
            )  # fmt: skip
            row, length, split, splits = next_row, next_length, next_split, next_splits

    def start(
        self, ring: Any, q: Any, q_stride: Any, keys: Any, values: Any, slot_stride: Any, head_stride: Any, tables: Any,
        table_stride: Any, first_blocks: Any, queries: Any, row: Any, length: Any, split: Any, splits: Any, head: Any,
        group: Any, window: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Load this lane's queries and start copying the warp's first tiles; none, if there is no such request.

        Returns the request's table and the slot of the tile after those.
        """
        warp = cute.arch.thread_idx()[0] // WARP
        row = Int64(vector.max_of(row, Int32(0)))
        low, begin, end = tiles_of(length, window, split, splits)
        table = tables + (row * table_stride - self.first_block(first_blocks, row)) * 4
        tile = begin + warp
        # All table entries are asked for before the first copy, which then waits once.
        bases = [self.tile_slot(table, tile + stage * WARPS, end) for stage in range(self.stages)]
        heads = Int64(head) * head_stride * self.cache_dtype.itemsize
        for stage in range(self.stages - 1):
            self.tiles.copy(
                ring + Uint32(stage * self.tiles.bytes), keys + heads, values + heads, slot_stride, bases[stage],
                tile + stage * WARPS, low, length, end,
            )  # fmt: skip
        self.load_queries(
            q + (row * q_stride + Int64(head) * group * self.head_dim) * self.dtype.itemsize, group, queries
        )
        return table, bases[-1]

    def load_queries(self, q: Any, group: Any, queries: Any) -> None:
        """Rows g and g + 8 in the order that `Tiles.keys` has."""
        g = cute.arch.thread_idx()[0] % WARP // 4
        words = [word for half in range(self.rows // 8) for word in self.tiles.queries(q, g + 8 * half, group)]
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
    def attend(
        self, ring: Uint32, held: cute.Pointer, keys: Int64, values: Int64, slot_stride: Int64, table: Int64,
        base: Int64, queries: cute.Tensor, low: Int32, high: Int32, begin: Int32, end: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        """This warp's share of tiles `begin` … `end` − 1, keys `low` … `high` − 1 of them; into `held`."""
        acc = cute.make_rmem_tensor(4 * (self.head_dim // 8), Float32)
        acc.fill(0.0)
        # For this lane's rows g and g + 8: the largest score, and its own part of the sum of weights.
        largest, weights = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        largest.fill(NOTHING)
        weights.fill(0.0)
        tile = begin + cute.arch.thread_idx()[0] // WARP
        count = vector.max_of((end - tile + (WARPS - 1)) // WARPS, Int32(0))
        # Where the ring is read, and where it is filled: one tile behind.
        full, free = ring, ring + Uint32((self.stages - 1) * self.tiles.bytes)
        for i in cutlass.range(count, unroll=1):
            ahead = tile + (i + (self.stages - 1)) * WARPS
            warp_matrix.await_copies(self.stages - 2)
            self.tiles.copy(free, keys, values, slot_stride, base, ahead, low, high, end)
            base = self.tile_slot(table, ahead + WARPS, end)
            self.multiply(full, queries, acc, largest, weights, tile + i * WARPS, low, high, scale)
            full, free = self.next_tile(ring, full), full
        self.results.store_warp(held, acc, largest, weights)

    @cute.jit
    def tile_slot(self, table: Int64, tile: Int32, end: Int32) -> Int64:
        """The cache slot of a tile's first key; any for a tile beyond the last."""
        block = Int32(0)
        if tile < end:
            block = vector.scalar(table + Int64(tile // self.block_tiles) * 4, Int32)[0]
        return (Int64(block) * self.block_tiles + tile % self.block_tiles) * TILE

    def fragments(self, halves: Any, step: int) -> Any:
        """a of product step `step` from words of rows g and g + 8, two a step."""
        zero = Uint32(0)
        low, high = (halves[0][2 * step + i] for i in range(2))
        if self.wide_group:
            return [low, halves[1][2 * step], high, halves[1][2 * step + 1]]
        return [low, zero, high, zero]

    def next_tile(self, ring: Any, place: Any) -> Any:
        """The place after `place` in the ring."""
        after = place + Uint32(self.tiles.bytes)
        return Uint32(vector.select(after == ring + Uint32(self.ring_bytes), ring, after))

    @cute.jit
    def multiply(
        self, stage: Uint32, queries: cute.Tensor, acc: cute.Tensor, largest: cute.Tensor, weights: cute.Tensor,
        tile: Int32, low: Int32, high: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        """One tile: scores, weights, and the weighted sum of values."""
        j = cute.arch.thread_idx()[0] % 4
        scores, words_each = [], self.head_dim // 8
        heads = [[queries[half * words_each + i] for i in range(words_each)] for half in range(self.rows // 8)]
        for n in range_constexpr(2):
            c = [Float32(0.0)] * 4
            for step, words in enumerate(self.tiles.keys(stage, n)):
                c = self.tiles.multiply_add(c, self.fragments(heads, step), words)
            scores.append(c)
        halves, factors = [], []
        for half in range_constexpr(self.rows // 8):
            values = [
                vector.select(
                    seen(tile, 8 * n + 2 * j + k, low, high), scores[n][2 * half + k] * scale, Float32(-math.inf)
                )
                for n in range(2)
                for k in range(2)
            ]
            top = cute.arch.fmax(cute.arch.fmax(values[0], values[1]), cute.arch.fmax(values[2], values[3]))
            top = cute.arch.fmax(top, largest[half])
            for offset in (1, 2):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
            factor = exp2(largest[half] - top)
            shares = [exp2(value - top) for value in values]
            weights[half] = weights[half] * factor + ((shares[0] + shares[1]) + (shares[2] + shares[3]))
            largest[half] = top
            factors.append(factor)
            halves.append([self.tiles.pair(shares[0], shares[1]), self.tiles.pair(shares[2], shares[3])])
        self.add_values(stage, self.fragments(halves, 0), factors, acc)

    def add_values(self, stage: Any, shares: Any, factors: Any, acc: Any) -> None:
        """acc · factor + shares · values; products in the order of `Tiles.values`."""
        for piece in range(self.tiles.value_pieces):
            for n, words in enumerate(self.tiles.values(stage, piece)):
                at = 4 * (8 * piece + n)
                c = [acc[at + i] * factors[i // 2] if i // 2 < len(factors) else Float32(0.0) for i in range(4)]
                for i, value in enumerate(self.tiles.multiply_add(c, shares, words)):
                    acc[at + i] = value
