"""The warp that copies whole tokens for decode attention (`whole_token_attention`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.attention_tiling import TILE
from rose_dist.kernels.cute.kv_blocks import Paged, block_of, table_of
from rose_dist.kernels.cute.mxfp4_operands import barrier, wait
from rose_dist.kernels.cute.split_items import Batch, Part, after
from rose_dist.kernels.cute.whole_token_tiles import WholeTokenTiles
from rose_dist.kernels.dsl import Int32, Int64, Uint32, const_expr, cute, cutlass
from rose_dist.kernels.variants import WARP


FEEDERS = 4
"""Warps: one starts copies at a quarter of the rate at which FP8 tiles could come, with looking up and waiting."""


@dataclass(frozen=True)
class TokenFeeder:
    """Tiles follow one another through a ring, across the borders of parts. Every fourth of a part is for the same warp;
    its lanes look up 32 tiles' blocks at once, a part ahead.
    """

    tiles: WholeTokenTiles
    block_tiles: int
    stages: int
    early: bool

    @cute.jit
    def run(
        self, barriers: Int32, ring: Uint32, paged: Paged, batch: Batch, part: Part, line_end: Int32, feeder: Int32
    ) -> None:  # fmt: skip
        """Warp number `feeder` of those that feed: its tiles of the block's parts, the first of which is `part`."""
        blocks, number = self.look_up(paged, batch, part, feeder), Int32(0)
        start, end = bounds(batch, part)
        first_end = vector.min_of(end, start + self.stages)
        done = start
        if const_expr(self.early):
            # Without the tile that has the request's last token, which the launch before may still write.
            done = vector.max_of(vector.min_of(first_end, (part.length - 1) // TILE), start)
            self.feed(barriers, ring, paged, batch, part, blocks, start, done, number, feeder)
            cute.arch.griddepcontrol_wait()
        ptx.fence_async_copies()  # the launches before have written keys and values, which is known since the wait
        self.feed(barriers, ring, paged, batch, part, blocks, done, first_end, number, feeder)
        if const_expr(self.early):
            # What the next launch asks for comes behind this.
            cute.arch.griddepcontrol_launch_dependents()
        done = first_end
        row, length, split, place, begin, end = part.values
        while row >= 0:
            current = Part(row, length, split, place, begin, end)
            following = after(batch, current, line_end)
            next_blocks = self.look_up(paged, batch, following, feeder)
            start, upto = bounds(batch, current)
            self.feed(barriers, ring, paged, batch, current, blocks, done, upto, number, feeder)
            number += vector.max_of(upto - start, Int32(0))
            row, length, split, place, begin, end = following.values
            blocks, done = next_blocks, bounds(batch, following)[0]

    @cute.jit
    def look_up(self, paged: Paged, batch: Batch, part: Part, feeder: Int32) -> Int32:
        """The block of this lane's tile among the warp's first 32 of a part."""
        start, end = bounds(batch, part)
        return self.ask(paged, part, start + feeder, end)

    @cute.jit
    def ask(self, paged: Paged, part: Part, first: Int32, end: Int32) -> Int32:
        """The block of this lane's tile among the warp's from `first` on."""
        row = Int64(vector.max_of(part.request, Int32(0)))
        table = table_of(paged.tables, paged.table_stride, paged.first_blocks, row)
        return block_of(table, first + cute.arch.thread_idx()[0] % WARP * FEEDERS, end, self.block_tiles)

    @cute.jit
    def feed(
        self, barriers: Int32, ring: Uint32, paged: Paged, batch: Batch, part: Part, blocks: Int32, begin: Int32,
        upto: Int32, number: Int32, feeder: Int32,
    ) -> None:  # fmt: skip
        """The warp's among tiles `begin` … `upto` − 1 of a part, whose first tile is number `number` of the block's."""
        start, end = bounds(batch, part)
        low = batch.low(part.length)
        first = begin + ((start + feeder - begin) & (FEEDERS - 1))
        for tile in cutlass.range(first, upto, FEEDERS, unroll=1):
            at = (tile - start) // FEEDERS % WARP
            if (at == 0) & (tile - start >= FEEDERS):
                blocks = self.ask(paged, part, tile, end)
            block = cute.arch.shuffle_sync(blocks, at)
            stage, lap = self.place(number + (tile - start))
            # A fresh barrier lets a wait for the phase before its first one pass.
            wait(barrier(barriers, stage + self.stages), lap ^ 1)
            slot = (Int64(block) * self.block_tiles + tile % self.block_tiles) * TILE
            self.tiles.fetch(
                barriers + stage * 8, ring + Uint32(stage * self.tiles.bytes), paged.keys, paged.values, slot, tile,
                low, part.length,
            )  # fmt: skip

    def place(self, number: Any) -> tuple[Any, Any]:
        """The stage of the block's tile `number`, and the parity of its barriers' phase."""
        lap = Uint32(number) // Uint32(self.stages)
        return number - Int32(lap) * self.stages, Int32(lap & Uint32(1))


def bounds(batch: Any, part: Any) -> tuple[Any, Any]:
    """A part's first tile, and where it ends, of its request's; none for no part."""
    first = batch.first(part.length)
    return first + part.begin, first + vector.select(part.request >= 0, part.end, part.begin)
