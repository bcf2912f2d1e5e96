"""What the blocks of prefill attention share out among themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import vector
from rose_dist.kernels.dsl import Int32, Int64, cute, cutlass


@cute.jit
def extent(
    shape: Int64, sequences: Int32, columns: Int32, group: cutlass.Constexpr, rows: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """Sequences, and items that the longest has of a key head: what is given or, by the most queries of one, what is at
    `shape`; one at least, if an empty one. group, rows: as for `Items.of`.
    """
    if shape != 0:
        sequences = vector.max_of(vector.scalar(shape, Int32)[0], Int32(1))
        most = vector.scalar(shape + 4, Int32)[0] * group
        columns = vector.max_of((most + (rows - 1)) // rows, Int32(1))
    return sequences, columns


@dataclass(frozen=True)
class Item:
    """Some query heads' rows of a sequence, for one key head; traced values."""

    head: Any
    """The key head."""
    first_query: Any
    """The sequence's, among all queries."""
    first_key: Any
    """The sequence's, among all keys."""
    row: Any
    """The first, among the sequence's: a token's query heads follow one another."""
    rows: Any
    """The sequence's."""
    behind: Any
    """How many keys the sequence has before its first query's own."""
    low: Any
    """The first key that a row sees, among the sequence's."""
    high: Any
    """The one behind the last."""
    tiles: Any
    """Of keys, from the last one down; 0 where the sequence has fewer rows."""


@dataclass(frozen=True)
class Items:
    """All items of a launch: those with the most keys first where there is one sequence. Traced values."""

    query_starts: Any
    key_starts: Any
    sequences: Any
    heads: Any
    columns: Any
    """Items of a sequence and key head, at most."""
    window: Any

    def rounds(self) -> Any:
        """Of items that every block takes."""
        blocks = cute.arch.grid_dim()[0]
        return (self.sequences * self.heads * self.columns + (blocks - 1)) // blocks

    def of(self, number: Any, group: int, rows: int, keys: int) -> Item:
        """This block's item of a round. Every other round goes through the blocks backwards, so that none has always
        the most keys.

        group: query heads a key head; rows: of an item; keys: of a tile.
        """
        blocks, block = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        place = vector.select(number % 2 == 0, block, blocks - 1 - block)
        index = number * blocks + place
        sequence = vector.min_of(index // (self.heads * self.columns), self.sequences - 1)
        first_query, end_query = (self._start(self.query_starts, sequence + i) for i in range(2))
        first_key, end_key = (self._start(self.key_starts, sequence + i) for i in range(2))
        tokens = end_query - first_query
        behind = end_key - first_key - tokens
        row = (self.columns - 1 - index // self.heads % self.columns) * rows
        total = tokens * group
        high = behind + (vector.min_of(row + rows, total) - 1) // group + 1
        low = vector.max_of(behind + row // group + 1 - self.window, Int32(0))
        there = (row < total) & (index < self.sequences * self.heads * self.columns)
        tiles = vector.select(there, (high - low + (keys - 1)) // keys, Int32(0))
        return Item(index % self.heads, first_query, first_key, row, total, behind, low, high, tiles)

    def _start(self, starts: Any, at: Any) -> Any:
        return vector.scalar(starts + Int64(at) * 4, Int32)[0]
