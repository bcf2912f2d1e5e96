"""Expert layers of many rows on Hopper: weights, decoded into registers, times rows of x in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.expert_segments import list_even_segments, load_experts, load_factors
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.mxfp4_feeder import Feeder
from rose_dist.kernels.cute.mxfp4_operands import barrier, decode, load_shared, next_stage, wait
from rose_dist.kernels.cute.swiglu import clamped_swiglu_value
from rose_dist.kernels.dsl import (
    Float32,
    Int32,
    Int64,
    Stream,
    Uint8,
    Uint16,
    Uint32,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, TILE_BYTES
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_matrix import (
    CELL_BYTES,
    RightOperand,
    await_products,
    await_sums,
    commit_products,
    descriptor,
    fence_products,
    further,
    multiply_add_async,
)
from rose_dist.kernels.warpgroup_tiling import BIAS_BYTES, WARPGROUP, WarpgroupTiling

SEGMENTS = 1024
"""Most (expert, rows of x at a time) pairs of a launch."""


@cache
def launcher(arch: Arch, experts: int, tiles: int, tiling: WarpgroupTiling, gated: bool) -> jit.Launcher:
    return jit.load(WarpgroupExpertGemm(arch, experts, tiles, tiling, gated))


@dataclass(frozen=True)
class WarpgroupExpertGemm(jit.Kernel):
    """The results of `mxfp4_experts_prefill.ExpertGemm`.

    A block takes items, each some groups of 32 matrix rows times up to 128 rows of x; neighbouring blocks take
    neighbouring items, and so share weights and rows in L2. Weights are decoded into the left operand. A warp has half
    of its 32 rows under way while it decodes the other half, and another warpgroup's products fill what is left.

    experts, tiles, gated: as there.
    """

    experts: int
    tiles: int
    tiling: WarpgroupTiling
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
        segments = [shared_integers(SEGMENTS) for _ in range(4)]
        if thread < 2 * tiling.stages:
            arrivals = vector.select(thread < tiling.stages, Int32(tiling.feeders), Int32(tiling.warps))
            cute.arch.mbarrier_init(barrier(shared, thread), arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        factors = load_factors([rescale], self.experts, tiling.threads)
        mine = load_experts(counts, offsets, factors, self.experts, tiling.threads)
        items = list_even_segments(mine, segments, tiling.rows, self.experts, tiling.threads) * self.groups
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if warp >= tiling.warps:
            cute.arch.setmaxregister_decrease(tiling.registers[0])
            Feeder(self.tiles, tiling).run(shared, weights, bias, x, segments, items, warp - tiling.warps)
        else:
            cute.arch.setmaxregister_increase(tiling.registers[1])
            self.compute(shared, bias, out, alpha, limit, segments, items, warp)

    @cute.jit
    def compute(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, segments: list[cute.Tensor],
        items: Int32, warp: Int32,
    ) -> None:  # fmt: skip
        """A computing warp: one tile row of each item. One without does the last one's again, and writes nothing."""
        tiling = self.tiling
        stage, parity = Int32(0), Int32(0)
        for item in range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0]):
            segment, group = item // self.groups, item % self.groups
            tile = group * tiling.warps + warp
            if tile - warp % WARPGROUP < self.tiles:
                rows = [values[segment] for values in segments]
                self.take(shared, bias, out, alpha, limit, rows, tile, stage, parity, 0)
            else:
                self.pass_over(shared, stage, parity)
            stage, parity = self.after_item(stage, parity)

    @cute.jit
    def take(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, rows: list[Int32], tile: Int32,
        stage: Int32, parity: Int32, number: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """An item, with the least of the widths from that `number` on that holds its rows.

        Each width has its sums and their way out to itself: where they met, the assembler would run out of registers,
        and have each product wait for the one before (ptxas C7512).
        """
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
        _, start, count, factor = rows
        sums = cute.make_rmem_tensor(width, Float32)
        sums.fill(0.0)
        place = vector.min_of(tile, Int32(self.tiles - 1)) % self.tiling.warps
        last = self.accumulate(shared, sums, place, stage, parity, width)
        biases = [Uint32(0), Uint32(0)]
        if bias != 0:
            biases = self.load_biases(shared, last, place)
        self.release(shared, last)
        if tile < self.tiles:
            for half in range_constexpr(2):
                pair, row = tile * 16 + half * 8 + lane // 4, lane % 4 * 2
                target = out + (Int64(start + row) * (16 * self.tiles) + pair) * self.pair_bytes
                self.write(sums, half, biases[half], target, count - row, factor, alpha, limit, number)

    def load_biases(self, shared: Any, stage: Any, place: Any) -> Any:
        """Of this lane's pairs of matrix rows, a word each, from an item's last stage."""
        at = shared + self.tiling.ring_offset + stage * self.tiling.stage_bytes + self.tiling.bias_offset
        at += place * BIAS_BYTES + cute.arch.thread_idx()[0] % WARP // 4 * 4
        return [load_shared(at + half * (BIAS_BYTES // 2), 1)[0] for half in range(2)]

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
        self, shared: Int32, sums: cute.Tensor, place: Int32, stage: Int32, parity: Int32, width: cutlass.Constexpr
    ) -> Int32:
        """An item's products, for `width` rows of x. Returns the last stage, which is still to be freed.

        Up to three halves of a tile are live: two that are multiplied and one that is decoded. The first half of the
        next stage is decoded at the end of a turn, not at the start: or the assembler, which loses sight of the
        products under way there, has each wait for the one before (ptxas C7513).
        """
        tiling = self.tiling
        codes = cute.make_rmem_tensor(5, Uint32)
        ahead = cute.make_rmem_tensor(5, Uint32)
        left = cute.make_rmem_tensor(8, Uint32)
        self.await_stage(shared, stage, parity)
        self.load_codes(shared, stage, place, 0, codes)
        self.decode_half(codes, 0, left)
        before, step_cells = stage, tiling.stage_bytes // CELL_BYTES
        right = further(descriptor(shared + tiling.ring_offset, tiling.cell_stride), stage * step_cells)
        for step in range(tiling.steps):
            following, parity = self.after_step(step, stage, parity)
            for block in range_constexpr(tiling.step_columns):
                self.multiply(right, 2 * block, left, sums, width)
                await_products(1)
                if const_expr(block == 0):
                    if step > 0:
                        self.release(shared, before)
                if const_expr(block + 1 < tiling.step_columns):
                    self.load_codes(shared, stage, place, block + 1, ahead)
                else:
                    self.await_stage(shared, following, parity)
                    self.load_codes(shared, following, place, 0, ahead)
                self.decode_half(codes, 1, left)
                self.multiply(right, 2 * block + 1, left, sums, width)
                await_products(1)
                for i in range_constexpr(5):
                    codes[i] = ahead[i]
                self.decode_half(codes, 0, left)
            right = further(right, (following - stage) * step_cells)
            before, stage = stage, following
        self.settle(sums, width)
        return before

    def await_stage(self, shared: Any, stage: Any, parity: Any) -> None:
        """Until a stage is full."""
        wait(barrier(shared, stage), parity)

    @cute.jit
    def after_step(self, step: Int32, stage: Int32, parity: Int32) -> tuple[Int32, Int32]:
        """The stage and parity that come after an item's step; the same again after its last."""
        following, next_parity = next_stage(stage, parity, self.tiling.stages)
        if step == self.tiling.steps - 1:
            following, next_parity = stage, parity
        return following, next_parity

    def load_codes(self, shared: Any, stage: Any, place: Any, block: int, codes: Any) -> None:
        """A scale block's codes and scales, 5 words."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        weights = shared + tiling.ring_offset + tiling.x_bytes + stage * tiling.stage_bytes
        weights += place * tiling.tile_row_bytes + block * TILE_BYTES
        words = load_shared(weights + lane * 16, 4) + load_shared(weights + CODE_BYTES + lane // 4 * 4, 1)
        for i, word in enumerate(words):
            codes[i] = word

    def decode_half(self, codes: Any, half: int, left: Any) -> None:
        """16 rows by a scale block, as the left operands of two products."""
        first, second = (decode(codes[i], codes[4], i) for i in (2 * half, 2 * half + 1))
        for k in range(4):
            left[2 * k], left[2 * k + 1] = first[k], second[k]

    def multiply(self, right: Any, number: int, left: Any, sums: Any, width: int) -> None:
        """Start the products of a stage's half `number`; `right` begins at the stage's rows of x."""
        block, half = divmod(number, 2)
        at = half * (width // 2)
        fence_products()
        total = [sums[at + i] for i in range(width // 2)]
        for k in range(2):
            cells = further(right, (2 * block + k) * self.tiling.pair_stride)
            total = multiply_add_async(total, [left[4 * k + i] for i in range(4)], RightOperand(cells))
        commit_products()
        for i, value in enumerate(total):
            sums[at + i] = value

    def settle(self, sums: Any, width: int) -> None:
        """Wait for all products."""
        for i, value in enumerate(await_sums([sums[i] for i in range(width)])):
            sums[i] = value

    @property
    def pair_bytes(self) -> int:
        """Bytes of what two rows of a matrix give."""
        return 2 if self.gated else 4

    def write(
        self, sums: Any, half: int, words: Any, target: Any, left: Any, factor: Any, alpha: Any, limit: Any, number: int
    ) -> None:  # fmt: skip
        """Results of 16 matrix rows; `target` is where this lane's first row of x has its pair, `left` rows follow."""
        scale, width = ptx.from_bits(Uint32(factor)), self.tiling.widths[number]
        low, high = ptx.from_bits(words << Uint32(16)), ptx.from_bits(words & Uint32(0xFFFF0000))
        for tile in range(width // 8):
            at = half * (width // 2) + tile * 4
            pairs = [(sums[at + i] * scale + low, sums[at + 2 + i] * scale + high) for i in range(2)]
            if self.gated:
                both = ptx.to_bf16x2(*(clamped_swiglu_value(*pair, alpha, limit) for pair in pairs))
                values = [Uint16(both), Uint16(both >> Uint32(16))]
            else:
                values = [ptx.to_bf16x2(*pair) for pair in pairs]
            for i, value in enumerate(values):
                row = tile * 8 + i
                ptx.store_where(row < left, target + row * (16 * self.tiles * self.pair_bytes), value)
