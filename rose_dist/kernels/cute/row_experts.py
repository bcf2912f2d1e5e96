"""Whose each packed row is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import Int32, Int64, Stream, cute

THREADS = 128


@cache
def launcher(arch: Arch, experts: int) -> jit.Launcher:
    return jit.load(RowExperts(arch, experts))


@dataclass(frozen=True)
class RowExperts(jit.Kernel):
    """A block an expert, and one for the rows behind the last one's."""

    experts: int

    @cute.jit
    def __call__(self, counts: Int64, offsets: Int64, of_row: Int64, ends: Int64, rows: Int32, stream: Stream) -> None:
        """Addresses: counts int32 [experts], offsets int64 [experts + 1]; written are of_row int32 [rows] and ends
        int32 [experts].
        """
        self.kernel(counts, offsets, of_row, ends, rows).launch(
            grid=[self.experts + 1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, counts: Int64, offsets: Int64, of_row: Int64, ends: Int64, rows: Int32) -> None:
        thread, expert = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        held = expert < self.experts
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        start = Int32(vector.scalar(offsets + Int64(expert) * 8, Int64)[0])
        end, stop = start, rows
        if held:
            end = start + vector.scalar(counts + Int64(expert) * 4, Int32)[0]
            stop = Int32(vector.scalar(offsets + Int64(expert + 1) * 8, Int64)[0])
        for row in range(start + thread, stop, THREADS):
            vector.scalar(of_row + Int64(row) * 4, Int32)[0] = vector.select(row < end, expert, Int32(-1))
        ptx.exit_if(thread > 0)
        if held:
            vector.scalar(ends + Int64(expert) * 4, Int32)[0] = end
