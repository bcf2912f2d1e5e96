"""What feeds the expert GEMMs of warpgroups: bulk copies alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import barrier, next_stage, wait
from rose_dist.kernels.dsl import Int32, Int64, const_expr, cute, range_constexpr
from rose_dist.kernels.e4m3_tiling import E4m3Tiling
from rose_dist.kernels.mxfp4_layout import TILE_BYTES, TILE_ROWS
from rose_dist.kernels.warpgroup_tiling import BIAS_BYTES, ROW_GROUP, WARPGROUP, WarpgroupTiling


@dataclass(frozen=True)
class Items:
    """An item is a segment's rows of x times as many of `tiles` tile rows as a block takes at once, `warps`.

    Those of all segments that are that many come first, then what is left: blocks, which take every so manieth item,
    then have about the same work.
    """

    segments: Any
    tiles: int
    warps: int

    @property
    def whole(self) -> int:
        """Of a segment."""
        return self.tiles // self.warps

    @property
    def number(self) -> Any:
        return self.segments * -(-self.tiles // self.warps)

    def find(self, item: Any) -> tuple[Any, Any]:
        """The segment and the first tile row of an item."""
        if self.whole == 0:
            return item, Int32(0)
        if self.tiles % self.warps == 0:
            return item // self.whole, item % self.whole * self.warps
        beyond = item - self.segments * self.whole
        segment = vector.select(beyond < 0, item // self.whole, beyond)
        return segment, vector.select(beyond < 0, item % self.whole, Int32(self.whole)) * self.warps


@dataclass(frozen=True)
class Feeder:
    """The feeding warps: each copies every fourth tile row and group of 8 rows of x. `elect.sync` says who issues a
    warp's copies: of a lane that another condition chooses the assembler makes a loop over lanes for each copy.

    tiles: groups of 32 rows of a matrix.
    """

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

    @cute.jit
    def run(
        self, shared: Int32, weights: Int64, tops: Int64, bias: Int64, x: Int64, scales: Int64,
        segments: list[cute.Tensor], items: Items, feeder: Int32,
    ) -> None:  # fmt: skip
        """Feeding warp number `feeder`, all of its block's items. Addresses as in `GroupedExpertGemm`.

        Of the first stages weights are under way before what writes `x` is complete.
        """
        tiling = self.tiling
        size, group_size = Int32(tiling.tile_row_bytes), Int32(tiling.group_bytes)
        apart = WARPGROUP * tiling.columns * TILE_BYTES
        row_apart = WARPGROUP * ROW_GROUP * tiling.columns * tiling.block_bytes
        first = cute.arch.block_idx()[0]
        ahead = Int32(0)
        if first < items.number:
            ahead = Int32(min(tiling.stages, tiling.steps))
            segment, tile = items.find(first)
            here = vector.min_of(Int32(tiling.warps), self.tiles - tile)
            place = Int64(segments[0][segment]) * self.tiles + tile
            source = weights + (place + feeder) * (tiling.columns * TILE_BYTES)
            for step in range(ahead):
                target = shared + tiling.ring_offset + step * tiling.stage_bytes + tiling.x_bytes
                with cute.arch.elect_one():
                    for i in range_constexpr(tiling.warpgroups):
                        at = feeder + i * WARPGROUP
                        if at < here:
                            ptx.stream_to_shared(
                                target + at * size, source + i * apart, size, barrier(shared, step).toint()
                            )
                source += tiling.tile_row_bytes
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        ptx.fence_async_copies()  # launches before have written the rows, which is known since the wait
        # A fresh barrier lets a wait for the phase before its first one pass.
        stage, parity = Int32(0), Int32(1)
        for item in range(first, items.number, cute.arch.grid_dim()[0]):
            segment, tile = items.find(item)
            expert, start, count = [values[segment] for values in segments[:3]]
            here = vector.min_of(Int32(tiling.warps), self.tiles - tile)
            row_groups = (count + (ROW_GROUP - 1)) // ROW_GROUP
            place = Int64(expert) * self.tiles + tile
            source = weights + (place + feeder) * (tiling.columns * TILE_BYTES)
            row = x + (Int64(start) + feeder * ROW_GROUP) * (tiling.columns * tiling.block_bytes)
            expected = self.shared_out(here, feeder) * tiling.tile_row_bytes
            expected += self.shared_out(row_groups, feeder) * tiling.group_bytes
            for step in range(tiling.steps):
                wait(barrier(shared, stage + tiling.stages), parity)
                target, full = shared + tiling.ring_offset + stage * tiling.stage_bytes, barrier(shared, stage)
                with cute.arch.elect_one():
                    self.announce(full, step, expected, here, row_groups, bias, scales, feeder)
                    for i in range_constexpr(tiling.warpgroups):
                        at = feeder + i * WARPGROUP
                        if (at < here) & (ahead <= 0):
                            ptx.stream_to_shared(
                                target + tiling.x_bytes + at * size, source + i * apart, size, full.toint()
                            )
                    for i in range_constexpr(-(-tiling.rows // (ROW_GROUP * WARPGROUP))):
                        at = feeder + i * WARPGROUP
                        if at < row_groups:
                            ptx.copy_to_shared(target + at * group_size, row + i * row_apart, group_size, full.toint())
                    if feeder == 0:
                        self.copy_beside(target, step, place, start, here, row_groups, tops, bias, scales, full)
                ahead -= 1
                source += tiling.tile_row_bytes
                row += tiling.group_bytes
                stage, parity = next_stage(stage, parity, tiling.stages)

    def shared_out(self, count: Any, feeder: Any) -> Any:
        """How many of 0 … count − 1 are this feeder's."""
        return (count + (WARPGROUP - 1) - feeder) // WARPGROUP

    @cute.jit
    def announce(
        self, full: cute.Pointer, step: Int32, expected: Int32, here: Int32, row_groups: Int32, bias: Int64,
        scales: Int64, feeder: Int32,
    ) -> None:  # fmt: skip
        """How many bytes this feeder is going to bring into a stage: `expected` and what comes beside."""
        size = expected
        if feeder == 0:
            if const_expr(self.scaled):
                if step == 0:
                    size += here * TILE_ROWS
            if step == self.tiling.steps - 1:
                if bias != 0:
                    size += here * BIAS_BYTES
                if const_expr(self.scaled):
                    if scales != 0:
                        size += row_groups * (ROW_GROUP * 4)
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)

    @cute.jit
    def copy_beside(
        self, target: Int32, step: Int32, place: Int64, start: Int32, here: Int32, row_groups: Int32, tops: Int64,
        bias: Int64, scales: Int64, full: cute.Pointer,
    ) -> None:  # fmt: skip
        """What an item's first and last stages hold beside x and weights."""
        if const_expr(self.scaled):
            if step == 0:
                size = here * TILE_ROWS
                ptx.copy_to_shared(target + self.e4m3.tops_offset, tops + place * TILE_ROWS, size, full.toint())
        if step == self.tiling.steps - 1:
            if bias != 0:
                size = here * BIAS_BYTES
                ptx.copy_to_shared(target + self.tiling.bias_offset, bias + place * BIAS_BYTES, size, full.toint())
            if const_expr(self.scaled):
                if scales != 0:
                    size = row_groups * (ROW_GROUP * 4)
                    ptx.copy_to_shared(target + self.e4m3.scale_offset, scales + Int64(start) * 4, size, full.toint())
