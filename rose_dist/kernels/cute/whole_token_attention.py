"""Decode attention in blocks of whole tokens, all key heads; what it computes: `rose_dist.kernels.paged_attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from rose_dist.kernels import jit, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.attention_products import Products
from rose_dist.kernels.cute.attention_results import NOTHING, WARPS, Results
from rose_dist.kernels.cute.kv_blocks import Paged
from rose_dist.kernels.cute.mxfp4_operands import barrier, wait
from rose_dist.kernels.cute.split_items import Batch, Part, after, is_whole, run_of_block
from rose_dist.kernels.cute.whole_token_feeder import FEEDERS, TokenFeeder, bounds
from rose_dist.kernels.cute.whole_token_tiles import WholeTokenTiles
from rose_dist.kernels.dsl import (
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
from rose_dist.kernels.variants import WARP

ROWS = 8
"""Query heads a key head, padded."""
WARP_BYTES = 256
"""Of a token's keys, and of its values, that a warp takes: whole heads."""
MOST_STAGES = 8
FEEDER_REGISTERS = 32
SM_REGISTERS = 64 << 10
SHARED_BYTES, SPARE_BYTES = 227 << 10, 1 << 10
"""Shared memory that a block may have on Hopper and Blackwell, and what is left for barriers and alignment."""


@cache
def launcher(
    arch: Arch, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, heads: int, block_tiles: int, early: bool
) -> jit.Launcher:  # fmt: skip
    return jit.load(WholeTokenAttention(arch, dtype, cache_dtype, head_dim, heads, block_tiles, early))


