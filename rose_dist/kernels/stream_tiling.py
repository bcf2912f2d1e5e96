"""How the kernel of experts with few rows streams their weights: pure data and arithmetic."""

from __future__ import annotations

import math
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


LAYERS_STAGE, HANDOVER_STAGE = 1, 2
"""What a report of a wait says: between the two layers, or for the router."""
HALF_SM_BYTES = 114 << 10
"""Of shared memory, Hopper's and Blackwell's."""
MAX_STAGES = 12
"""Of a ring: small matrices need no more."""


@dataclass(frozen=True)
class StreamTiling:
    """A `StreamShape` for matrices of `columns` · 32 columns, of each layer, and where things stand in a block's shared
    memory.
    """

    columns: tuple[int, ...]
    warps: int
    step_columns: int
    """Scale blocks of a row that a warp takes from one copy."""
    stages: int
    rows: int
    buffers: int
    tile_bytes: int
    """Of 32 by 32 weights."""

    @property
    def threads(self) -> int:
        return (self.warps + 1) * WARP

    @property
    def steps(self) -> tuple[int, ...]:
        """Copies in which 32 rows of a layer's matrix come."""
        return tuple(columns // self.warps // self.step_columns for columns in self.columns)

    @property
    def stage_bytes(self) -> int:
        return self.step_columns * self.warps * self.tile_bytes

    @property
    def row_tiles(self) -> int:
        """Groups of 8 rows of x, a tensor core operand's columns."""
        return -(-self.rows // 8)

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
        return max(self.columns) * 64 + 16

    @property
    def barriers(self) -> int:
        """8 bytes each, at the start: a copy has come, all warps are done with one, rows of x have come, sums have been
        added up, and all of a layer's results are written."""
        return 2 * self.stages + self.buffers + 2

    @property
    def added(self) -> int:
        """Which of them."""
        return self.barriers - 2

    @property
    def written(self) -> int:
        """Which of them."""
        return self.barriers - 1

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
        """So much that a second block finds no room on the SM. Or some SMs, on which launches before leave room first,
        would get two blocks, and others none: 185 instead of 112 us for the experts of 8 tokens on H200.
        """
        return max(self.meeting_offset + self.warps * self.parts * self.part_bytes, HALF_SM_BYTES)

    @property
    def adders(self) -> int:
        """Warps that add up an item's sums."""
        return min(self.parts, self.warps)

    @property
    def turn(self) -> int:
        """By how many warps the turn of adding up moves from item to item."""
        return self.parts % self.warps


def in_one_launch(shape: StreamShape, columns: tuple[int, ...]) -> bool:
    """Whether layers of so many scale blocks a row have the same warps, and so the same bits, together as alone."""
    return len({divisor(one, shape.warps) for one in columns}) == 1


@cache
def stream(shape: StreamShape, columns: tuple[int, ...], tile_bytes: int) -> StreamTiling:
    """`shape` applied to layers of `columns` scale blocks a row: as many warps as divide them all, and copies of one
    size for all.
    """
    warps = divisor(math.gcd(*columns), shape.warps)
    common, longest = math.gcd(*columns) // warps, max(columns) // warps
    sizes = (n for n in range(1, common + 1) if common % n == 0 and longest // n <= shape.steps)
    step_columns = next(sizes, common)
    stages = min(max(2, shape.in_flight // (step_columns * warps * tile_bytes)), MAX_STAGES)
    return StreamTiling(columns, warps, step_columns, stages, shape.rows, shape.buffers, tile_bytes)


EXPERT_SHAPES = Ranges(
    (0, 2, 5),
    (
        StreamShape(warps=15, steps=3, in_flight=96 << 10, rows=1, buffers=2),
        StreamShape(warps=15, steps=3, in_flight=144 << 10, rows=4, buffers=2),
        StreamShape(warps=15, steps=3, in_flight=144 << 10, rows=8, buffers=1),
    ),
)
"""By the rows that an expert may have. All have the same warps, so a row gets the same bits from each."""
