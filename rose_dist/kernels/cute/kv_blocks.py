"""Which blocks of a paged cache a request's tiles are in, for decode attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import vector
from rose_dist.kernels.dsl import Int32, Int64, cute, cutlass


@dataclass(frozen=True)
class Paged:
    """One layer's cache and who has which blocks; traced values, strides in elements."""

    keys: Any
    values: Any
    slot_stride: Any
    head_stride: Any
    tables: Any
    table_stride: Any
    first_blocks: Any


@cute.jit
def table_of(tables: Int64, table_stride: Int32, first_blocks: Int64, row: Int64) -> Int64:
    """Where the entry of a request's block 0 is, or would be: its table may start with a later block."""
    first = Int32(0)
    if first_blocks != 0:
        first = vector.scalar(first_blocks + row * 4, Int32)[0]
    return tables + (row * table_stride - Int64(first)) * 4


@cute.jit
def block_of(table: Int64, tile: Int32, end: Int32, block_tiles: cutlass.Constexpr) -> Int32:
    """The cache block of a tile; any for a tile beyond the last."""
    block = Int32(0)
    if tile < end:
        block = vector.scalar(table + Int64(tile // block_tiles) * 4, Int32)[0]
    return block
