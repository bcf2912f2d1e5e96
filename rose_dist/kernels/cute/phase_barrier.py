"""A grid barrier for launches that a graph replays: it needs no number from the host and no reset."""

from __future__ import annotations

from typing import Any

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, cute, cutlass

HALF = 0x80000000


def awaited(counter: Any) -> Any:
    """What the counter comes to when all blocks have arrived: to be asked before this one has, and long before it is
    needed, as it takes a way to memory and back.
    """
    return (Uint32(ptx.load_relaxed(counter, "gpu")) & Uint32(HALF)) ^ Uint32(HALF)


def arrive(counter: Any, first_block: Any, blocks: Any) -> None:
    """One thread's share of `phase_barrier`: it publishes what the block wrote, as far as this thread knows of it."""
    share = vector.select(first_block, Uint32(HALF) - Uint32(blocks - 1), Uint32(1))
    ptx.add_release(counter, share, "gpu")


@cute.jit
def phase_barrier(
    counter: Int64, first_block: Boolean, blocks: Int32, passed: cute.Tensor, limit_ns: Int64, report: Int64,
    rank: Int32, stage: cutlass.Constexpr,
) -> Boolean:  # fmt: skip
    """All blocks of a co-resident grid, any number of them from launch to launch.

    counter: u32 in device memory, 0 at first. Thread 0 of every block adds to it (release), the first block 2^31 −
    (blocks − 1) and all others 1: together 2^31, so that each barrier flips the top bit and leaves the others 0. The
    same threads read it (acquire) until the top bit has flipped; it publishes what every block wrote before the barrier
    to every block after it.
    passed: Int32 [1] in shared memory, scratch.

    Returns:
        Whether all blocks arrived within `limit_ns`, the same in all threads of the block; else a report is written.
    """
    flipped = Uint32(0)
    if cute.arch.thread_idx()[0] == 0:
        flipped = awaited(counter)
    cute.arch.sync_threads()
    if cute.arch.thread_idx()[0] == 0:
        arrive(counter, first_block, blocks)
        passed[0] = Int32(sync.wait(counter, flipped, "gpu", limit_ns, report, rank, rank, stage))
    cute.arch.sync_threads()
    return passed[0] != 0
