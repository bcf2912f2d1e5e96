"""Expert layers of many rows: MXFP4 weights are decoded in registers and each used for up to 64 rows of x."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.expert_segments import count_segments, list_segments, load_experts, load_factors
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.mxfp4_operands import barrier, decode, load_shared, next_stage, wait
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
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.mxfp4_experts import GEMM_SEGMENTS
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, TILE_BYTES
from rose_dist.kernels.variants import WARP, GemmTiling
from rose_dist.kernels.warp_matrix import load_matrices, multiply_add


@cache
def launcher(arch: Arch, experts: int, tiles: int, tiling: GemmTiling, gated: bool) -> jit.Launcher:
    return jit.load(ExpertGemm(arch, experts, tiles, tiling, gated))


@dataclass(frozen=True)
class ExpertGemm(jit.Kernel):
    """The results of `mxfp4_experts.ExpertLinear`, summed in another order: all columns by one warp.

    A block takes items, each `warps` tile rows of an expert's matrix times up to 64 rows of x; neighbouring blocks take
    neighbouring items, and so share weights and rows in L2. A computing warp has a tile row. Feeding warps copy pieces
    of the tile rows and of x into a ring in shared memory.

    experts, tiles, gated: as there.
    """

    experts: int
    tiles: int
    tiling: GemmTiling
    gated: bool

    @cute.jit
    def __call__(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, out: Int64,
        alpha: Float32, limit: Float32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses as in `ExpertLinear`."""
        self.kernel(weights, rescale, bias, x, counts, offsets, out, alpha, limit).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], smem=self.tiling.shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @property
    def groups(self) -> int:
        """Items that a segment needs."""
        return -(-self.tiles // self.tiling.warps)

    @cute.kernel
    def kernel(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, out: Int64,
        alpha: Float32, limit: Float32,
    ) -> None:  # fmt: skip
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        segments = [shared_integers(GEMM_SEGMENTS) for _ in range(4)]
        starts = shared_integers(self.experts + 1)
        if thread < 2 * tiling.stages:
            arrivals = vector.select(thread < tiling.stages, Int32(tiling.feeders), Int32(tiling.warps))
            cute.arch.mbarrier_init(barrier(shared, thread), arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        factors = load_factors([rescale], self.experts, tiling.threads)
        mine = load_experts(counts, offsets, factors, self.experts, tiling.threads)
        count_segments(mine, starts, tiling.rows, self.experts, tiling.threads)
        number = starts[self.experts]
        list_segments(mine, starts, segments, Int32(0), number, tiling.rows, self.experts)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if warp >= tiling.warps:
            self.feed(shared, weights, x, segments, number * self.groups, warp - tiling.warps)
        else:
            self.compute(shared, bias, out, alpha, limit, segments, number * self.groups, warp)

    @cute.jit
    def feed(
        self, shared: Int32, weights: Int64, x: Int64, segments: list[cute.Tensor], items: Int32, feeder: Int32
    ) -> None:
        """A feeding warp: every `feeders`th row of x and tile row, a lane each."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        own = lane * tiling.feeders + feeder
        # A fresh barrier lets a wait for the phase before its first one pass.
        stage, parity = Int32(0), Int32(1)
        for item in range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0]):
            segment, group = item // self.groups, item % self.groups
            count, tile = segments[2][segment], group * tiling.warps
            here = vector.min_of(Int32(tiling.warps), self.tiles - tile)
            row = x + Int64(segments[1][segment] + own) * (tiling.columns * 64)
            source = weights + (Int64(segments[0][segment]) * self.tiles + (tile + own)) * (tiling.columns * TILE_BYTES)
            expected = self.shared_out(count, feeder) * tiling.row_bytes
            expected += self.shared_out(here, feeder) * tiling.tile_row_bytes
            for _ in range(tiling.steps):
                wait(barrier(shared, stage + tiling.stages), parity)
                full = barrier(shared, stage)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, expected)
                cute.arch.sync_warp()
                target = shared + tiling.ring_offset + stage * tiling.stage_bytes
                if own < count:
                    ptx.copy_to_shared(target + own * tiling.row_stride, row, tiling.row_bytes, full.toint())
                if own < here:
                    ptx.copy_to_shared(
                        target + tiling.x_bytes + own * tiling.tile_row_bytes, source, tiling.tile_row_bytes,
                        full.toint(),
                    )  # fmt: skip
                row += tiling.row_bytes
                source += tiling.tile_row_bytes
                stage, parity = next_stage(stage, parity, self.tiling.stages)

    def shared_out(self, count: Any, feeder: Any) -> Any:
        """How many of 0 … count − 1 are this feeder's."""
        return (count + (self.tiling.feeders - 1) - feeder) // self.tiling.feeders

    @cute.jit
    def compute(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, segments: list[cute.Tensor],
        items: Int32, warp: Int32,
    ) -> None:  # fmt: skip
        """A computing warp: one tile row of each item. One without does the last one's again, and writes nothing."""
        tiling = self.tiling
        lane = cute.arch.thread_idx()[0] % WARP
        stage, parity = Int32(0), Int32(0)
        sums = cute.make_rmem_tensor(8 * tiling.row_tiles, Float32)
        for item in range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0]):
            segment, group = item // self.groups, item % self.groups
            expert, start, count, factor = [values[segment] for values in segments]
            tile = group * tiling.warps + warp
            place = vector.min_of(warp, self.tiles - 1 - group * tiling.warps)
            sums.fill(0.0)
            if count > tiling.rows // 2:
                stage, parity = self.accumulate(shared, sums, count, place, stage, parity, tiling.row_tiles)
            else:
                stage, parity = self.accumulate(shared, sums, count, place, stage, parity, tiling.row_tiles // 2)
            if tile < self.tiles:
                for half in range_constexpr(2):
                    pair = tile * 16 + half * 8 + lane // 4
                    words = Uint32(0)
                    if bias != 0:
                        words = Uint32(vector.scalar(bias + (Int64(expert) * (16 * self.tiles) + pair) * 4, Uint32)[0])
                    target = out + (Int64(start) * (16 * self.tiles) + pair) * self.pair_bytes
                    self.write(sums, half, words, target, count, factor, alpha, limit)

    @cute.jit
    def accumulate(
        self, shared: Int32, sums: cute.Tensor, count: Int32, place: Int32, stage: Int32, parity: Int32,
        row_tiles: cutlass.Constexpr,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """An item's products, for `row_tiles` times 8 rows of x; the stage and parity that come next."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        rows = [
            vector.min_of(lane % 8 + 8 * i, count - 1) * tiling.row_stride + lane // 8 * 16 for i in range(row_tiles)
        ]
        for _ in range(tiling.steps):
            wait(barrier(shared, stage), parity)
            ring = shared + tiling.ring_offset + stage * tiling.stage_bytes
            self.multiply(ring, ring + tiling.x_bytes + place * tiling.tile_row_bytes, rows, sums)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier(shared, stage + tiling.stages))
            stage, parity = next_stage(stage, parity, self.tiling.stages)
        return stage, parity

    def multiply(self, ring: Any, weights: Any, rows: Any, sums: Any) -> None:
        """Add a stage's products."""
        lane = cute.arch.thread_idx()[0] % WARP
        for block in range(self.tiling.step_columns):
            codes = load_shared(weights + block * TILE_BYTES + lane * 16, 4)
            scales = load_shared(weights + block * TILE_BYTES + CODE_BYTES + lane // 4 * 4, 1)[0]
            words = [decode(codes[i], scales, i) for i in range(4)]
            for tile, row in enumerate(rows):
                value = load_matrices(ring + row + block * 64)
                for half in range(2):
                    first, second = words[2 * half : 2 * half + 2]
                    at = (half * self.tiling.row_tiles + tile) * 4
                    total = [sums[at + i] for i in range(4)]
                    for k in (0, 2):
                        left = (first[k], second[k], first[k + 1], second[k + 1])
                        total = multiply_add(total, left, (value[k], value[k + 1]), "bf16")
                    for i in range(4):
                        sums[at + i] = total[i]

    @property
    def pair_bytes(self) -> int:
        """Bytes of what two rows of a matrix give."""
        return 2 if self.gated else 4

    @cute.jit
    def write(
        self, sums: cute.Tensor, half: int, words: Uint32, target: Int64, count: Int32, factor: Int32, alpha: Float32,
        limit: Float32,
    ) -> None:  # fmt: skip
        """Results of 16 matrix rows; `target` is where the segment's first row has this lane's pair."""
        lane, scale = cute.arch.thread_idx()[0] % WARP, ptx.from_bits(Uint32(factor))
        low, high = ptx.from_bits(words << Uint32(16)), ptx.from_bits(words & Uint32(0xFFFF0000))
        for tile in range_constexpr(self.tiling.row_tiles):
            for i in range_constexpr(2):
                at = (half * self.tiling.row_tiles + tile) * 4 + i
                even, odd, row = sums[at] * scale + low, sums[at + 2] * scale + high, tile * 8 + lane % 4 * 2 + i
                if row < count:
                    place = target + Int64(row) * (16 * self.tiles * self.pair_bytes)
                    if const_expr(self.gated):
                        vector.scalar(place, BFloat16)[0] = BFloat16(clamped_swiglu_value(even, odd, alpha, limit))
                    else:
                        vector.scalar(place, Uint32)[0] = ptx.to_bf16x2(even, odd)
