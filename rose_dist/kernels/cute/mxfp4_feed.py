"""The warp that feeds the MXFP4 expert kernel of few rows: bulk copies of weights into a ring, and of rows of x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.cute.look_ahead import look_ahead
from rose_dist.kernels.cute.mxfp4_operands import barrier, next_stage, wait
from rose_dist.kernels.cute.phase_barrier import arrive, awaited
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.stream_tiling import LAYERS_STAGE, StreamTiling
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class Feeder:
    """Copies of weights follow one another across the borders of items, segments and layers: those of the second layer
    fill the ring while results of the first are still computed, here and elsewhere. Rows come when they exist.

    tiles: tile rows of a matrix, of each layer. Arguments that are lists have an element a layer too, but for
    `segments`: of each segment that the block meets the expert, its first row, and its rows.
    """

    tiles: tuple[int, ...]
    tiling: StreamTiling

    @cute.jit
    def run(
        self, shared: Int32, weights: list[Int64], x: list[Int64], segments: list[cute.Tensor], items: list[Int32],
        tile: list[Int32], ends: list[Int32], meeting: list[Int64], ahead: list[Int64],
    ) -> None:  # fmt: skip
        """Copy the weights of all items, the first of which is number `tile` of its matrix, and the rows of the `ends`
        segments that they are of. meeting: counter, report and limit of that between the layers. ahead: address and
        bytes of what comes next from memory.
        """
        tiling, steps = self.tiling, self.tiling.steps
        first = items[0] * steps[0]
        copies, flipped = first, Uint32(0)
        if const_expr(len(self.tiles) > 1):
            copies += items[1] * steps[1]
        self.know_rows()
        # Copies are carried out in turn: behind the weights, rows, which are needed at once, would come last.
        for early in range_constexpr(tiling.buffers):
            self.fetch_rows(shared, x, segments, ends, Boolean(False), Int32(early))
        source, segment, left = weights[0], Int32(-1), Int32(1)
        source, segment, left = self.turn_to(weights, segments, tile, ends, first, source, segment, left, Int32(0))
        for stage in range_constexpr(tiling.stages):
            if stage < copies:
                self.fetch(shared, source, Int32(stage))
            source, segment, left = self.turn_to(
                weights, segments, tile, ends, first, source, segment, left, Int32(stage + 1)
            )
        self.go_on()
        done, done_left = Int32(0), (self.tiles[0] - tile[0]) * steps[0]
        if const_expr(len(self.tiles) > 1):
            flipped = self.awaited(meeting[0])
            if first == 0:
                self.meet(shared, x, segments, items, ends, meeting, flipped)
                done_left = (self.tiles[1] - tile[1]) * steps[1]
        stage, parity = Int32(0), Int32(0)
        for freed in range(1, copies + 1):
            # All warps are done with what the stage held, and with the rows that went with it.
            wait(barrier(shared, stage + tiling.stages), parity)
            if freed - 1 + tiling.stages < copies:
                self.fetch(shared, source, stage)
            if freed == vector.max_of(copies - tiling.stages, Int32(1)):
                look_ahead(ahead[0], ahead[1])
            source, segment, left = self.turn_to(
                weights, segments, tile, ends, first, source, segment, left, freed + tiling.stages
            )
            done_left -= 1
            if done_left == 0:
                done += 1
                done_left = self.copies_at(freed, first)
                self.fetch_rows(shared, x, segments, ends, freed > first, done + (tiling.buffers - 1))
            if const_expr(len(self.tiles) > 1):
                if freed == first:
                    self.meet(shared, x, segments, items, ends, meeting, flipped)
                    done, done_left = Int32(0), (self.tiles[1] - tile[1]) * steps[1]
            stage, parity = next_stage(stage, parity, self.tiling.stages)

    def know_rows(self) -> None:
        """Before their first copies."""
        ptx.fence_async_copies()  # the launch before has written them, which is known since the wait

    def go_on(self) -> None:
        """After the first copies of weights."""

    def awaited(self, counter: Any) -> Any:
        """What the counter of the meeting between the layers comes to."""
        return awaited(counter)

    @cute.jit
    def turn_to(
        self, weights: list[Int64], segments: list[cute.Tensor], tile: list[Int32], ends: list[Int32], first: Int32,
        source: Int64, segment: Int32, left: Int32, number: Int32,
    ) -> tuple[Int64, Int32, Int32]:  # fmt: skip
        """From the copy before to copy `number`: where its weights are, its segment, and how many copies of that come
        from it on. The second layer's copies follow the `first`.
        """
        source += self.tiling.stage_bytes
        left -= 1
        if left == 0:
            left = self.copies_at(number, first)
            segment += 1
            base, at = weights[0], Int32(0)
            if number == 0:
                at = tile[0] * self.tiling.steps[0]
            if const_expr(len(self.tiles) > 1):
                if number >= first:
                    base = weights[1]
            source = self.source(base, segments[0], segment, at, left, ends)
            left -= at
        if const_expr(len(self.tiles) > 1):
            if number == first:
                at, left = tile[1] * self.tiling.steps[1], Int32(self.tiles[1] * self.tiling.steps[1])
                segment = Int32(0)
                source = self.source(weights[1], segments[0], segment, at, left, ends)
                left -= at
        return source, segment, left

    @cute.jit
    def source(
        self, base: Int64, experts: cute.Tensor, segment: Int32, at: Int32, copies: Int32, ends: list[Int32]
    ) -> Int64:
        """Where copy number `at` of the `copies` of a segment's matrix starts; anywhere behind the last segment."""
        end, source = ends[0], base
        if const_expr(len(self.tiles) > 1):
            end = vector.max_of(end, ends[1])
        if segment < end:
            source = base + (Int64(experts[segment]) * copies + at) * self.tiling.stage_bytes
        return source

    def copies_at(self, number: Any, first: Any) -> Any:
        """In which the matrix comes that copy `number` is of."""
        copies = [Int32(tiles * steps) for tiles, steps in zip(self.tiles, self.tiling.steps, strict=True)]
        return copies[0] if len(copies) == 1 else vector.select(number < first, copies[0], copies[1])

    @cute.jit
    def fetch(self, shared: Int32, source: Int64, stage: Int32) -> None:
        """Start a copy into the ring."""
        size = self.tiling.stage_bytes
        if cute.arch.thread_idx()[0] % WARP == 0:
            full = barrier(shared, stage)
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            ptx.stream_to_shared(shared + self.tiling.ring_offset + stage * size, source, size, full.toint())

    @cute.jit
    def fetch_rows(
        self, shared: Int32, x: list[Int64], segments: list[cute.Tensor], ends: list[Int32], second: Boolean,
        segment: Int32,
    ) -> None:  # fmt: skip
        """Start the copies of the rows of a layer's segment, if there is such a segment; a lane a row. Segments of both
        layers take the buffers in turn.
        """
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        rows, end, turn, size = x[0], ends[0], segment, Int32(tiling.columns[0] * 64)
        if const_expr(len(self.tiles) > 1):
            if second:
                rows, end, turn, size = x[1], ends[1], ends[0] + segment, Int32(tiling.columns[1] * 64)
        if segment < end:
            buffer = turn % tiling.buffers
            full = barrier(shared, 2 * tiling.stages + buffer)
            count = segments[2][segment]
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, count * size)
            cute.arch.sync_warp()
            if lane < count:
                target = shared + tiling.row_offset + (buffer * tiling.rows + lane) * tiling.row_stride
                row = Int64(segments[1][segment] + lane)
                ptx.copy_to_shared(target, rows + row * size, size, full.toint())

    @cute.jit
    def meet(
        self, shared: Int32, x: list[Int64], segments: list[cute.Tensor], items: list[Int32], ends: list[Int32],
        meeting: list[Int64], flipped: Uint32,
    ) -> None:  # fmt: skip
        """Between the layers: this block's results are written; once all blocks' are, fetch the first rows."""
        wait(barrier(shared, self.tiling.written), 0)
        if cute.arch.thread_idx()[0] % WARP == 0:
            block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
            arrive(meeting[0], block == 0, blocks)
            if items[1] > 0:
                sync.wait(meeting[0], flipped, "gpu", meeting[2], meeting[1], Int32(0), Int32(0), LAYERS_STAGE)
        cute.arch.sync_warp()
        ptx.fence_async_copies()
        for ahead in range_constexpr(self.tiling.buffers):
            self.fetch_rows(shared, x, segments, ends, Boolean(True), Int32(ahead))
