"""Expert layers of many rows on Hopper in FP8: weights, decoded to e4m3 in registers, times rows in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.e4m3_feeder import E4m3Feeder
from rose_dist.kernels.cute.e4m3_operands import decode_e4m3, magnitudes, origins, row_factor
from rose_dist.kernels.cute.expert_segments import list_even_segments, load_experts, load_factors
from rose_dist.kernels.cute.expert_slots import scan_starts, shared_integers
from rose_dist.kernels.cute.mxfp4_operands import barrier, load_shared, next_stage, wait
from rose_dist.kernels.cute.swiglu import clamped_swiglu_value
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
from rose_dist.kernels.e4m3_tiling import ROW_GROUP, E4m3Tiling
from rose_dist.kernels.mxfp4_e4m3 import ACTIVATION_EXPONENT, GROUPS
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, TILE_BYTES
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_matrix import (
    await_products,
    await_sums,
    commit_products,
    descriptor,
    fence_products,
    multiply_add_e4m3_async,
)
from rose_dist.kernels.warpgroup_tiling import BIAS_BYTES, WARPGROUP

SEGMENTS = 1024
"""Most (expert, rows of x at a time) pairs of a launch."""
CELLS = 2
"""Of 16 columns, in a scale block."""


@cache
def launcher(arch: Arch, experts: int, tiles: int, tiling: E4m3Tiling, gated: bool) -> jit.Launcher:
    return jit.load(E4m3ExpertGemm(arch, experts, tiles, tiling, gated))


@dataclass(frozen=True)
class E4m3ExpertGemm(jit.Kernel):
    """What `mxfp4_e4m3` says, of one layer, gated or not, by items as in `WarpgroupExpertGemm`.

    A warp has half of its 32 matrix rows under way, one product a scale block, while it decodes the other half.
    """

    experts: int
    tiles: int
    tiling: E4m3Tiling
    gated: bool

    @cute.jit
    def __call__(
        self, weights: Int64, rescale: Int64, tops: Int64, bias: Int64, x: Int64, scales: Int64, counts: Int64,
        offsets: Int64, out: Int64, alpha: Float32, limit: Float32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: those of `ExpertLinear`, except tops, as in `PackedMxfp4`; x, codes in groups of rows; scales,
        fp32 of each row of codes, 0 without gate; out, codes in groups with a gate, else bf16 rows.
        """
        self.kernel(weights, rescale, tops, bias, x, scales, counts, offsets, out, alpha, limit).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], smem=self.tiling.shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @property
    def groups(self) -> int:
        """Items that a segment needs."""
        return -(-self.tiles // self.tiling.warps)

    @property
    def feeder(self) -> E4m3Feeder:
        return E4m3Feeder(self.tiles, self.tiling)

    @cute.kernel
    def kernel(
        self, weights: Int64, rescale: Int64, tops: Int64, bias: Int64, x: Int64, scales: Int64, counts: Int64,
        offsets: Int64, out: Int64, alpha: Float32, limit: Float32,
    ) -> None:  # fmt: skip
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        segments = [shared_integers(SEGMENTS) for _ in range(4)]
        grouped, away = shared_integers(self.experts + 1), shared_integers(self.experts)
        if thread < 2 * tiling.stages:
            arrivals = vector.select(thread < tiling.stages, Int32(1), Int32(tiling.warps))
            cute.arch.mbarrier_init(barrier(shared, thread), arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        factors = load_factors([rescale], self.experts, tiling.threads)
        mine = load_experts(counts, offsets, factors, self.experts, tiling.threads)
        self.find_groups(mine, grouped, away)
        mine = [(e, count, grouped[vector.min_of(e, Int32(self.experts - 1))], f) for e, count, _, f in mine]
        items = list_even_segments(mine, segments, tiling.rows, self.experts, tiling.threads, ROW_GROUP) * self.groups
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if warp >= tiling.warps:
            cute.arch.setmaxregister_decrease(tiling.registers[0])
            if warp == tiling.warps:
                self.feeder.run(shared, weights, tops, bias, x, scales, segments, items)
        else:
            cute.arch.setmaxregister_increase(tiling.registers[1])
            self.compute(shared, bias, out, alpha, limit, segments, away, items, warp)

    @cute.jit
    def find_groups(self, mine: list[Any], grouped: cute.Tensor, away: cute.Tensor) -> None:
        """Where each expert's groups of rows start, and how far from there its rows are in what has no groups."""
        counted, totals = shared_integers(self.experts), shared_integers(self.tiling.threads // WARP)
        for i in range_constexpr(len(mine)):
            if mine[i][0] < self.experts:
                counted[mine[i][0]] = mine[i][1]
        cute.arch.sync_threads()
        scan_starts(counted, grouped, totals, GROUPS, self.experts, self.tiling.threads)
        for i in range_constexpr(len(mine)):
            if mine[i][0] < self.experts:
                away[mine[i][0]] = mine[i][2] - grouped[mine[i][0]]

    @cute.jit
    def compute(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, segments: list[cute.Tensor],
        away: cute.Tensor, items: Int32, warp: Int32,
    ) -> None:  # fmt: skip
        """A computing warp: one tile row of each item. One without does the last one's again, and writes nothing."""
        tiling = self.tiling
        stage, parity = Int32(0), Int32(0)
        for item in range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0]):
            segment, group = item // self.groups, item % self.groups
            tile = group * tiling.warps + warp
            if tile - warp % WARPGROUP < self.tiles:
                rows = [values[segment] for values in segments]
                rows[0] = away[rows[0]]
                self.take(shared, bias, out, alpha, limit, rows, tile, stage, parity, 0)
            else:
                self.pass_over(shared, stage, parity)
            stage, parity = self.after_item(stage, parity)

    @cute.jit
    def take(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, rows: list[Int32], tile: Int32,
        stage: Int32, parity: Int32, number: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """An item, with the least of the widths from that `number` on that holds its rows, as `WarpgroupExpertGemm`."""
        width = self.tiling.widths[number]
        if const_expr(width == self.tiling.rows):  # noqa: SIM114 - the other condition is the kernel's, not ours
            self.finish(shared, bias, out, alpha, limit, rows, tile, stage, parity, number)
        elif rows[2] <= width:
            self.finish(shared, bias, out, alpha, limit, rows, tile, stage, parity, number)
        else:
            self.take(shared, bias, out, alpha, limit, rows, tile, stage, parity, number + 1)

    @cute.jit
    def finish(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, rows: list[Int32], tile: Int32,
        stage: Int32, parity: Int32, number: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """An item's products and results."""
        lane, width = cute.arch.thread_idx()[0] % WARP, self.tiling.widths[number]
        shift, start, count, rescale = rows
        sums = cute.make_rmem_tensor(width, Float32)
        sums.fill(0.0)
        place = vector.min_of(tile, Int32(self.tiles - 1)) % self.tiling.warps
        wait(barrier(shared, stage), parity)
        tops = self.load_beside(shared, stage, self.tiling.tops_offset + place * 32 + lane // 4 * 4)
        last = self.accumulate(shared, sums, origins(tops), place, stage, parity, width)
        exponent = 0 if self.gated else -ACTIVATION_EXPONENT
        factors = [row_factor(tops, row, exponent) * ptx.from_bits(Uint32(rescale)) for row in range(4)]
        words = [Uint32(0), Uint32(0)]
        if bias != 0:
            words = self.load_biases(shared, last, place)
        biases = [(ptx.from_bits(w << Uint32(16)), ptx.from_bits(w & Uint32(0xFFFF0000))) for w in words]
        row = lane % 4 * 2
        if tile < self.tiles:
            if const_expr(self.gated):
                group = Int64(start // ROW_GROUP) * self.tiles + tile
                target = out + group * (ROW_GROUP * 16) + (row * 16 + lane // 4 * 2)
                scales = shared + self.tiling.ring_offset + last * self.tiling.stage_bytes + self.tiling.scale_offset
                self.write_codes(sums, factors, biases, scales + row * 4, target, count - row, alpha, limit, width)
            else:
                target = out + (Int64(start + shift + row) * (16 * self.tiles) + (tile * 16 + lane // 4)) * 4
                self.write_rows(sums, factors, biases, target, count - row, width)
        self.release(shared, last)

    def load_beside(self, shared: Any, stage: Any, offset: Any) -> Any:
        """A word of a stage."""
        return load_shared(shared + self.tiling.ring_offset + stage * self.tiling.stage_bytes + offset, 1)[0]

    def load_biases(self, shared: Any, stage: Any, place: Any) -> Any:
        """Of this lane's pairs of matrix rows, a word each, from an item's last stage."""
        own = self.tiling.bias_offset + place * BIAS_BYTES + cute.arch.thread_idx()[0] % WARP // 4 * 4
        return [self.load_beside(shared, stage, own + half * (BIAS_BYTES // 2)) for half in range(2)]

    @cute.jit
    def after_item(self, stage: Int32, parity: Int32) -> tuple[Int32, Int32]:
        """The stage and parity that come after an item's."""
        steps, stages = self.tiling.steps, self.tiling.stages
        stage += steps % stages
        parity ^= steps // stages & 1
        if stage >= stages:
            stage -= stages
            parity ^= 1
        return stage, parity

    @cute.jit
    def pass_over(self, shared: Int32, stage: Int32, parity: Int32) -> None:
        """Free an item's stages: a warpgroup that has no tile row."""
        for _ in range(self.tiling.steps):
            wait(barrier(shared, stage), parity)
            self.release(shared, stage)
            stage, parity = next_stage(stage, parity, self.tiling.stages)

    @cute.jit
    def release(self, shared: Int32, stage: Int32) -> None:
        cute.arch.sync_warp()
        if cute.arch.thread_idx()[0] % WARP == 0:
            cute.arch.mbarrier_arrive(barrier(shared, stage + self.tiling.stages))

    @cute.jit
    def accumulate(
        self, shared: Int32, sums: cute.Tensor, firsts: list[Uint32], place: Int32, stage: Int32, parity: Int32,
        width: cutlass.Constexpr,
    ) -> Int32:  # fmt: skip
        """An item's products, for `width` rows of x, from its first stage on, which is there. Returns the last stage,
        which is still to be freed. Why a turn begins in the middle: `WarpgroupExpertGemm.accumulate`.
        """
        tiling = self.tiling
        codes = cute.make_rmem_tensor(5 * tiling.step_columns, Uint32)
        left = cute.make_rmem_tensor(4, Uint32)
        self.load_codes(shared, stage, place, codes)
        self.decode_half(codes, 0, firsts, left)
        before = stage
        for step in range(tiling.steps):
            ring = shared + tiling.ring_offset + stage * tiling.stage_bytes
            for i in range_constexpr(2 * tiling.step_columns):
                self.multiply(ring, i, left, sums, width)
                await_products(1)
                if const_expr(i + 1 < 2 * tiling.step_columns):
                    self.decode_half(codes, i + 1, firsts, left)
                else:
                    before = stage
                    stage, parity = next_stage(stage, parity, tiling.stages)
                    if step + 1 < tiling.steps:
                        wait(barrier(shared, stage), parity)
                        self.load_codes(shared, stage, place, codes)
                    self.decode_half(codes, 0, firsts, left)
                if const_expr(i == 0):
                    if step > 0:
                        self.release(shared, before)
        for i, value in enumerate(await_sums([sums[i] for i in range(width)])):
            sums[i] = value
        return before

    def load_codes(self, shared: Any, stage: Any, place: Any, codes: Any) -> None:
        """A stage's codes and scales, 5 words a block."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        weights = shared + tiling.ring_offset + tiling.x_bytes + stage * tiling.stage_bytes
        weights += place * tiling.tile_row_bytes
        for block in range(tiling.step_columns):
            words = load_shared(weights + block * TILE_BYTES + lane * 16, 4)
            words += load_shared(weights + block * TILE_BYTES + CODE_BYTES + lane // 4 * 4, 1)
            for i, word in enumerate(words):
                codes[5 * block + i] = word

    def decode_half(self, codes: Any, number: int, firsts: Any, left: Any) -> None:
        """Half `number` of a stage, 16 rows by a scale block, as the left operand of a product."""
        block, half = divmod(number, 2)
        for i in range(2):
            row = 2 * half + i
            table = magnitudes(codes[5 * block + 4], row, firsts[row])
            left[i], left[2 + i] = decode_e4m3(codes[5 * block + row], *table)

    def multiply(self, ring: Any, number: int, left: Any, sums: Any, width: int) -> None:
        """Start the product of a stage's half `number`."""
        block, half = divmod(number, 2)
        at = half * (width // 2)
        fence_products()
        right = descriptor(ring + block * (CELLS * ROW_GROUP * 16), ROW_GROUP)
        total = multiply_add_e4m3_async(
            [sums[at + i] for i in range(width // 2)], [left[i] for i in range(4)], right,
            CELLS * self.tiling.step_columns,
        )  # fmt: skip
        commit_products()
        for i, value in enumerate(total):
            sums[at + i] = value

    def write_codes(
        self, sums: Any, factors: Any, biases: Any, scales: Any, target: Any, left: Any, alpha: Any, limit: Any,
        width: int,
    ) -> None:  # fmt: skip
        """Two results of each row of x, which are neighbours in a cell. `target` is where this lane's first row has
        them, `scales` where its scale is, `left` rows follow.
        """
        for tile in range(width // 8):
            both = [ptx.from_bits(word) for word in load_shared(scales + tile * 32, 2)]
            for i, scale in enumerate(both):
                codes = []
                for half in range(2):
                    at = half * (width // 2) + tile * 4 + i
                    gate = sums[at] * factors[2 * half] * scale + biases[half][0]
                    linear = sums[at + 2] * factors[2 * half + 1] * scale + biases[half][1]
                    codes.append(clamped_swiglu_value(gate, linear, alpha, limit) * Float32(2.0**ACTIVATION_EXPONENT))
                row = tile * 8 + i
                place = target + (tile * self.tiles * (ROW_GROUP * 16) + i * 16)
                ptx.store_where(row < left, place, ptx.to_e4m3x2(*codes))

    def write_rows(self, sums: Any, factors: Any, biases: Any, target: Any, left: Any, width: int) -> None:
        """A pair of results of each row of x for each half of the tile, in bf16. Arguments as in `write_codes`."""
        for tile in range(width // 8):
            for i in range(2):
                row = tile * 8 + i
                for half in range(2):
                    at = half * (width // 2) + tile * 4 + i
                    even, odd = sums[at] * factors[2 * half], sums[at + 2] * factors[2 * half + 1]
                    value = ptx.to_bf16x2(even + biases[half][0], odd + biases[half][1])
                    ptx.store_where(row < left, target + (row * (64 * self.tiles) + half * 32), value)
