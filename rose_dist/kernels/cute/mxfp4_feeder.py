"""What feeds the expert GEMM of warpgroups: pieces of weights by bulk copies, pieces of x through registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import barrier, store_shared_word, wait
from rose_dist.kernels.dsl import Int32, Int64, cute, range_constexpr
from rose_dist.kernels.mxfp4_layout import TILE_BYTES
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_matrix import CELL_BYTES
from rose_dist.kernels.warpgroup_tiling import FEEDER_ROWS, WarpgroupTiling

CELLS = 4
"""Of 8 columns, in a scale block."""


@dataclass(frozen=True)
class Feeder:
    """The feeding warps. As many as are needed to hold a stage's rows of x are a team; teams take turns.

    A warp has loads of x for its next stage under way while it waits to store those of this one.

    A wait by parity tells a stage's last use from the one before it only where the use before that is known to be over.
    Within an item a warp moves on by as many stages as there are teams, no more than the ring has. Between items of
    small teams it could move further; so it first waits until the item's first stage is free, its own or not. All that
    was in the ring before that stage's last use is then over.

    The decoded columns of a lane, 8q … 8q + 7 of a scale block, are not those that the product wants from it; columns
    of x are put into the same order here, by pairs.
    """

    tiles: int
    """Groups of 32 rows of a matrix."""
    tiling: WarpgroupTiling

    @cute.jit
    def run(
        self, shared: Int32, weights: Int64, x: Int64, segments: list[cute.Tensor], items: Int32, feeder: Int32
    ) -> None:
        """Feeding warp number `feeder`, all of its items. Addresses as in `ExpertLinear`."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        groups = -(-self.tiles // tiling.warps)
        held = cute.make_rmem_tensor(FEEDER_ROWS // 8 * tiling.step_columns * 4, Int32)
        base = Int32(0)
        for item in range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0]):
            segment, group = item // groups, item % groups
            expert, start, count = [values[segment] for values in segments[:3]]
            team = Int32(tiling.feeders)
            if count <= FEEDER_ROWS:
                team = Int32(1)
            elif count <= 2 * FEEDER_ROWS:
                team = Int32(2)
            member, turn, teams = feeder % team, feeder // team, tiling.feeders // team
            first = member * FEEDER_ROWS
            tile = group * tiling.warps
            source = weights + (Int64(expert) * self.tiles + tile + lane) * (tiling.columns * TILE_BYTES)
            rows = self.row_addresses(x, start, first, count)
            if turn < tiling.steps:
                self.load_rows(held, rows, turn, first, count)
            self.await_free(shared, base)
            for step in range(turn, tiling.steps, teams):
                number = base + step
                stage = number % tiling.stages
                self.await_free(shared, number)
                full = barrier(shared, stage)
                target = shared + tiling.ring_offset + stage * tiling.stage_bytes
                if member == 0:
                    self.copy_weights(target + tiling.x_bytes, source, step, self.tiles - tile, full)
                self.store_rows(target, held, first, count)
                # What this thread has stored, tensor cores read through another path than its own loads.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane < teams:
                    cute.arch.mbarrier_arrive(full)
                if step + teams < tiling.steps:
                    self.load_rows(held, rows, step + teams, first, count)
            base += tiling.steps

    def await_free(self, shared: Any, number: Any) -> None:
        """Until the stage of the block's step `number` is free: what was in it before has been multiplied."""
        stages = self.tiling.stages
        # A fresh barrier lets a wait for the phase before its first one pass.
        wait(barrier(shared, number % stages + stages), (number // stages & 1) ^ 1)

    @cute.jit
    def copy_weights(self, target: Int32, source: Int64, step: Int32, left: Int32, full: cute.Pointer) -> None:
        """Start copying a stage's piece of each tile row, a lane each. `left`: tile rows from the first one on."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        size, here = tiling.tile_row_bytes, vector.min_of(Int32(tiling.warps), left)
        if lane == 0:
            cute.arch.mbarrier_expect_tx(full, here * size)
        cute.arch.sync_warp()
        if lane < here:
            ptx.copy_to_shared(target + lane * size, source + Int64(step) * size, size, full.toint())

    def row_addresses(self, x: Any, start: Any, first: Any, count: Any) -> Any:
        """Where this lane's 16 bytes begin in its row of each 8; in the last row in place of any beyond."""
        lane = cute.arch.thread_idx()[0] % WARP
        rows = [vector.min_of(first + 8 * i + lane // 4, count - 1) + start for i in range(FEEDER_ROWS // 8)]
        return [x + Int64(row) * (self.tiling.columns * 64) + lane % 4 * 16 for row in rows]

    @cute.jit
    def load_rows(self, held: cute.Tensor, rows: list[Int64], step: Int32, first: Int32, count: Int32) -> None:
        """Start loading a stage's rows into registers."""
        behind = Int64(step) * (self.tiling.step_columns * 64)
        for i in range_constexpr(FEEDER_ROWS // 8):
            if first + 8 * i < count:
                for block in range_constexpr(self.tiling.step_columns):
                    words = ptx.load_16b(rows[i] + (behind + block * 64))
                    for j in range_constexpr(4):
                        held[(i * self.tiling.step_columns + block) * 4 + j] = words[j]

    @cute.jit
    def store_rows(self, target: Int32, held: cute.Tensor, first: Int32, count: Int32) -> None:
        """Word j of lane q's four, columns 8q + 2j and the next, is word q of a block's cell j."""
        lane = cute.arch.thread_idx()[0] % WARP
        own = target + (first + lane // 4) * CELL_BYTES + lane % 4 * 4
        for i in range_constexpr(FEEDER_ROWS // 8):
            if first + 8 * i < count:
                for block in range_constexpr(self.tiling.step_columns):
                    for j in range_constexpr(4):
                        cell = (block * CELLS + j) * self.tiling.rows + 8 * i
                        word = held[(i * self.tiling.step_columns + block) * 4 + j]
                        store_shared_word(own + cell * CELL_BYTES, word)
