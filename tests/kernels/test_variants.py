"""The tables that choose kernel shapes: whole, in order, and legal for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_dist.kernels import launch
from rose_dist.kernels.arch import BLACKWELL, HOPPER
from rose_dist.kernels.row_tiling import (
    ACTIVATION_SHAPES,
    DECODE_SHAPES,
    QUANTIZE_SHAPES,
    ROW_SHAPES,
    RowShape,
    tile,
)
from rose_dist.kernels.variants import COUNTING_ROUTERS, ROUTERS, Ranges, router_shape

SHAPES = [
    *(shape for shapes in (ROW_SHAPES, QUANTIZE_SHAPES, ACTIVATION_SHAPES, DECODE_SHAPES) for shape in shapes.variants),
]


@given(
    st.integers(1, 4096), st.sampled_from([16, 32, 64]), st.sampled_from(SHAPES),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
)  # fmt: skip
def test_tiles_cover_every_row(row_vectors: int, vector_bytes: int, shape: RowShape, group: int) -> None:
    tiling = tile(row_vectors, vector_bytes, shape, group=group)
    assert tiling.lanes * tiling.vectors >= row_vectors
    assert tiling.lanes * (tiling.vectors - 1) < row_vectors
    assert tiling.threads <= 1024
    # Blocks that share a row have no other, and are not too many for a cluster or too small.
    assert tiling.splits == 1 or tiling.rows_per_block == 1
    assert tiling.splits <= 8
    assert tiling.splits == 1 or tiling.threads <= shape.split_threads
    # A shuffle stays in a warp, and a block of values in one group of lanes.
    assert tiling.threads_per_row % group == 0
    assert tiling.threads_per_row % 32 == 0 or 32 % tiling.threads_per_row == 0
    assert tiling.threads_per_row <= 32 or tiling.threads % 32 == 0


def test_few_rows_spread_wide_and_many_rows_take_several_vectors() -> None:
    few, many = (tile(360, 16, ROW_SHAPES.select(n)) for n in (0, 64))
    assert (few.threads_per_row, few.vectors) == (384, 1)
    assert (many.threads_per_row, many.vectors) == (96, 4)


@pytest.mark.parametrize("table", [ROW_SHAPES, ROUTERS, COUNTING_ROUTERS])
def test_tables_choose_by_their_starts(table: Ranges[object]) -> None:
    for start, variant in zip(table.starts, table.variants, strict=True):
        assert table.select(start) is variant
        if start:
            assert table.select(start - 1) is table.variants[table.starts.index(start) - 1]


def test_a_table_must_start_at_zero_and_grow() -> None:
    for starts in ((1, 2), (0, 0), (0, 5, 3)):
        with pytest.raises(AssertionError):
            Ranges(starts, tuple(RowShape(16, 32) for _ in starts))


def test_router_shapes() -> None:
    assert router_shape(1, counts=True).cluster == 1
    for tokens in range(1, 33):
        shape = router_shape(tokens, counts=True)
        assert shape.cluster * shape.warps >= tokens
    for tokens in (33, 128, 10_000):
        assert router_shape(tokens, counts=True).cluster == 0


def test_widest_access_follows_the_least_alignment() -> None:
    assert launch.widest(HOPPER, 5760, 0) == 16
    assert launch.widest(BLACKWELL, 5760, 0) == 32
    assert launch.widest(BLACKWELL, 5760, 16) == 16
    assert launch.widest(BLACKWELL, 24) == 8
