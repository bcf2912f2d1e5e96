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

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.expert_segments import count_segments, list_segments, load_experts
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.mxfp4_operands import (
    barrier,
    decode,
    load_shared,
    load_shared_floats,
    next_stage,
    store_shared,
    wait,
)
from rose_dist.kernels.cute.swiglu import clamped_swiglu_value
from rose_dist.kernels.dsl import (
    BFloat16,
    Float32,
    Int32,
    Int64,
    Stream,
    Uint8,
    Uint32,
    const_expr,
    cute,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, TILE_BYTES
from rose_dist.kernels.variants import WARP, StreamTiling
from rose_dist.kernels.warp_matrix import multiply_add

SEGMENTS = 64
"""Most (expert, rows of x) pairs that one block may meet."""


@cache
def launcher(arch: Arch, experts: int, tiles: int, tiling: StreamTiling, gated: bool, early: bool) -> jit.Launcher:
    return jit.load(ExpertLinear(arch, experts, tiles, tiling, gated, early))


@dataclass(frozen=True)
class ExpertLinear(jit.Kernel):
    """y[r] = weight[e] · x[r] + bias[e] over rows packed by expert; or of each pair of these the clamped SwiGLU.

    experts, tiles: matrices, and tile rows of each.
    gated: even outputs are gates, odd ones linear.
    early: `counts` and `offsets` come from before the launch that comes before, so that weights may be fetched while
        that one still runs.
    """

    experts: int
    tiles: int
    tiling: StreamTiling
    gated: bool
    early: bool

    @cute.jit
    def __call__(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, out: Int64,
        alpha: Float32, limit: Float32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: weights u8 [experts, tiles, columns / 32, 544], rescale fp32 [experts], bias bf16 [experts,
        32 · tiles] or 0, x bf16 [rows, columns], counts int32 [experts], offsets int64 [experts + 1], out bf16 [rows,
        32 · tiles] or half of that if gated.
        """
        self.kernel(weights, rescale, bias, x, counts, offsets, out, alpha, limit).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], smem=self.tiling.shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=self.tiling.per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, out: Int64,
        alpha: Float32, limit: Float32,
    ) -> None:  # fmt: skip
        tiling, tiles = self.tiling, self.tiles
        thread, block, blocks = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        segments = [shared_integers(SEGMENTS) for _ in range(4)]
        starts = shared_integers(self.experts + 1)
        if thread < tiling.barriers:
            freed = (thread >= tiling.stages) & (thread < 2 * tiling.stages)
            cute.arch.mbarrier_init(barrier(shared, thread), vector.select(freed, Int32(tiling.warps), Int32(1)))
        cute.arch.mbarrier_init_fence()
        if const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        mine = load_experts(counts, offsets, rescale, self.experts, tiling.threads)
        count_segments(mine, starts, tiling.rows, self.experts, tiling.threads)
        items = Uint32(starts[self.experts] * tiles)
        first = Int32(items * Uint32(block) // Uint32(blocks))
        last = Int32(items * Uint32(block + 1) // Uint32(blocks))
        base, end = first // tiles, (last + (tiles - 1)) // tiles
        list_segments(mine, starts, segments, base, end, tiling.rows, self.experts)
        if cute.arch.make_warp_uniform(thread // WARP) == tiling.warps:
            self.feed(shared, weights, x, segments, last - first, first - base * tiles, end - base)
        else:
            if const_expr(self.early):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            self.compute(shared, bias, out, alpha, limit, segments, last - first, first - base * tiles)

    @cute.jit
    def feed(
        self, shared: Int32, weights: Int64, x: Int64, segments: list[cute.Tensor], items: Int32, tile: Int32,
        end: Int32,
    ) -> None:  # fmt: skip
        """The feeding warp: copies of the weights of all items, and of x of the `end` segments."""
        tiling = self.tiling
        count, segment = items * tiling.steps, Int32(0)
        left = (self.tiles - tile) * tiling.steps
        done_segment, done_left = Int32(0), left
        source = self.source(weights, segments[0], segment, tile, end)
        for stage in range_constexpr(tiling.stages):
            if stage < count:
                self.fetch(shared, source, Int32(stage))
            source, segment, left = self.next_source(weights, segments[0], source, segment, left, end)
        if const_expr(self.early):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        ptx.fence_async_copies()
        for ahead in range_constexpr(tiling.buffers):
            self.fetch_rows(shared, x, segments, Int32(ahead), end)
        stage, parity = Int32(0), Int32(0)
        for copy in range(tiling.stages, count + tiling.stages):
            # All warps are done with what the stage held, and with the rows of x that went with it.
            wait(barrier(shared, stage + tiling.stages), parity)
            if copy < count:
                self.fetch(shared, source, stage)
            source, segment, left = self.next_source(weights, segments[0], source, segment, left, end)
            done_left -= 1
            if done_left == 0:
                done_left = Int32(self.tiles * tiling.steps)
                done_segment += 1
                self.fetch_rows(shared, x, segments, done_segment + (tiling.buffers - 1), end)
            stage, parity = next_stage(stage, parity, self.tiling.stages)

    @cute.jit
    def compute(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, segments: list[cute.Tensor],
        items: Int32, tile: Int32,
    ) -> None:  # fmt: skip
        """A computing warp: its columns of each item, and its turn in adding up."""
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        stage, parity, part, meeting_set = Int32(0), Int32(0), Int32(warp), Int32(0)
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
            if (bias != 0) & (part < tiling.parts):
                pair = (expert * self.tiles + tile) * 16 + part // tiling.row_tiles * 8 + lane // 4
                biases = Uint32(vector.scalar(bias + Int64(pair) * 4, Uint32)[0])
            rows = self.row_addresses(shared, buffer, count)
            sums = [[Float32(0.0)] * 4 for _ in range(tiling.parts)]
            for step in range_constexpr(tiling.steps):
                wait(barrier(shared, stage), parity)
                sums = self.multiply(shared, rows, stage, step, sums)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(barrier(shared, stage + tiling.stages))
                stage, parity = next_stage(stage, parity, self.tiling.stages)
            meeting = shared + (tiling.meeting_offset + meeting_set)
            self.meet(meeting, warp, sums)
            cute.arch.barrier(barrier_id=1, number_of_threads=tiling.warps * WARP)
            for again in range_constexpr(0, tiling.parts, tiling.warps):
                if part + again < tiling.parts:
                    if const_expr(again > 0):
                        biases = self.late_bias(bias, expert, tile, part + again)
                    target = out + (Int64(start) * (16 * self.tiles) + tile * 16) * self.pair_bytes
                    self.finish(meeting, part + again, target, count, factor, biases, alpha, limit)
            meeting_set ^= tiling.meeting_bytes
            part += tiling.turn
            if part >= tiling.warps:
                part -= tiling.warps
            tile += 1
            if tile == self.tiles:
                tile = Int32(0)

    @cute.jit
    def source(self, weights: Int64, experts: cute.Tensor, segment: Int32, tile: Int32, end: Int32) -> Int64:
        """Where an item's 32 rows of weights start; anywhere behind the last segment."""
        source = weights
        if segment < end:
            row = Int64(experts[segment]) * self.tiles + tile
            source = weights + row * (self.tiling.columns * TILE_BYTES)
        return source

    @cute.jit
    def next_source(
        self, weights: Int64, experts: cute.Tensor, source: Int64, segment: Int32, left: Int32, end: Int32
    ) -> tuple[Int64, Int32, Int32]:
        """Source of the copy behind one, its segment, and how many copies that one has left."""
        source += self.tiling.stage_bytes
        left -= 1
        if left == 0:
            left = Int32(self.tiles * self.tiling.steps)
            segment += 1
            source = self.source(weights, experts, segment, Int32(0), end)
        return source, segment, left

    @cute.jit
    def fetch(self, shared: Int32, source: Int64, stage: Int32) -> None:
        """Start a copy into the ring."""
        size = self.tiling.stage_bytes
        if cute.arch.thread_idx()[0] % WARP == 0:
            full = barrier(shared, stage)
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            ptx.copy_to_shared(shared + self.tiling.ring_offset + stage * size, source, size, full.toint())

    @cute.jit
    def fetch_rows(self, shared: Int32, x: Int64, segments: list[cute.Tensor], segment: Int32, end: Int32) -> None:
        """Start the copies of a segment's rows, if there is such a segment; a lane a row."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        if segment < end:
            buffer = segment % tiling.buffers
            full = barrier(shared, 2 * tiling.stages + buffer)
            count, size = segments[2][segment], tiling.columns * 64
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, count * size)
            cute.arch.sync_warp()
            if lane < count:
                target = shared + tiling.row_offset + (buffer * tiling.rows + lane) * tiling.row_stride
                row = Int64(segments[1][segment] + lane)
                ptx.copy_to_shared(target, x + row * size, size, full.toint())

    def row_addresses(self, shared: Any, buffer: Any, count: Any) -> Any:
        """Where this lane reads x of each 8 rows: its own row's, or the last one's in place of any beyond."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        at = shared + tiling.row_offset + buffer * (tiling.rows * tiling.row_stride) + lane % 4 * 16
        return [at + vector.min_of(lane // 4 + 8 * i, count - 1) * tiling.row_stride for i in range(tiling.row_tiles)]

    def multiply(self, shared: Any, rows: Any, stage: Any, step: int, sums: Any) -> Any:
        """Add a step's products: decoded weights · x, 16 outputs by 8 rows at a time."""
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        ring = shared + tiling.ring_offset + stage * tiling.stage_bytes
        sums = [list(part) for part in sums]
        for block in range(tiling.step_columns):
            column = warp * tiling.step_columns + block
            codes = load_shared(ring + column * TILE_BYTES + lane * 16, 4)
            scales = load_shared(ring + column * TILE_BYTES + CODE_BYTES + lane // 4 * 4, 1)[0]
            behind = (column + step * tiling.step_columns * tiling.warps) * 64
            values = [load_shared(row + behind, 4) for row in rows]
            for half in range(2):
                first, second = (decode(codes[i], scales, i) for i in (2 * half, 2 * half + 1))
                for k in (0, 2):
                    left = (first[k], second[k], first[k + 1], second[k + 1])
                    for i, value in enumerate(values):
                        at = half * tiling.row_tiles + i
                        sums[at] = multiply_add(sums[at], left, (value[k], value[k + 1]), "bf16")
        return sums

    @cute.jit
    def meet(self, meeting: Int32, warp: Int32, sums: list[list[Float32]]) -> None:
        """Store this warp's sums where `finish` finds them."""
        if cute.arch.thread_idx()[0] % 4 < self.tiling.quads:
            for part in range_constexpr(self.tiling.parts):
                store_shared(meeting + self.meeting_place(warp, part), sums[part])

    def meeting_place(self, warp: Any, part: Any) -> Any:
        """Where this lane's sums of a warp's part meet; lanes that hold no row's have their neighbour's place."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        column = vector.min_of(lane % 4, Int32(tiling.quads - 1))
        return (warp * tiling.parts + part) * tiling.part_bytes + (lane // 4 * tiling.quads + column) * 16

    @property
    def pair_bytes(self) -> int:
        """Bytes of what two rows of a matrix give."""
        return 2 if self.gated else 4

    @cute.jit
    def late_bias(self, bias: Int64, expert: Int32, tile: Int32, part: Int32) -> Uint32:
        """The biases of a warp's further parts, where there are fewer warps than parts."""
        words = Uint32(0)
        if bias != 0:
            half, lane = part // self.tiling.row_tiles, cute.arch.thread_idx()[0] % WARP
            pair = (expert * self.tiles + tile) * 16 + half * 8 + lane // 4
            words = Uint32(vector.scalar(bias + Int64(pair) * 4, Uint32)[0])
        return words

    @cute.jit
    def finish(
        self, meeting: Int32, part: Int32, target: Int64, count: Int32, factor: Int32, biases: Uint32, alpha: Float32,
        limit: Float32,
    ) -> None:  # fmt: skip
        """Add the warps' sums of one part, 16 outputs by 8 rows, in the order of the warps, and write results.

        target: where the segment's first row has the item's first result.
        """
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        sums = load_shared_floats(meeting + self.meeting_place(0, part))
        for warp in range_constexpr(1, tiling.warps):
            more = load_shared_floats(meeting + self.meeting_place(warp, part))
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        half, row = part // tiling.row_tiles, part % tiling.row_tiles * 8 + lane % 4 * 2
        scale = ptx.from_bits(Uint32(factor))
        low, high = ptx.from_bits(biases << Uint32(16)), ptx.from_bits(biases & Uint32(0xFFFF0000))
        target += (row * (16 * self.tiles) + half * 8 + lane // 4) * self.pair_bytes
        for i in range_constexpr(2):
            even, odd = sums[i] * scale + low, sums[2 + i] * scale + high
            if row + i < count:
                if const_expr(self.gated):
                    vector.scalar(target, BFloat16)[0] = BFloat16(clamped_swiglu_value(even, odd, alpha, limit))
                else:
                    vector.scalar(target, Uint32)[0] = ptx.to_bf16x2(even, odd)
            target += 16 * self.tiles * self.pair_bytes
