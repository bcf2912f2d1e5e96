"""What feeds the expert GEMM of warpgroups: pieces of weights by bulk copies, pieces of x by copies of 16 bytes."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import barrier, next_stage, wait
from rose_dist.kernels.dsl import Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.mxfp4_layout import TILE_BYTES
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import await_copies, commit_copies, copy_async
from rose_dist.kernels.warpgroup_matrix import CELL_BYTES
from rose_dist.kernels.warpgroup_tiling import BIAS_BYTES, WarpgroupTiling


@dataclass(frozen=True)
class Feeder:
    """The feeding warps: each copies every fourth few rows of x, the first one all weights and biases too.

    Bulk copies announce themselves. Of its other copies a warp awaits those of `late` stages ago whenever it has
    started a stage's, and announces them: so x is asked for as early as weights are, across the borders of items.
    """

    tiles: int
    """Groups of 32 rows of a matrix."""
    tiling: WarpgroupTiling

    def __post_init__(self) -> None:
        assert WARP % self.tiling.cells == 0, self.tiling

    @cute.jit
    def run(
        self, shared: Int32, weights: Int64, bias: Int64, x: Int64, segments: list[cute.Tensor], items: Int32,
        feeder: Int32,
    ) -> None:  # fmt: skip
        """Feeding warp number `feeder`, all of its items. Addresses as in `ExpertLinear`."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        groups = -(-self.tiles // tiling.warps)
        # A fresh barrier lets a wait for the phase before its first one pass.
        stage, parity, number = Int32(0), Int32(1), Int32(0)
        for item in range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0]):
            segment, group = item // groups, item % groups
            expert, start, count = [values[segment] for values in segments[:3]]
            tile = group * tiling.warps
            source = weights + (Int64(expert) * self.tiles + tile + lane) * (tiling.columns * TILE_BYTES)
            biases = Int64(0)
            if bias != 0:
                biases = bias + (Int64(expert) * self.tiles + tile) * BIAS_BYTES
            rows = x + Int64(start) * (tiling.columns * 64)
            for step in range(tiling.steps):
                wait(barrier(shared, stage + tiling.stages), parity)
                target = shared + tiling.ring_offset + stage * tiling.stage_bytes
                if feeder == 0:
                    self.copy_weights(target, source, biases, step, self.tiles - tile, barrier(shared, stage))
                self.copy_rows(target, rows + Int64(step) * (tiling.step_columns * 64), feeder, count)
                commit_copies()
                if number >= tiling.late:
                    await_copies(tiling.late)
                    self.announce(shared, number - tiling.late)
                number += 1
                stage, parity = next_stage(stage, parity, tiling.stages)
        await_copies(0)
        for last in range(vector.max_of(number - tiling.late, Int32(0)), number):
            self.announce(shared, last)

    @cute.jit
    def announce(self, shared: Int32, number: Int32) -> None:
        """This warp's copies for the block's step `number`, which have come."""
        # What this thread has copied, tensor cores read through another path than its own loads.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cute.arch.thread_idx()[0] % WARP == 0:
            cute.arch.mbarrier_arrive(barrier(shared, number % self.tiling.stages))

    @cute.jit
    def copy_weights(
        self, target: Int32, source: Int64, biases: Int64, step: Int32, left: Int32, full: cute.Pointer
    ) -> None:
        """Start copying a stage's piece of each tile row, a lane each, and what else an item's last stage holds.

        source: this lane's tile row; biases: 0 without; left: tile rows from the first one on.
        """
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        size, here = tiling.tile_row_bytes, vector.min_of(Int32(tiling.warps), left)
        with_biases = (biases != 0) & (step == tiling.steps - 1)
        if lane == 0:
            cute.arch.mbarrier_expect_tx(full, here * size)
            if with_biases:
                cute.arch.mbarrier_expect_tx(full, here * BIAS_BYTES)
                ptx.copy_to_shared(target + tiling.bias_offset, biases, here * BIAS_BYTES, full.toint())
        cute.arch.sync_warp()
        if lane < here:
            place = target + tiling.x_bytes + lane * size
            ptx.stream_to_shared(place, source + Int64(step) * size, size, full.toint())

    @cute.jit
    def copy_rows(self, target: Int32, rows: Int64, feeder: Int32, count: Int32) -> None:
        """Start copying a stage's columns of the segment's `count` rows, the first of which has them at `rows`.

        Neighbouring lanes copy neighbouring cells of a row: eight lanes' copies are one access, and what they have of a
        sector of memory is read once.
        """
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        cell, row = lane % tiling.cells, feeder * tiling.copy_rows + lane // tiling.cells
        place = target + (tiling.cell_place(cell) + row) * CELL_BYTES
        source, left = rows + Int64(row) * (tiling.columns * 64) + cell * CELL_BYTES, count - row
        for first in range_constexpr(0, tiling.rows, tiling.feeders * tiling.copy_rows):
            if first < left:
                copy_async(
                    place + first * CELL_BYTES, source + first * (tiling.columns * 64), Uint32(CELL_BYTES), CELL_BYTES
                )
