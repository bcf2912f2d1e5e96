"""How a block of warpgroups multiplies an expert's matrix by many rows of x: pure data and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels.variants import WARP, divisor

WARPGROUP = 4
"""Warps."""


@dataclass(frozen=True)
class WarpgroupTiling:
    """A block's warpgroups take 4 groups of 32 matrix rows each; as many warps as one has feed them."""

    columns: int
    """Scale blocks of a matrix row."""
    warpgroups: int
    """That compute."""
    widths: tuple[int, ...]
    """Numbers of rows of x that there is code for, rising multiples of 8; the least that holds a segment's is taken."""
    step_columns: int
    """Scale blocks of a matrix row that a stage of the ring holds."""
    stages: int
    tile_bytes: int
    """Of 32 by 32 weights."""
    registers: tuple[int, int]
    """Of a feeding and of a computing thread."""

    @property
    def rows(self) -> int:
        """Most rows of x at a time."""
        return self.widths[-1]

    @property
    def warps(self) -> int:
        """Warps that compute, a group of 32 matrix rows each."""
        return self.warpgroups * WARPGROUP

    @property
    def feeders(self) -> int:
        """Warps that copy."""
        return WARPGROUP

    @property
    def threads(self) -> int:
        return (self.warps + self.feeders) * WARP

    @property
    def steps(self) -> int:
        """Stages that an item fills."""
        return self.columns // self.step_columns

    @property
    def feeder_rows(self) -> int:
        """Rows of x that a feeding warp can hold."""
        return self.rows // self.feeders

    @property
    def x_bytes(self) -> int:
        """Of all rows of x in a stage."""
        return self.rows * self.step_columns * 64

    @property
    def tile_row_bytes(self) -> int:
        """Of 32 matrix rows in a stage."""
        return self.step_columns * self.tile_bytes

    @property
    def stage_bytes(self) -> int:
        return self.x_bytes + self.warps * self.tile_row_bytes

    @property
    def ring_offset(self) -> int:
        """Behind two barriers a stage: it is full, it is free."""
        return -(-2 * self.stages * 8 // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return self.ring_offset + self.stages * self.stage_bytes


def warpgroup_gemm(columns: int, tile_bytes: int) -> WarpgroupTiling:
    """The tiling for matrices of `columns` scale blocks a row."""
    return WarpgroupTiling(
        columns, warpgroups=2, widths=(16, 32, 48, 64, 80, 96, 112, 128), step_columns=divisor(columns, 3), stages=5,
        tile_bytes=tile_bytes, registers=(96, 208),
    )  # fmt: skip
