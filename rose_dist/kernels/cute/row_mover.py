"""Rows by bulk copies through shared memory: a warp says from where to where, and has many bytes on their way.

A warp has a ring of `stages` pieces. Of each it starts the load, `ahead` pieces later, when it has come, its stores,
and `behind` pieces after those it waits until they are written, wherever that is. So whoever has seen a piece through
may release a flag for it, and what the warp does between two pieces costs nothing while others are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, ptx_shared, vector
from rose_dist.kernels.cute.mxfp4_operands import barrier, wait
from rose_dist.kernels.dsl import Int32, Int64, Uint8, cute, range_constexpr
from rose_dist.kernels.exchange_tiling import MoverTiling
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class RowMover:
    """Part of a kernel, whose first `tiling.warps` warps move."""

    tiling: MoverTiling

    @cute.jit
    def set_up(self, shared: Int32) -> None:
        """By all threads, before anything is moved, and after `griddepcontrol.wait` or what stands for it: what
        launches before have written, copies may read.
        """
        thread = cute.arch.thread_idx()[0]
        if thread < self.tiling.warps * self.tiling.stages:
            cute.arch.mbarrier_init(barrier(shared, thread), 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        ptx.fence_async_copies()

    def ring(self) -> list[Any]:
        """A warp's: its next piece's number and the sizes of those being loaded, and each lane's targets of these."""
        numbers = cute.make_rmem_tensor(1 + self.tiling.ahead, Int32)
        targets = cute.make_rmem_tensor(self.tiling.ahead, Int64)
        for i in range(1 + self.tiling.ahead):
            numbers[i] = Int32(0)
        for i in range(self.tiling.ahead):
            targets[i] = Int64(0)
        return [numbers, targets]

    @cute.jit
    def move(self, shared: Int32, ring: list[cute.Tensor], source: Int64, target: Int64) -> None:
        """A row, to each lane's target that is not 0. By whole warps, of one source."""
        tiling = self.tiling
        for piece in range(tiling.pieces):
            at = piece * tiling.piece_bytes
            to = Int64(vector.select(target != 0, target + at, Int64(0)))
            self.step(shared, ring, source + at, to, vector.min_of(Int32(tiling.row_bytes) - at, tiling.piece_bytes))

    @cute.jit
    def complete(self, shared: Int32, ring: list[cute.Tensor], end: Int32) -> None:
        """Afterwards all pieces with numbers before `end` are written."""
        for _ in range(ring[0][0] - end, self.tiling.ahead + self.tiling.behind):
            self.step(shared, ring, Int64(0), Int64(0), Int32(0))

    @cute.jit
    def step(self, shared: Int32, ring: list[cute.Tensor], source: Int64, target: Int64, size: Int32) -> None:
        """Start loading a piece of `size` bytes, nothing for 0, and pass on the one that is due."""
        tiling, (numbers, targets) = self.tiling, ring
        first, number = cute.arch.thread_idx()[0] // WARP * tiling.stages, numbers[0]
        if cute.arch.thread_idx()[0] % WARP == 0:
            stage = first + number % tiling.stages
            full = barrier(shared, stage)
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            if size > 0:
                ptx.copy_to_shared(self.place(shared, stage), source, size, full.toint())
        due = number - tiling.ahead
        if due >= 0:
            stage = first + due % tiling.stages
            wait(barrier(shared, stage), due // tiling.stages & 1)
            if (targets[0] != 0) & (numbers[1] > 0):
                ptx_shared.copy_from_shared(targets[0], self.place(shared, stage), numbers[1])
        ptx_shared.commit_bulk_copies()
        ptx_shared.await_bulk_copies(tiling.behind)
        cute.arch.sync_warp()  # the next load takes the stage that all lanes are done with
        for i in range_constexpr(tiling.ahead - 1):
            numbers[1 + i], targets[i] = numbers[2 + i], targets[1 + i]
        numbers[tiling.ahead], targets[tiling.ahead - 1] = size, target
        numbers[0] = number + 1

    def place(self, shared: Any, stage: Any) -> Any:
        return shared + self.tiling.ring_offset + stage * self.tiling.piece_bytes


def dynamic_shared() -> Any:
    """Where the barriers and rings are in the block's shared memory."""
    return Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
