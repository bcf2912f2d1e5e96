"""How kernels that work row by row spread rows over threads: pure data and arithmetic, no GPU needed.

A row goes to some threads that take some of its vectors each. With few rows the GPU is mostly empty and one launch is
latency, so a row is spread as widely as it goes. With many rows bandwidth counts: a thread issues several loads before
it uses the first, and blocks are small so that their stages interleave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rose_dist.kernels.variants import WARP, Ranges

MAX_THREADS = 1024
MIN_LANES = 8
"""Lanes that at least share a row, as far as it goes: 128 contiguous bytes or more for every load."""


@dataclass(frozen=True)
class RowShape:
    """How rows are spread, before the row's length is known."""

    bytes: int
    """Bytes a thread should have in flight; at least one vector."""
    threads: int
    """Threads a block should have; a long row takes more."""
    lane_bytes: int = 0
    """Neighbouring bytes that a lane reads at a time, where one vector is less."""
    split_threads: int = MAX_THREADS
    """Threads a block has at most; blocks share a row that takes more. Not of a norm, which sums up a row in one."""
    clusters: bool = False
    """Of a norm: blocks are launched as clusters of one, and so start more slowly."""

    @property
    def streams(self) -> bool:
        """Whether there is so much work that bandwidth counts and not latency."""
        return self.bytes >= 64

    def lane_elements(self, columns: int, vector_bytes: int, itemsize: int, block: int = 0) -> int:
        """Neighbouring elements of a row of `columns` that a lane takes at a time: whole vectors, a divisor; with
        quantised results, of one block of `block`.
        """
        return math.gcd(columns, max(self.lane_bytes, vector_bytes) // itemsize, block)


@dataclass(frozen=True)
class RowTiling:
    """How one kernel spreads rows of `row_vectors` vectors."""

    row_vectors: int
    threads_per_row: int
    """In a block."""
    rows_per_block: int
    splits: int = 1
    """Neighbouring blocks that share a row."""

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return self.threads_per_row * self.splits

    @property
    def vectors(self) -> int:
        """Vectors a thread takes, the last possibly beyond the row."""
        return -(-self.row_vectors // self.lanes)

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.threads_per_row * self.rows_per_block

    def __str__(self) -> str:
        split = f"/{self.splits}" if self.splits > 1 else ""
        return f"{self.rows_per_block}x{self.threads_per_row}x{self.vectors}{split}"


def tile(row_vectors: int, vector_bytes: int, shape: RowShape, *, group: int = 1) -> RowTiling:
    """`shape` applied to rows of `row_vectors` vectors of `vector_bytes`.

    `group`: consecutive vectors that share a result (a quantisation block) and must lie in one warp.
    """
    vectors = max(shape.bytes // vector_bytes, 1)
    wanted = max(-(-row_vectors // vectors), min(row_vectors, MIN_LANES), group)
    if wanted <= WARP:
        threads_per_row, splits = 1 << (wanted - 1).bit_length(), 1
    else:
        warps = min(-(-wanted // WARP), MAX_THREADS // WARP)
        splits = -(-warps * WARP // shape.split_threads)
        threads_per_row = -(-warps // splits) * WARP
    return RowTiling(row_vectors, threads_per_row, max(1, shape.threads // threads_per_row), splits)


ROW_SHAPES = Ranges(
    # Rows for every SM. Up to 8 the launch is latency; from there on it streams.
    (0, 1, 8),
    (RowShape(bytes=16, threads=32), RowShape(bytes=16, threads=128), RowShape(bytes=64, threads=128)),
)
QUANTIZE_SHAPES = Ranges(
    (0, 1, 8),
    (
        RowShape(bytes=16, threads=32),
        RowShape(bytes=16, threads=128),
        RowShape(bytes=64, threads=128, lane_bytes=32),
    ),
)
"""As `ROW_SHAPES`, for kernels that quantise: a block over fewer lanes takes fewer shuffles and wider stores."""
SHORT_ROW_BYTES = 256
SHORT_QUANTIZE_SHAPES = Ranges(
    (0, 1, 8),
    (
        RowShape(bytes=16, threads=32),
        RowShape(bytes=16, threads=128),
        RowShape(bytes=64, threads=128, lane_bytes=64),
    ),
)
"""As `QUANTIZE_SHAPES`, for a norm without residual of rows of up to `SHORT_ROW_BYTES`, which have few bytes each: with
32 rows a block, 2^20 of 128 took 104 us on H200."""
LONG_ROW_BYTES = 8 << 10
"""Norms of longer rows let the next launch begin only after their wait: an SM that has one such row has enough to do.
Where it began earlier, 64 rows of 7168 took 1.75 instead of 1.64 us on H200, and 1.82 instead of 1.52 with FP8."""
ACTIVATION_SHAPES = Ranges(
    (0, 1, 8),
    (
        RowShape(bytes=32, threads=32, split_threads=128),
        RowShape(bytes=32, threads=128),
        RowShape(bytes=128, threads=128),
    ),
)
"""As `ROW_SHAPES`, for kernels that read two vectors for one that they write."""
QUANTIZED_ACTIVATION_SHAPES = Ranges(
    (0, 1, 8),
    (
        RowShape(bytes=32, threads=32, split_threads=128),
        RowShape(bytes=32, threads=128),
        RowShape(bytes=128, threads=128, lane_bytes=32),
    ),
)
DECODE_SHAPES = Ranges(
    (0, 1, 8), (RowShape(bytes=16, threads=32), RowShape(bytes=16, threads=128), RowShape(bytes=32, threads=128))
)
"""As `ROW_SHAPES`, for kernels that write more than they read."""
