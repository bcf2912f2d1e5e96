"""Which shape of a kernel serves which amount of work: pure data and arithmetic, no GPU needed.

Kernels that work row by row: `row_tiling.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

WARP = 32
V = TypeVar("V")


@dataclass(frozen=True)
class Ranges(Generic[V]):
    """A choice by size: `variants[i]` serves sizes from `starts[i]` up to the next start."""

    starts: tuple[int, ...]
    variants: tuple[V, ...]

    def __post_init__(self) -> None:
        assert self.starts[0] == 0
        assert len(self.starts) == len(self.variants)
        assert all(a < b for a, b in zip(self.starts, self.starts[1:], strict=False))

    def select(self, size: int) -> V:
        """The variant for `size` ≥ 0."""
        return self.variants[bisect_right(self.starts, size) - 1]


ROTARY_BYTES = Ranges((0, 16, 256), (32, 64, 128))
"""Bytes of heads that a lane takes when it also reads rotary tables, by heads for every SM: neighbouring heads share a
table's row. Without tables one head is best at every size (measured on H200)."""


def heads_each(query_heads: int, key_heads: int, vector_bytes: int, heads_for_each_sm: int, *, rotary: bool) -> int:
    """Neighbouring heads, all of q, of k or of v, that a group of lanes takes; a lane has two vectors of each."""
    wanted = ROTARY_BYTES.select(heads_for_each_sm) // (2 * vector_bytes) if rotary else 1
    return math.gcd(max(wanted, 1), query_heads, key_heads)


@dataclass(frozen=True)
class RouterShape:
    """How tokens are spread over warps."""

    warps: int
    """Warps a block."""
    cluster: int
    """Blocks of the one cluster that counts in shared memory; 0: a plain grid."""


ROUTERS = Ranges((0, 65), (RouterShape(warps=1, cluster=0), RouterShape(warps=4, cluster=0)))
"""By tokens, without counts."""
COUNTING_ROUTERS = Ranges(
    (0, 9, 33),
    (RouterShape(warps=8, cluster=1), RouterShape(warps=8, cluster=8), RouterShape(warps=4, cluster=0)),
)
"""By tokens, with counts: one block or one cluster, with a warp for every token; or two launches. H200, 128 tokens:
1.60 us of 128 experts and 2.45 of DeepSeek's 256, where a cluster took 1.84 and 3.50."""


def router_shape(tokens: int, counts: bool) -> RouterShape:
    """The shape for so many tokens."""
    return (COUNTING_ROUTERS if counts else ROUTERS).select(tokens)


def divisor(value: int, at_most: int) -> int:
    """The largest divisor of `value` that is at most `at_most`."""
    return next(n for n in range(min(value, at_most), 0, -1) if value % n == 0)


@dataclass(frozen=True)
class GemmTiling:
    """How a block multiplies `warps` groups of 32 matrix rows by `rows` rows of x, a few columns at a time."""

    columns: int
    """Scale blocks of a matrix row."""
    warps: int
    """Warps that compute, a group of 32 matrix rows each."""
    feeders: int
    """Warps that copy."""
    rows: int
    step_columns: int
    """Scale blocks of a matrix row that a stage of the ring holds."""
    stages: int
    tile_bytes: int
    """Of 32 by 32 weights."""

    @property
    def threads(self) -> int:
        return (self.warps + self.feeders) * WARP

    @property
    def steps(self) -> int:
        """Stages that an item fills."""
        return self.columns // self.step_columns

    @property
    def row_tiles(self) -> int:
        """Groups of 8 rows of x, a tensor core operand's columns."""
        return self.rows // 8

    @property
    def row_bytes(self) -> int:
        """Of a row of x in a stage."""
        return self.step_columns * 64

    @property
    def row_stride(self) -> int:
        """An odd multiple of 16, so that 16 bytes of 8 rows lie in 32 different banks."""
        return self.step_columns * 64 + 16

    @property
    def x_bytes(self) -> int:
        """Of all rows of x in a stage."""
        return self.rows * self.row_stride

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


EXPERT_GEMM_ROWS = 17
"""Rows of the largest expert from which on the kernels of many rows serve: 8 on average, if they are spread at random.
H200, gpt-oss-120b, both layers: 484 against 561 us for 128 tokens (4 on average), 805 against 642 for 512 (16)."""


@cache
def gemm(columns: int, tile_bytes: int) -> GemmTiling:
    """The tiling for matrices of `columns` scale blocks a row."""
    return GemmTiling(
        columns, warps=8, feeders=4, rows=64, step_columns=divisor(columns, 5), stages=4, tile_bytes=tile_bytes
    )


@dataclass(frozen=True)
class LinearShape:
    """How a linear layer of few rows spreads 16 outputs over a block."""

    warps: int
    """Warps a block, at most; they share the inputs."""
    ahead: int
    """Runs of 32 inputs that a warp has in flight."""
    per_sm: int
    """Blocks that fit on an SM."""

    def warps_for(self, runs: int) -> int:
        """The largest divisor."""
        return divisor(runs, self.warps)


LINEAR_SHAPES = Ranges((0, 9), (LinearShape(warps=9, ahead=4, per_sm=3), LinearShape(warps=9, ahead=4, per_sm=2)))
"""By rows. All have the same warps, so a row gets the same bits from each."""
