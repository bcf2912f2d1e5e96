"""What the expert GEMMs of warpgroups share: items, their rows of x in groups, and the ring's stages."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import jit, vector
from rose_dist.kernels.cute.expert_feeder import Feeder, Items
from rose_dist.kernels.cute.expert_segments import list_even_segments, load_experts, load_factors
from rose_dist.kernels.cute.expert_slots import scan_starts, shared_integers
from rose_dist.kernels.cute.mxfp4_operands import barrier, load_shared, next_stage, wait
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
from rose_dist.kernels.mxfp4_experts import GEMM_SEGMENTS
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, TILE_BYTES
from rose_dist.kernels.row_groups import GROUPS
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_matrix import await_products, await_sums, descriptor, further
from rose_dist.kernels.warpgroup_tiling import BIAS_BYTES, CELL_BYTES, ROW_GROUP, WARPGROUP, WarpgroupTiling


@dataclass(frozen=True)
class GroupedExpertGemm(jit.Kernel):
    """One layer of many rows on Hopper.

    A block takes items, each some groups of 32 matrix rows times up to 160 rows of x; neighbouring blocks take
    neighbouring items, and so share weights and rows in L2. Weights are decoded into the left operand, rows of x stand
    in shared memory as they came.

    Before its dependency wait a block reads weights, counts and offsets: these the launch before had waited for itself.

    experts, tiles: of the matrices; a tile is 32 rows.
    gated: the first layer, whose results are in groups; else the second, whose are rows.
    """

    experts: int
    tiles: int
    tiling: WarpgroupTiling
    gated: bool

    @cute.jit
    def __call__(
        self, weights: Int64, rescale: Int64, tops: Int64, bias: Int64, x: Int64, scales: Int64, counts: Int64,
        offsets: Int64, out: Int64, alpha: Float32, limit: Float32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: those of `ExpertLinear`, except tops, as in `PackedMxfp4`; x, in groups of rows; scales, fp32 of
        each row of codes, else 0; out, in groups with a gate, else bf16 rows.
        """
        self.kernel(weights, rescale, tops, bias, x, scales, counts, offsets, out, alpha, limit).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], smem=self.tiling.shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @property
    def feeder(self) -> Feeder:
        return Feeder(self.tiles, self.tiling)

    @cute.kernel
    def kernel(
        self, weights: Int64, rescale: Int64, tops: Int64, bias: Int64, x: Int64, scales: Int64, counts: Int64,
        offsets: Int64, out: Int64, alpha: Float32, limit: Float32,
    ) -> None:  # fmt: skip
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        segments = [shared_integers(GEMM_SEGMENTS) for _ in range(4)]
        grouped, away = shared_integers(self.experts + 1), shared_integers(self.experts)
        if thread < 2 * tiling.stages:
            arrivals = vector.select(thread < tiling.stages, Int32(WARPGROUP), Int32(tiling.warps))
            cute.arch.mbarrier_init(barrier(shared, thread), arrivals)
        cute.arch.mbarrier_init_fence()
        self.prepare(shared)
        factors = load_factors([rescale], self.experts, tiling.threads)
        mine = load_experts(counts, offsets, factors, self.experts, tiling.threads)
        self.find_groups(mine, grouped, away)
        mine = [(e, count, grouped[vector.min_of(e, Int32(self.experts - 1))], f) for e, count, _, f in mine]
        listed = list_even_segments(mine, segments, tiling.rows, self.experts, tiling.threads, ROW_GROUP)
        items = Items(listed, self.tiles, tiling.warps)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if warp >= tiling.warps:
            cute.arch.setmaxregister_decrease(tiling.registers[0])
            self.feeder.run(shared, weights, tops, bias, x, scales, segments, items, warp - tiling.warps)
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.setmaxregister_increase(tiling.registers[1])
            self.compute(shared, bias, out, alpha, limit, segments, away, items, warp)

    def prepare(self, shared: Any) -> None:
        """By all of a block's threads, which meet before `compute`."""

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
        away: cute.Tensor, items: Items, warp: Int32,
    ) -> None:  # fmt: skip
        """A computing warp: one tile row of each item. One without does the last one's again, and writes nothing."""
        stage, parity = Int32(0), Int32(0)
        for item in range(cute.arch.block_idx()[0], items.number, cute.arch.grid_dim()[0]):
            segment, tile = items.find(item)
            tile += warp
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

    @abstractmethod
    def finish(
        self, shared: Any, bias: Any, out: Any, alpha: Any, limit: Any, rows: list[Any], tile: Any, stage: Any,
        parity: Any, number: int,
    ) -> None:  # fmt: skip
        """An item's products, with width `number`, and results."""

    @cute.jit
    def accumulate(
        self, shared: Int32, sums: cute.Tensor, firsts: list[Uint32], place: Int32, stage: Int32, parity: Int32,
        width: cutlass.Constexpr,
    ) -> Int32:  # fmt: skip
        """An item's products, for `width` rows of x. Returns the last stage, which is still to be freed.

        firsts: for `decode`.

        Two parts of a tile are live, one that is multiplied and one that is decoded. The first part of the next stage
        is decoded at the end of a turn, not at the start: or the assembler, which loses sight of the products under
        way there, has each wait for the one before (ptxas C7513).
        """
        tiling, parts = self.tiling, self.tiling.parts
        codes = cute.make_rmem_tensor(5, Uint32)
        left = cute.make_rmem_tensor(self.words // parts, Uint32)
        wait(barrier(shared, stage), parity)
        self.load_codes(shared, stage, place, 0, codes)
        self.decode(codes, 0, firsts, left)
        before, step_cells, last = stage, tiling.stage_bytes // CELL_BYTES, parts * tiling.step_columns - 1
        right = further(descriptor(shared + tiling.ring_offset, ROW_GROUP), stage * step_cells)
        for step in range(tiling.steps):
            following, parity = self.after_step(step, stage, parity)
            for number in range_constexpr(last + 1):
                ends_tile = const_expr(number % parts == parts - 1)
                ahead = cute.make_rmem_tensor(5, Uint32)
                if const_expr(ends_tile and number < last):
                    self.load_codes(shared, stage, place, number // parts + 1, ahead)
                self.multiply(right, number, left, sums, width)
                if const_expr(number == last):
                    wait(barrier(shared, following), parity)
                    self.load_codes(shared, following, place, 0, ahead)
                await_products(min(last, 1))
                if const_expr(number == 0):
                    if step > 0:
                        self.release(shared, before)
                if const_expr(ends_tile):
                    for i in range_constexpr(5):
                        codes[i] = ahead[i]
                self.decode(codes, (number + 1) % parts, firsts, left)
            right = further(right, (following - stage) * step_cells)
            before, stage = stage, following
        for i, value in enumerate(await_sums([sums[i] for i in range(width)])):
            sums[i] = value
        return before

    def halves(self, part: int) -> list[tuple[int, int]]:
        """Of a tile's part: each half of the tile, 16 rows, and its place within the part."""
        count = 2 // self.tiling.parts
        return [(part * count + at, at) for at in range(count)]

    @property
    @abstractmethod
    def words(self) -> int:
        """Of the left operands of a tile, in a thread."""

    @abstractmethod
    def decode(self, codes: Any, part: int, firsts: list[Any], left: Any) -> None:
        """A tile's part as left operands."""

    @abstractmethod
    def multiply(self, right: Any, number: int, left: Any, sums: Any, width: int) -> None:
        """Start the products of a stage's part `number`; `right` begins at the stage's rows of x."""

    def load_codes(self, shared: Any, stage: Any, place: Any, block: int, codes: Any) -> None:
        """A scale block's codes and scales, 5 words."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        weights = shared + tiling.ring_offset + tiling.x_bytes + stage * tiling.stage_bytes
        weights += place * tiling.tile_row_bytes + block * TILE_BYTES
        words = load_shared(weights + lane * 16, 4) + load_shared(weights + CODE_BYTES + lane // 4 * 4, 1)
        for i, word in enumerate(words):
            codes[i] = word

    def load_beside(self, shared: Any, stage: Any, offset: Any) -> Any:
        """A word of a stage."""
        return load_shared(shared + self.tiling.ring_offset + stage * self.tiling.stage_bytes + offset, 1)[0]

    def load_biases(self, shared: Any, stage: Any, place: Any) -> Any:
        """Of this lane's pairs of matrix rows, a word each, from an item's last stage."""
        own = self.tiling.bias_offset + place * BIAS_BYTES + cute.arch.thread_idx()[0] % WARP // 4 * 4
        return [self.load_beside(shared, stage, own + half * (BIAS_BYTES // 2)) for half in range(2)]

    @cute.jit
    def after_step(self, step: Int32, stage: Int32, parity: Int32) -> tuple[Int32, Int32]:
        """The stage and parity that come after an item's step; the same again after its last."""
        following, next_parity = next_stage(stage, parity, self.tiling.stages)
        if step == self.tiling.steps - 1:
            following, next_parity = stage, parity
        return following, next_parity

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
