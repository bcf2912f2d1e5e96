"""How a block of warpgroups multiplies an expert's matrix by many rows of x: pure data and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rose_dist.kernels.variants import WARP, Ranges, divisor

WARPGROUP = 4
"""Warps."""
ROW_GROUP = 8
"""Rows of x whose cells, of 16 bytes each, lie together."""
CELL_BYTES = 16
REGISTERS = 65536
"""Of an SM."""
BIAS_BYTES = 64
"""Of 32 matrix rows."""


@dataclass(frozen=True)
class WarpgroupTiling:
    """A block's warpgroups take 4 groups of 32 matrix rows each; warps of one more feed them.

    A stage of the ring holds columns of all rows of x, then of all matrix rows, then, in an item's last, their biases.
    """

    block_bytes: ClassVar[int] = 64
    """Of a row of x in a scale block."""

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
    """Of a feeding and of a computing thread, once they are shared out anew."""
    parts: int = 1
    """In which a warp decodes and multiplies a tile, 1 or 2: one is under way while the next is decoded."""

    def __post_init__(self) -> None:
        assert all(width % 8 == 0 for width in self.widths), self.widths
        assert self.rows // ROW_GROUP + self.warps <= WARPGROUP * WARP, self.widths
        feeding, computing = self.registers
        # A thread that asks for more than its block was launched with waits for ever.
        assert feeding + self.warpgroups * computing <= (1 + self.warpgroups) * self.launch_registers, self.registers

    @property
    def rows(self) -> int:
        """Most rows of x at a time."""
        return self.widths[-1]

    @property
    def warps(self) -> int:
        """Warps that compute, a group of 32 matrix rows each."""
        return self.warpgroups * WARPGROUP

    @property
    def threads(self) -> int:
        return (self.warps + WARPGROUP) * WARP

    @property
    def launch_registers(self) -> int:
        """Of a thread, as the compiler allots them: as many as there are, by eights."""
        return min(255, REGISTERS // self.threads // 8 * 8)

    @property
    def steps(self) -> int:
        """Stages that an item fills."""
        return self.columns // self.step_columns

    @property
    def cells(self) -> int:
        """Of a row of x, in a stage."""
        return self.step_columns * self.block_bytes // CELL_BYTES

    @property
    def group_bytes(self) -> int:
        """Of a group of rows of x in a stage."""
        return self.cells * ROW_GROUP * CELL_BYTES

    @property
    def x_bytes(self) -> int:
        """Of all rows of x in a stage."""
        return self.rows // ROW_GROUP * self.group_bytes

    @property
    def tile_row_bytes(self) -> int:
        """Of 32 matrix rows in a stage."""
        return self.step_columns * self.tile_bytes

    @property
    def bias_offset(self) -> int:
        """In a stage."""
        return self.x_bytes + self.warps * self.tile_row_bytes

    @property
    def stage_bytes(self) -> int:
        return self.bias_offset + self.warps * BIAS_BYTES

    @property
    def ring_offset(self) -> int:
        """Behind two barriers a stage: it is full, it is free."""
        return -(-2 * self.stages * 8 // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return self.ring_offset + self.stages * self.stage_bytes


@dataclass(frozen=True)
class WarpgroupShape:
    """A `WarpgroupTiling` before the matrix's columns are known."""

    widths: tuple[int, ...]
    step_columns: int
    """Scale blocks of a matrix row that a stage holds, at most."""
    stages: int
    warpgroups: int
    registers: tuple[int, int]
    parts: int = 1

    def tiling(self, columns: int, tile_bytes: int) -> WarpgroupTiling:
        """For matrices of `columns` scale blocks a row."""
        return WarpgroupTiling(
            columns, warpgroups=self.warpgroups, widths=self.widths, step_columns=divisor(columns, self.step_columns),
            stages=self.stages, tile_bytes=tile_bytes, registers=self.registers, parts=self.parts,
        )  # fmt: skip


WARPGROUP_SHAPES = Ranges(
    (0, 33, 57, 89),
    (
        WarpgroupShape(widths=(8, 16, 24, 32), step_columns=6, stages=4, warpgroups=3, registers=(56, 152)),
        WarpgroupShape(widths=(32, 40, 56), step_columns=6, stages=3, warpgroups=3, registers=(56, 152)),
        WarpgroupShape(widths=(56, 72, 80), step_columns=2, stages=8, warpgroups=3, registers=(32, 160), parts=2),
        WarpgroupShape(
            widths=(96, 128, 144, 160), step_columns=2, stages=7, warpgroups=2, registers=(40, 232), parts=2
        ),
    ),
)
"""By the rows that an expert may have. The widest takes a computing thread a register a row, and each width 8 more."""
