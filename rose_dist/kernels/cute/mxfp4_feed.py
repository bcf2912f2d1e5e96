"""The warp that feeds the MXFP4 expert kernel of few rows: bulk copies of weights into a ring, and of rows of x."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import ptx
from rose_dist.kernels.cute.mxfp4_operands import barrier, next_stage, wait
from rose_dist.kernels.dsl import Int32, Int64, const_expr, cute, range_constexpr
from rose_dist.kernels.mxfp4_layout import TILE_BYTES
from rose_dist.kernels.stream_tiling import StreamTiling
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class Feeder:
    """Copies follow one another across the borders of items and segments.

    tiles: tile rows of a matrix.
    early: the block has not waited for the launch before yet: weights come first, x when that one is complete.
    """

    tiles: int
    tiling: StreamTiling
    early: bool

    @cute.jit
    def run(
        self, shared: Int32, weights: Int64, x: Int64, segments: list[cute.Tensor], items: Int32, tile: Int32,
        end: Int32,
    ) -> None:  # fmt: skip
        """Copy the weights of all items, and x of the `end` segments."""
        tiling = self.tiling
        count, segment = items * tiling.steps, Int32(0)
        left = (self.tiles - tile) * tiling.steps
        done_segment, done_left = Int32(0), left
        source = self.source(weights, segments[0], segment, tile, end)
        for stage in range_constexpr(tiling.stages):
            if stage < count:
                self.fetch(shared, source, Int32(stage))
            source, segment, left = self.next_source(weights, segments[0], source, segment, left, end)
        if const_expr(self.early):
            self.look_ahead(weights, segments[0], source, segment, left, end, count)
            cute.arch.griddepcontrol_wait()
        due = count - tiling.left
        if due <= tiling.stages:
            cute.arch.griddepcontrol_launch_dependents()
        ptx.fence_async_copies()
        for ahead in range_constexpr(tiling.buffers):
            self.fetch_rows(shared, x, segments, Int32(ahead), end)
        stage, parity = Int32(0), Int32(0)
        for copy in range(tiling.stages, count + tiling.stages):
            # All warps are done with what the stage held, and with the rows of x that went with it.
            wait(barrier(shared, stage + tiling.stages), parity)
            if copy < count:
                self.fetch(shared, source, stage)
            if copy == due:
                cute.arch.griddepcontrol_launch_dependents()
            source, segment, left = self.next_source(weights, segments[0], source, segment, left, end)
            done_left -= 1
            if done_left == 0:
                done_left = Int32(self.tiles * tiling.steps)
                done_segment += 1
                self.fetch_rows(shared, x, segments, done_segment + (tiling.buffers - 1), end)
            stage, parity = next_stage(stage, parity, self.tiling.stages)

    @cute.jit
    def look_ahead(
        self, weights: Int64, experts: cute.Tensor, source: Int64, segment: Int32, left: Int32, end: Int32,
        count: Int32,
    ) -> None:  # fmt: skip
        """Bring the copies that come next into L2: memory need not rest while the ring is full."""
        for i in range_constexpr(self.tiling.ahead):
            if (self.tiling.stages + i < count) & (cute.arch.thread_idx()[0] % WARP == 0):
                ptx.prefetch_to_l2(source, self.tiling.stage_bytes)
            source, segment, left = self.next_source(weights, experts, source, segment, left, end)

    @cute.jit
    def source(self, weights: Int64, experts: cute.Tensor, segment: Int32, tile: Int32, end: Int32) -> Int64:
        """Where an item's 32 rows of weights start; anywhere behind the last segment."""
        source = weights
        if segment < end:
            row = Int64(experts[segment]) * self.tiles + tile
            source = weights + row * (self.tiling.columns * TILE_BYTES)
        return source

    @cute.jit
    def next_source(
        self, weights: Int64, experts: cute.Tensor, source: Int64, segment: Int32, left: Int32, end: Int32
    ) -> tuple[Int64, Int32, Int32]:
        """Source of the copy behind one, its segment, and how many copies that one has left."""
        source += self.tiling.stage_bytes
        left -= 1
        if left == 0:
            left = Int32(self.tiles * self.tiling.steps)
            segment += 1
            source = self.source(weights, experts, segment, Int32(0), end)
        return source, segment, left

    @cute.jit
    def fetch(self, shared: Int32, source: Int64, stage: Int32) -> None:
        """Start a copy into the ring."""
        size = self.tiling.stage_bytes
        if cute.arch.thread_idx()[0] % WARP == 0:
            full = barrier(shared, stage)
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            ptx.copy_to_shared(shared + self.tiling.ring_offset + stage * size, source, size, full.toint())

    @cute.jit
    def fetch_rows(self, shared: Int32, x: Int64, segments: list[cute.Tensor], segment: Int32, end: Int32) -> None:
        """Start the copies of a segment's rows, if there is such a segment; a lane a row."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        if segment < end:
            buffer = segment % tiling.buffers
            full = barrier(shared, 2 * tiling.stages + buffer)
            count, size = segments[2][segment], tiling.columns * 64
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, count * size)
            cute.arch.sync_warp()
            if lane < count:
                target = shared + tiling.row_offset + (buffer * tiling.rows + lane) * tiling.row_stride
                row = Int64(segments[1][segment] + lane)
                ptx.copy_to_shared(target, x + row * size, size, full.toint())