@dataclass(frozen=True)
class WholeTokenAttention(jit.Kernel):
    """As `DecodeAttention`, with the same bits, but that one block takes all key heads of its tiles, which so come in
    long copies: one warp starts them (`TokenFeeder`), many are under way. Of a part's tiles every fourth is for the
    same warps, one for each group of key heads. There is one block an SM.
    """

    dtype: torch.dtype
    """bf16, of queries and results."""
    cache_dtype: torch.dtype
    head_dim: int
    heads: int
    """Key heads."""
    block_tiles: int
    """Tiles a cache block."""
    early: bool
    """Whether the launch before writes nothing but queries and each request's last key and value."""

    @property
    def warp_heads(self) -> int:
        """Key heads a warp."""
        return math.gcd(self.heads, WARP_BYTES // (self.head_dim * self.cache_dtype.itemsize))

    @property
    def groups(self) -> int:
        """Of heads, each for other warps."""
        return self.heads // self.warp_heads

    @property
    def warps(self) -> int:
        """That compute."""
        return WARPS * self.groups

    @property
    def threads(self) -> int:
        return (self.warps + FEEDERS) * WARP

    @property
    def launched_registers(self) -> int:
        return SM_REGISTERS // self.threads // 8 * 8

    @property
    def registers(self) -> int:
        """Of a computing thread, if they are shared out anew; 0: there are enough."""
        if self.launched_registers >= self.warp_heads * self.head_dim:
            return 0
        left = self.launched_registers * self.threads - FEEDER_REGISTERS * FEEDERS * WARP
        return left // (self.warps * WARP) // 8 * 8

    @property
    def tiles(self) -> WholeTokenTiles:
        return WholeTokenTiles(self.head_dim, self.warp_heads, self.cache_dtype, self.heads)

    @property
    def results(self) -> Results:
        return Results(self.head_dim, self.heads, ROWS, self.dtype, self.warps * WARP)

    @property
    def products(self) -> Products:
        return Products(self.tiles, ROWS)

    @property
    def feeder(self) -> TokenFeeder:
        return TokenFeeder(self.tiles, self.block_tiles, self.stages, self.early)

    @property
    def stages(self) -> int:
        """Tiles in the ring, as many as there is room for. A multiple of `WARPS` and `FEEDERS`: of a part's tiles, all
        that come to one stage are for the same warps, so that none takes a barrier's phase for the next but one.
        """
        results = self.results
        taken = WARPS * (results.bytes + results.rows * 8) + results.threads * results.kept_words * 4
        return min((SHARED_BYTES - SPARE_BYTES - taken) // self.tiles.bytes, MOST_STAGES) // WARPS * WARPS

    @cute.jit
    def __call__(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        tables: Int64, table_stride: Int64, first_blocks: Int64, lengths: Int64, live_rows: Int64, sinks: Int64,
        out: Int64, partials: Int64, counters: Int64, requests: Int32, groups: Int32, group: Int32,
        window: Int32, most_splits: Int32, scale: Float32, value_scale: Float32, sms: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """As of `DecodeAttention`; heads and tokens lie side by side, and there is one group of key heads."""
        self.kernel(
            q, q_stride, keys, values, slot_stride, head_stride, tables, table_stride, first_blocks, lengths, live_rows,
            sinks, out, partials, counters, requests, groups, group, window, most_splits, scale,
            value_scale,
        ).launch(
            grid=[vector.min_of(requests * most_splits, sms), 1, 1], block=[self.threads, 1, 1], stream=stream,
            use_pdl=True, min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        tables: Int64, table_stride: Int64, first_blocks: Int64, lengths: Int64, live_rows: Int64, sinks: Int64,
        out: Int64, partials: Int64, counters: Int64, requests: Int32, groups: Int32, group: Int32,
        window: Int32, most_splits: Int32, scale: Float32, value_scale: Float32,
    ) -> None:  # fmt: skip
        results = self.results
        ring = Uint32(cute.arch.alloc_smem(Uint32, self.stages * self.tiles.bytes // 4, alignment=128).toint())
        sums = Uint32(cute.arch.alloc_smem(Uint32, WARPS * results.bytes // 4, alignment=128).toint())
        merged = Uint32(cute.arch.alloc_smem(Uint32, results.threads * results.kept_words, alignment=16).toint())
        barriers = Int32(cute.arch.alloc_smem(Int64, 2 * self.stages, alignment=8).toint())
        scalars = results.allocate_scalars()
        arrived = cute.make_tensor(cute.arch.alloc_smem(Uint32, 1), cute.make_layout(1))
        thread = cute.arch.thread_idx()[0]
        if thread < 2 * self.stages:
            # It is full, and it is free once the warps of all groups of heads have read it.
            arrivals = vector.select(thread < self.stages, Int32(1), Int32(self.groups))
            cute.arch.mbarrier_init(barrier(barriers, thread), arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        paged = Paged(keys, values, slot_stride, head_stride, tables, table_stride, first_blocks)
        batch = Batch(lengths, requests, vector.live_rows(live_rows, requests), window, most_splits, groups)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if warp >= self.warps:
            if const_expr(self.registers):
                cute.arch.setmaxregister_decrease(FEEDER_REGISTERS)
            self.feeder.run(barriers, ring, paged, batch, warp - self.warps)
        else:
            if const_expr(self.registers):
                cute.arch.setmaxregister_increase(self.registers)
            self.compute(
                barriers, ring, sums, merged, scalars, arrived, q, q_stride, sinks, out, partials, counters,
                batch, warp, group, scale, value_scale,
            )  # fmt: skip

    @cute.jit
    def compute(
        self, barriers: Int32, ring: Uint32, sums: Uint32, merged: Uint32, scalars: cute.Tensor,
        arrived: cute.Tensor, q: Int64, q_stride: Int64, sinks: Int64, out: Int64, partials: Int64, counters: Int64,
        batch: Batch, warp: Int32, group: Int32, scale: Float32, value_scale: Float32,
    ) -> None:  # fmt: skip
        """All of the block's parts, by all warps but the feeder."""
        results, head = self.results, warp // WARPS * self.warp_heads
        queries = cute.make_rmem_tensor(self.warp_heads * (self.head_dim // 8), Uint32)
        part, line_end = run_of_block(batch)
        sink = results.sink(sinks, Int32(0), group)
        if const_expr(self.early):
            cute.arch.griddepcontrol_wait()
        row, length, split, place, begin, end = part.values
        # The first of this block's parts of the request, and whether those are all that there are.
        opening, alone = split, is_whole(batch, part, line_end)
        number = Int32(0)
        own = [sums + Uint32(share * results.bytes) for share in range(WARPS)]
        while row >= 0:
            current = Part(row, length, split, place, begin, end)
            first = Int64(row) * q_stride + Int64(head) * (group * self.head_dim)
            self.products.load_queries(q + first * self.dtype.itemsize, group, queries)
            self.attend(barriers, ring, sums, scalars, batch, current, number, warp, queries, scale)
            following = after(batch, current, line_end)
            low, high = bounds(batch, current)
            number += vector.max_of(high - low, Int32(0))
            changes = following.request != row
            results.meet()
            results.finish(
                own, scalars, arrived, merged, out + Int64(row) * (results.heads * self.head_dim * 2) * group,
                partials + Int64(row) * batch.most_splits * results.part_bytes, counters + Int64(row) * 4, sink,
                group, split, opening, batch.splits(length), alone, changes, value_scale,
            )  # fmt: skip
            row, length, split, place, begin, end = following.values
            opening = vector.select(changes, split, opening)
            alone = vector.select(changes, is_whole(batch, following, line_end), alone)

    @cute.jit
    def attend(
        self, barriers: Int32, ring: Uint32, sums: Uint32, scalars: cute.Tensor, batch: Batch,
        part: Part, number: Int32, warp: Int32, queries: cute.Tensor, scale: Float32,
    ) -> None:  # fmt: skip
        """This warp's share of a part, whose first tile is number `number` of the block's; into `sums`."""
        size, heads = self.head_dim // 4, self.warp_heads
        share, head_group = warp % WARPS, warp // WARPS
        acc = cute.make_rmem_tensor(size * heads, Float32)
        acc.fill(0.0)
        # For query heads 2j and 2j + 1 of eight: the largest score, and this lane's own part of the sum of weights.
        largest, weights = (cute.make_rmem_tensor(2 * heads, Float32) for _ in range(2))
        largest.fill(NOTHING)
        weights.fill(0.0)
        low, (start, end) = batch.low(part.length), bounds(batch, part)
        for tile in cutlass.range(start + share, end, WARPS, unroll=1):
            stage, parity = self.feeder.place(number + (tile - start))
            wait(barrier(barriers, stage), parity)
            at = ring + Uint32(stage * self.tiles.bytes + head_group * self.tiles.value_offset(heads, 0))
            self.tiles.clear_unseen(at, tile, low, part.length)
            self.products.multiply(at, queries, acc, largest, weights, tile, low, part.length, scale)
            cute.arch.sync_warp()
            if cute.arch.thread_idx()[0] % WARP == 0:
                cute.arch.mbarrier_arrive(barrier(barriers, stage + self.stages))
        for head in range_constexpr(heads):
            of = [2 * head, 2 * head + 1]
            self.results.store_warp(
                sums + Uint32(share * self.results.bytes), scalars, share, (head_group * heads + head) * ROWS,
                [acc[size * head + i] for i in range(size)], [largest[i] for i in of], [weights[i] for i in of],
            )  # fmt: skip
