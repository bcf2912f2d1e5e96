"""The warp that copies whole tokens for decode attention (`whole_token_attention`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.attention_tiling import TILE
from rose_dist.kernels.cute.kv_blocks import Paged, block_of, table_of
from rose_dist.kernels.cute.mxfp4_operands import barrier, wait
from rose_dist.kernels.cute.split_items import Batch, Part, after, run_of_block
from rose_dist.kernels.cute.whole_token_tiles import WholeTokenTiles
from rose_dist.kernels.dsl import Int32, Int64, Uint32, const_expr, cute, cutlass
from rose_dist.kernels.paged_attention import UNLIMITED
from rose_dist.kernels.variants import WARP

FEEDERS = 4
"""Warps: one starts copies at a quarter of the rate at which FP8 tiles could come, with looking up and waiting."""


@dataclass(frozen=True)
class TokenFeeder:
    """Tiles follow one another through a ring, across the borders of parts. Every fourth tile is for one warp, whose
    lanes look up 32 tiles' blocks at once: the ring is full meanwhile.
    """

    tiles: WholeTokenTiles
    block_tiles: int
    stages: int
    early: bool

    @cute.jit
    def run(
        self, barriers: Int32, ring: Uint32, paged: Paged, batch: Batch, feeder: Int32
    ) -> None:  # fmt: skip
        """Warp number `feeder` of those that feed: its tiles of the block's parts."""
        part, line_end = run_of_block(batch)
        number = Int32(0)
        # What comes from this tile on waits for the launch before: the request's last token, and what the ring has no
        # room for yet. The last of the part does too, as after the wait the next launch may begin.
        start, end = bounds(batch, part)
        unknown = Int32(UNLIMITED)
        if const_expr(self.early):
            newest = vector.min_of((part.length - 1) // TILE, end - 1)
            unknown = vector.min_of(newest - start, Int32(self.stages))
        else:
            ptx.fence_async_copies()  # keys and values have been written, which is known since the wait
        row, length, split, place, begin, end = part.values
        while row >= 0:
            current = Part(row, length, split, place, begin, end)
            start, upto = bounds(batch, current)
            blocks = Int32(0)
            # All tiles of a stage are for one warp, which so sees every phase of its barriers.
            own = start + ((feeder - number) & (FEEDERS - 1))
            for tile in cutlass.range(own, upto, FEEDERS, unroll=1):
                at = tile - start
                if const_expr(self.early):
                    if number + at >= unknown:
                        cute.arch.griddepcontrol_wait()
                        ptx.fence_async_copies()
                        cute.arch.griddepcontrol_launch_dependents()
                        unknown = Int32(UNLIMITED)
                turn = at // FEEDERS % WARP
                if turn == 0:
                    blocks = self.look_up(paged, row, tile, upto)
                block = cute.arch.shuffle_sync(blocks, turn)
                self.fetch(barriers, ring, paged, batch.low(length), length, number + at, tile, block)
            number += vector.max_of(upto - start, Int32(0))
            row, length, split, place, begin, end = after(batch, current, line_end).values

    @cute.jit
    def look_up(self, paged: Paged, row: Int32, first: Int32, end: Int32) -> Int32:
        """The block of this lane's tile among the warp's from `first` on."""
        table = table_of(paged.tables, paged.table_stride, paged.first_blocks, Int64(row))
        return block_of(table, first + cute.arch.thread_idx()[0] % WARP * FEEDERS, end, self.block_tiles)

    @cute.jit
    def fetch(
        self, barriers: Int32, ring: Uint32, paged: Paged, low: Int32, high: Int32, number: Int32, tile: Int32,
        block: Int32,
    ) -> None:  # fmt: skip
        """Start copying a tile, number `number` of the block's, once there is room."""
        stage, lap = self.place(number)
        # A fresh barrier lets a wait for the phase before its first one pass.
        wait(barrier(barriers, stage + self.stages), lap ^ 1)
        slot = (Int64(block) * self.block_tiles + tile % self.block_tiles) * TILE
        self.tiles.fetch(
            barriers + stage * 8, ring + Uint32(stage * self.tiles.bytes), paged.keys, paged.values, slot, tile, low,
            high,
        )  # fmt: skip

    def place(self, number: Any) -> tuple[Any, Any]:
        """The stage of the block's tile `number`, and the parity of its barriers' phase."""
        lap = Uint32(number) // Uint32(self.stages)
        return number - Int32(lap) * self.stages, Int32(lap & Uint32(1))


def bounds(batch: Any, part: Any) -> tuple[Any, Any]:
    """A part's first tile, and where it ends, of its request's; none for no part."""
    first = batch.first(part.length)
    return first + part.begin, first + vector.select(part.request >= 0, part.end, part.begin)
