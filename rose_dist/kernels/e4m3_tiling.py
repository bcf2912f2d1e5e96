"""How a block of warpgroups multiplies an expert's matrix by many rows of x in e4m3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rose_dist.kernels.mxfp4_layout import TILE_BYTES, TILE_ROWS
from rose_dist.kernels.variants import Ranges
from rose_dist.kernels.warpgroup_tiling import BIAS_BYTES, WarpgroupShape, WarpgroupTiling

SCALES = 256
"""That a block can have, counted down from its matrix row's largest."""
MAGNITUDES = 8
"""Of a code, a byte each."""


@dataclass(frozen=True)
class E4m3Tiling(WarpgroupTiling):
    """As its base, except that a stage holds rows of x in half the bytes, and behind the biases in an item's last also
    scales of rows of x, in its first the matrix rows' largest scales.
    """

    block_bytes: ClassVar[int] = 32

    @property
    def scale_offset(self) -> int:
        """In a stage."""
        return self.bias_offset + self.warps * BIAS_BYTES

    @property
    def tops_offset(self) -> int:
        """In a stage: where an item's last has other things, unless its first is its last."""
        return self.bias_offset if self.steps > 1 else self.scale_offset + self.rows * 4

    @property
    def stage_bytes(self) -> int:
        return max(self.scale_offset + self.rows * 4, self.tops_offset + self.warps * TILE_ROWS)

    @property
    def magnitudes_offset(self) -> int:
        """Of the codes' magnitudes with each scale, behind the ring."""
        return super().shared_bytes

    @property
    def shared_bytes(self) -> int:
        return self.magnitudes_offset + SCALES * MAGNITUDES


@dataclass(frozen=True)
class E4m3Shape(WarpgroupShape):
    """An `E4m3Tiling` before the matrix's columns are known."""

    def tiling(self, columns: int, tile_bytes: int = TILE_BYTES) -> E4m3Tiling:
        return E4m3Tiling(**vars(super().tiling(columns, tile_bytes)))


E4M3_SHAPES = Ranges(
    (0, 65),
    (
        E4m3Shape(widths=(16, 32, 40, 48, 64), step_columns=6, stages=4, warpgroups=3, registers=(56, 152)),
        E4m3Shape(widths=(112, 128, 144, 160), step_columns=6, stages=3, warpgroups=2, registers=(40, 232), parts=2),
    ),
)
"""By the rows that an expert may have. 160 are three standard deviations above 128, so that most weights are decoded
once."""
