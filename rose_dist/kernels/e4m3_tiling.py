"""How a block of warpgroups multiplies an expert's matrix by many rows of x in e4m3."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels.mxfp4_layout import TILE_BYTES, TILE_ROWS
from rose_dist.kernels.variants import divisor
from rose_dist.kernels.warpgroup_tiling import BIAS_BYTES, WarpgroupTiling


@dataclass(frozen=True)
class E4m3Tiling(WarpgroupTiling):
    """As its base, except that one warp feeds, and that a stage holds rows of x in half the bytes, and behind the
    biases in an item's last also scales of rows of x, in its first the matrix rows' largest scales.
    """

    @property
    def x_bytes(self) -> int:
        return self.rows * self.step_columns * 32

    @property
    def scale_offset(self) -> int:
        """In a stage."""
        return self.bias_offset + self.warps * BIAS_BYTES

    @property
    def tops_offset(self) -> int:
        """In a stage."""
        return self.scale_offset + self.rows * 4

    @property
    def stage_bytes(self) -> int:
        return self.tops_offset + self.warps * TILE_ROWS


@dataclass(frozen=True)
class E4m3Shape:
    """An `E4m3Tiling` before the matrix's columns are known."""

    step_columns: int
    """Scale blocks of a matrix row that a stage holds, at most."""
    stages: int
    widths: tuple[int, ...] = (40, 72, 80, 112, 120, 128)

    def tiling(self, columns: int) -> E4m3Tiling:
        """For matrices of `columns` scale blocks a row."""
        return E4m3Tiling(
            columns, warpgroups=2, widths=self.widths, step_columns=divisor(columns, self.step_columns),
            stages=self.stages, tile_bytes=TILE_BYTES, registers=(40, 232),
        )  # fmt: skip


E4M3_SHAPE = E4m3Shape(step_columns=3, stages=7)
