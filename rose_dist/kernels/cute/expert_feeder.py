"""What feeds the expert GEMMs of warpgroups: bulk copies alone, by one warp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import barrier, next_stage, wait
from rose_dist.kernels.dsl import Int32, Int64, const_expr, cute
from rose_dist.kernels.e4m3_tiling import E4m3Tiling
from rose_dist.kernels.mxfp4_layout import TILE_BYTES, TILE_ROWS
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_tiling import BIAS_BYTES, ROW_GROUP, WarpgroupTiling


@dataclass(frozen=True)
class Feeder:
    """tiles: groups of 32 rows of a matrix."""

    tiles: int
    tiling: WarpgroupTiling

    @property
    def scaled(self) -> bool:
        """Whether stages hold scales beside x and weights."""
        return isinstance(self.tiling, E4m3Tiling)

    @property
    def e4m3(self) -> E4m3Tiling:
        """The tiling, if it is `scaled`."""
        assert isinstance(self.tiling, E4m3Tiling)
        return self.tiling

    @property
    def row_lanes(self) -> int:
        """Lanes that copy groups of 8 rows of x; others copy tile rows."""
        return self.tiling.rows // ROW_GROUP

    @cute.jit
    def run(
        self, shared: Int32, weights: Int64, tops: Int64, bias: Int64, x: Int64, scales: Int64,
        segments: list[cute.Tensor], items: Int32,
    ) -> None:  # fmt: skip
        """All of a block's items. Addresses as in `GroupedExpertGemm`."""
        tiling = self.tiling
        groups = -(-self.tiles // tiling.warps)
        # A fresh barrier lets a wait for the phase before its first one pass.
        stage, parity = Int32(0), Int32(1)
        for item in range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0]):
            expert, start, count = [values[item // groups] for values in segments[:3]]
            tile = item % groups * tiling.warps
            here = vector.min_of(Int32(tiling.warps), self.tiles - tile)
            row_groups = (count + (ROW_GROUP - 1)) // ROW_GROUP
            place = Int64(expert) * self.tiles + tile
            own = self.source(weights, x, place, start)
            for step in range(tiling.steps):
                wait(barrier(shared, stage + tiling.stages), parity)
                target, full = shared + tiling.ring_offset + stage * tiling.stage_bytes, barrier(shared, stage)
                self.announce(full, step, here, row_groups, bias, scales)
                cute.arch.sync_warp()
                self.copy(target, own, step, here, row_groups, full)
                if const_expr(self.scaled):
                    if step == 0:
                        self.copy_beside(
                            target + self.e4m3.tops_offset, tops + place * TILE_ROWS, here * TILE_ROWS, full
                        )
                if step == tiling.steps - 1:
                    if bias != 0:
                        source, size = bias + place * BIAS_BYTES, here * BIAS_BYTES
                        self.copy_beside(target + tiling.bias_offset, source, size, full)
                    if const_expr(self.scaled):
                        if scales != 0:
                            size = row_groups * (ROW_GROUP * 4)
                            self.copy_beside(target + self.e4m3.scale_offset, scales + Int64(start) * 4, size, full)
                stage, parity = next_stage(stage, parity, tiling.stages)

    def source(self, weights: Any, x: Any, place: Any, start: Any) -> Any:
        """Where this lane's group of rows of x or its tile row begins."""
        lane, tiling = cute.arch.thread_idx()[0] % WARP, self.tiling
        of_x = x + (Int64(start) + lane * ROW_GROUP) * (tiling.columns * tiling.block_bytes)
        of_weights = weights + (place + (lane - self.row_lanes)) * (tiling.columns * TILE_BYTES)
        return vector.select(lane < self.row_lanes, of_x, of_weights)

    @cute.jit
    def announce(
        self, full: cute.Pointer, step: Int32, here: Int32, row_groups: Int32, bias: Int64, scales: Int64
    ) -> None:
        """How many bytes a stage is going to get."""
        tiling = self.tiling
        size = here * tiling.tile_row_bytes + row_groups * tiling.group_bytes
        if const_expr(self.scaled):
            if step == 0:
                size += here * TILE_ROWS
        if step == tiling.steps - 1:
            if bias != 0:
                size += here * BIAS_BYTES
            if const_expr(self.scaled):
                if scales != 0:
                    size += row_groups * (ROW_GROUP * 4)
        if cute.arch.thread_idx()[0] % WARP == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)

    @cute.jit
    def copy(self, target: Int32, own: Int64, step: Int32, here: Int32, row_groups: Int32, full: cute.Pointer) -> None:
        """Start copying a stage's piece of each group of rows of x and of each tile row, a lane each."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        if lane < row_groups:
            source = own + Int64(step) * tiling.group_bytes
            ptx.copy_to_shared(target + lane * tiling.group_bytes, source, Int32(tiling.group_bytes), full.toint())
        tile = lane - self.row_lanes
        if (tile >= 0) & (tile < here):
            size = tiling.tile_row_bytes
            place = target + tiling.x_bytes + tile * size
            ptx.stream_to_shared(place, own + Int64(step) * size, Int32(size), full.toint())

    @cute.jit
    def copy_beside(self, target: Int32, source: Int64, size: Int32, full: cute.Pointer) -> None:
        if cute.arch.thread_idx()[0] % WARP == 0:
            ptx.copy_to_shared(target, source, size, full.toint())
