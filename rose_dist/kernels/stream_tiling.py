"""How the kernel of experts with few rows streams their weights: pure data and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rose_dist.kernels.variants import WARP, Ranges, divisor


@dataclass(frozen=True)
class StreamShape:
    """How weights stream past few rows of x, before the matrix's columns are known."""

    warps: int
    """Warps that compute, at most; they share the columns. One more feeds them."""
    steps: int
    """Copies in which 32 matrix rows come, at most."""
    in_flight: int
    """Bytes of the ring that copies go into."""
    rows: int
    """Rows of x that are multiplied at a time; the weights of an expert with more are streamed again."""
    buffers: int
    """Sets of such rows in shared memory."""
    per_sm: int = 1
    """Blocks that fit on an SM: with 2, a dependent launch's can fetch weights while this one's still compute."""
    left: int = 80 << 10
    """Bytes that a block has still to ask for when it lets the next launch begin: that one's first copies are to follow
    this one's last without a gap, and not to compete with them; and its blocks are to find one on each SM."""
    ahead: int = 64 << 10
    """Bytes behind those in flight that are brought into L2 while a block waits for the launch before."""


MAX_STAGES = 12
"""Of a ring: small matrices need no more."""


@dataclass(frozen=True)
class StreamTiling:
    """A `StreamShape` for matrices of `columns` · 32 columns, and where things stand in a block's shared memory."""

    columns: int
    warps: int
    steps: int
    stages: int
    rows: int
    buffers: int
    per_sm: int
    left: int
    """Copies still to start when the next launch may begin."""
    ahead: int
    """Copies that are brought into L2 behind those in flight."""
    tile_bytes: int
    """Of 32 by 32 weights."""

    @property
    def threads(self) -> int:
        return (self.warps + 1) * WARP

    @property
    def step_columns(self) -> int:
        """Scale blocks of a row that a warp takes from one copy."""
        return self.columns // self.warps // self.steps

    @property
    def stage_bytes(self) -> int:
        return self.step_columns * self.warps * self.tile_bytes

    @property
    def row_tiles(self) -> int:
        """Groups of 8 rows of x, a tensor core operand's columns."""
        return -(-self.rows // 8)

    @property
    def few_row_tiles(self) -> int:
        """Of these, what suffices for half of the rows."""
        return -(-self.row_tiles // 2)

    @property
    def parts(self) -> int:
        """Results of 16 by 8 that 32 matrix rows give."""
        return 2 * self.row_tiles

    @property
    def quads(self) -> int:
        """Of the 4 lanes that hold an output's sums, two rows each, those that hold rows of x."""
        return min(4, -(-self.rows // 2))

    @property
    def part_bytes(self) -> int:
        return 8 * self.quads * 16

    @property
    def row_stride(self) -> int:
        """Bytes from row to row of x: an odd multiple of 16, so that 16 bytes of 8 rows lie in 32 different banks."""
        return self.columns * 64 + 16

    @property
    def barriers(self) -> int:
        """8 bytes each, at the start: a copy has come, all warps are done with one, rows of x have come, and one for
        sums that have been added up."""
        return 2 * self.stages + self.buffers + 1

    @property
    def row_offset(self) -> int:
        return -(-self.barriers * 8 // 128) * 128

    @property
    def ring_offset(self) -> int:
        return self.row_offset + self.buffers * self.rows * self.row_stride

    @property
    def meeting_offset(self) -> int:
        """Where the warps' sums meet."""
        return self.ring_offset + self.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.meeting_offset + self.warps * self.parts * self.part_bytes

    @property
    def adders(self) -> int:
        """Warps that add up an item's sums."""
        return min(self.parts, self.warps)

    @property
    def turn(self) -> int:
        """By how many warps the turn of adding up moves from item to item."""
        return self.parts % self.warps


@cache
def stream(shape: StreamShape, columns: int, tile_bytes: int) -> StreamTiling:
    """`shape` applied to matrices of `columns` scale blocks a row: warps and steps are the largest divisors."""
    warps = divisor(columns, shape.warps)
    steps = divisor(columns // warps, shape.steps)
    copy = columns // steps * tile_bytes
    stages = min(max(2, shape.in_flight // copy), MAX_STAGES)
    return StreamTiling(
        columns, warps, steps, stages, shape.rows, shape.buffers, shape.per_sm, shape.left // copy,
        min(shape.ahead // copy, MAX_STAGES), tile_bytes,
    )  # fmt: skip


@dataclass(frozen=True)
class FirstReads:
    """What each block of the experts' kernel reads before it waits for a stage to be free again."""

    tiles: int
    """Of 32 rows, a matrix. If each row of x takes a matrix of its own, block b of n begins with tile
    b · rows · tiles / n of all.
    """
    tile_bytes: int
    ring_bytes: int

    @classmethod
    def of(cls, tiling: StreamTiling, tiles: int) -> FirstReads | None:
        """None where rows of x share a matrix: which tile is whose is then not worth finding out ahead."""
        if tiling.rows > 1:
            return None
        return cls(tiles, tiling.steps * tiling.stage_bytes, tiling.stages * tiling.stage_bytes)


EXPERT_SHAPES = Ranges(
    (0, 2, 5, 9),
    (
        StreamShape(warps=15, steps=3, in_flight=88 << 10, rows=1, buffers=2, per_sm=2),
        StreamShape(warps=15, steps=3, in_flight=80 << 10, rows=4, buffers=1, per_sm=2),
        StreamShape(warps=15, steps=3, in_flight=144 << 10, rows=8, buffers=1),
        StreamShape(warps=15, steps=3, in_flight=96 << 10, rows=16, buffers=1),
    ),
)
"""By the rows that an expert may have. All have the same warps, so a row gets the same bits from each."""
