"""Expert layers of few rows: MXFP4 weights are streamed past the rows once, decoded in registers, and multiplied by
tensor cores.

A block takes a run of items, each 32 rows of an expert's matrix times up to `rows` rows of x. One warp feeds the others
through a ring in shared memory by bulk copies, across the borders of items. The others share an item's columns, always
in the same way, so that no result depends on which rows came along; their sums meet in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.expert_segments import (
    count_choice,
    count_segments,
    counted_experts,
    list_segments,
    load_experts,
)
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.mxfp4_feed import Feeder
from rose_dist.kernels.cute.mxfp4_operands import barrier, decode, load_shared, next_stage, wait
from rose_dist.kernels.cute.mxfp4_sums import Sums
from rose_dist.kernels.dsl import (
    Float32,
    Int32,
    Int64,
    Stream,
    Uint8,
    Uint32,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, TILE_BYTES
from rose_dist.kernels.stream_tiling import StreamTiling
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import load_matrices, multiply_add

SEGMENTS = 64
"""Most (expert, rows of x) pairs that one block may meet."""


@cache
def launcher(
    arch: Arch, experts: int, tiles: int, tiling: StreamTiling, gated: bool, early: bool, top_k: int
) -> jit.Launcher:
    return jit.load(ExpertLinear(arch, experts, tiles, tiling, gated, early, top_k))


@dataclass(frozen=True)
class ExpertLinear(jit.Kernel):
    """y[r] = weight[e] · x[r] + bias[e] over rows packed by expert; or of each pair of these the clamped SwiGLU.

    experts, tiles: matrices, and tile rows of each.
    gated: even outputs are gates, odd ones linear.
    early: what says whose the rows are comes from before the launch that comes before, so that weights may be fetched
        while that one still runs. What was complete before that one began its own work is complete for this launch
        from its start: every launch waits for the one before it ere it lets the next begin.
    top_k: of the choice that says whose the rows are, which is then early; 0: counts and offsets say so.
    """

    experts: int
    tiles: int
    tiling: StreamTiling
    gated: bool
    early: bool
    top_k: int

    @cute.jit
    def __call__(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, ids: Int64,
        live_rows: Int64, first_expert: Int32, tokens: Int32, out: Int64, alpha: Float32, limit: Float32, blocks: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: weights u8 [experts, tiles, columns / 32, 544], rescale fp32 [experts], bias bf16 [experts,
        32 · tiles] or 0, x bf16 [rows, columns], counts int32 [experts], offsets int64 [experts + 1], ids int32
        [tokens, top_k], live_rows int32 [1] or 0, out bf16 [rows, 32 · tiles] or half of that if gated.
        """
        self.kernel(
            weights, rescale, bias, x, counts, offsets, ids, live_rows, first_expert, tokens, out, alpha, limit
        ).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], smem=self.tiling.shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=self.tiling.per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, ids: Int64,
        live_rows: Int64, first_expert: Int32, tokens: Int32, out: Int64, alpha: Float32, limit: Float32,
    ) -> None:  # fmt: skip
        tiling, tiles = self.tiling, self.tiles
        thread, block, blocks = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        segments = [shared_integers(SEGMENTS) for _ in range(4)]
        starts = shared_integers(self.experts + 1)
        self.set_up(shared)
        if const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
        if const_expr(self.top_k > 0):
            histogram = shared_integers(self.experts)
            count_choice(
                ids, live_rows, first_expert, tokens, histogram, starts, self.top_k, self.experts, tiling.threads
            )
            mine = counted_experts(histogram, starts, rescale, self.experts, tiling.threads)
        else:
            mine = load_experts(counts, offsets, rescale, self.experts, tiling.threads)
        if const_expr(self.top_k == 0 or tiling.rows > 1):
            count_segments(mine, starts, tiling.rows, self.experts, tiling.threads)
        items = Uint32(starts[self.experts] * tiles)
        first = Int32(items * Uint32(block) // Uint32(blocks))
        last = Int32(items * Uint32(block + 1) // Uint32(blocks))
        base, end = first // tiles, (last + (tiles - 1)) // tiles
        list_segments(mine, starts, segments, base, end, tiling.rows, self.experts)
        if cute.arch.make_warp_uniform(thread // WARP) == tiling.warps:
            feeder = Feeder(tiles, tiling, self.early)
            feeder.run(shared, weights, x, segments, last - first, first - base * tiles, end - base)
        else:
            if const_expr(self.early):
                cute.arch.griddepcontrol_wait()
            self.compute(shared, bias, out, alpha, limit, segments, last - first, first - base * tiles)

    @cute.jit
    def set_up(self, shared: Int32) -> None:
        """The barriers: a copy and rows of x are announced by the feeder; warps free stages, some of them sums."""
        tiling, thread = self.tiling, cute.arch.thread_idx()[0]
        if thread < tiling.barriers:
            freed = (thread >= tiling.stages) & (thread < 2 * tiling.stages)
            arrivals = vector.select(freed, Int32(tiling.warps), Int32(1))
            arrivals = vector.select(thread == tiling.barriers - 1, Int32(tiling.adders), arrivals)
            cute.arch.mbarrier_init(barrier(shared, thread), arrivals)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def compute(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, segments: list[cute.Tensor],
        items: Int32, tile: Int32,
    ) -> None:  # fmt: skip
        """A computing warp: its columns of each item, and its turn in adding up."""
        tiling, meet = self.tiling, Sums(self.tiles, self.tiling, self.gated)
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        meeting, added = shared + tiling.meeting_offset, barrier(shared, tiling.barriers - 1)
        sums = cute.make_rmem_tensor(4 * tiling.parts, Float32)
        # A fresh barrier lets a wait for the phase before its first one pass.
        stage, parity, part, sums_parity = Int32(0), Int32(0), Int32(warp), Int32(1)
        segment, buffer, row_parity = Int32(-1), Int32(tiling.buffers - 1), Int32(1)
        expert, count, start, factor = Int32(0), Int32(0), Int32(0), Int32(0)
        for done in range(items):
            if (tile == 0) | (done == 0):
                segment += 1
                buffer += 1
                if buffer == tiling.buffers:
                    buffer = Int32(0)
                    row_parity ^= 1
                expert, start, count, factor = [values[segment] for values in segments]
                wait(barrier(shared, 2 * tiling.stages + buffer), row_parity)
            biases = Uint32(0)
            if part < tiling.parts:
                biases = meet.bias(bias, expert, tile, part)
            stage, parity, live = self.item(shared, sums, buffer, count, stage, parity)
            wait(added, sums_parity)
            meet.store(meeting, warp, sums, live)
            cute.arch.barrier(barrier_id=1, number_of_threads=tiling.warps * WARP)
            for again in range_constexpr(0, tiling.parts, tiling.warps):
                if part + again < live:
                    if const_expr(again > 0):
                        biases = meet.bias(bias, expert, tile, part + again)
                    target = out + (Int64(start) * (16 * self.tiles) + tile * 16) * meet.pair_bytes
                    meet.finish(meeting, part + again, target, count, factor, biases, alpha, limit)
            if part < tiling.adders:
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(added)
            sums_parity ^= 1
            part += tiling.turn
            if part >= tiling.warps:
                part -= tiling.warps
            tile += 1
            if tile == self.tiles:
                tile = Int32(0)

    @cute.jit
    def item(
        self, shared: Int32, sums: cute.Tensor, buffer: Int32, count: Int32, stage: Int32, parity: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """An item's sums, for all rows or for half of them; the stage and parity that come next, the parts with sums.

        Experts with more than 8 rows are few up to 128 tokens, and the others need only every second product.
        """
        all_tiles, few, live = self.tiling.row_tiles, self.tiling.few_row_tiles, Int32(self.tiling.parts)
        sums.fill(0.0)
        if const_expr(few < all_tiles):
            if count > few * 8:
                stage, parity = self.accumulate(shared, sums, buffer, count, stage, parity, all_tiles)
            else:
                live = Int32(2 * few)
                stage, parity = self.accumulate(shared, sums, buffer, count, stage, parity, few)
        else:
            stage, parity = self.accumulate(shared, sums, buffer, count, stage, parity, all_tiles)
        return stage, parity, live

    @cute.jit
    def accumulate(
        self, shared: Int32, sums: cute.Tensor, buffer: Int32, count: Int32, stage: Int32, parity: Int32,
        row_tiles: cutlass.Constexpr,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """An item's products, for `row_tiles` times 8 rows of x; the stage and parity that come next."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        # A lane names a row of each 8, or the last one in place of any beyond, and 8 of 32 columns.
        at = shared + tiling.row_offset + buffer * (tiling.rows * tiling.row_stride) + lane // 8 * 16
        rows = [at + vector.min_of(lane % 8 + 8 * i, count - 1) * tiling.row_stride for i in range(row_tiles)]
        for step in range_constexpr(tiling.steps):
            wait(barrier(shared, stage), parity)
            self.multiply(shared, rows, stage, step, sums)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier(shared, stage + tiling.stages))
            stage, parity = next_stage(stage, parity, self.tiling.stages)
        return stage, parity

    def multiply(self, shared: Any, rows: Any, stage: Any, step: int, sums: Any) -> None:
        """Add a step's products: decoded weights · x, 16 outputs by 8 rows at a time.

        Of the columns a warp has every `warps`th, in whatever steps they come.
        """
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        ring = shared + tiling.ring_offset + stage * tiling.stage_bytes
        for block in range(tiling.step_columns):
            column = block * tiling.warps + warp
            codes = load_shared(ring + column * TILE_BYTES + lane * 16, 4)
            scales = load_shared(ring + column * TILE_BYTES + CODE_BYTES + lane // 4 * 4, 1)[0]
            behind = (column + step * tiling.step_columns * tiling.warps) * 64
            values = [load_matrices(row + behind) for row in rows]
            for half in range(2):
                first, second = (decode(codes[i], scales, i) for i in (2 * half, 2 * half + 1))
                for k in (0, 2):
                    left = (first[k], second[k], first[k + 1], second[k + 1])
                    for i, value in enumerate(values):
                        at = (2 * i + half) * 4
                        total = [sums[at + j] for j in range(4)]
                        total = multiply_add(total, left, (value[k], value[k + 1]), "bf16")
                        for j in range(4):
                            sums[at + j] = total[j]
