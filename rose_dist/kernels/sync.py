"""Waiting on memory: grid barriers and flags. Every wait is bounded.

Counters and flags only ever grow (modulo 2^32, compared as signed differences), so nothing is reset between launches
and a replayed graph needs no host. A wait that outlives its limit writes one `WaitReport` and returns False; the
kernel then runs to its end without waiting again, and the host raises.
"""

from __future__ import annotations

import torch

from rose_dist.kernels import ptx
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, Uint64, cute, cutlass
from rose_dist.kernels.errors import KernelError

REPORT_WORDS = 8
DEFAULT_LIMIT_NS = 10_000_000_000
COUNTERS = 2
"""Of a grid barrier, so that not all blocks read the same: 0.85 us instead of 0.88 for 132 blocks
(H200)."""
COUNTER_BYTES = 256
"""From one to the next."""
POLLS_PER_CLOCK = 32
"""Polls between two looks at the clock, so that a short wait does not pay for it."""


class WaitExpiredError(KernelError):
    """A device-side wait outlived its limit."""


class WaitReport:
    """Where kernels say that a wait expired: 8 words of pinned host memory that the GPU writes.

    Words: 0 claimed (the first expired wait takes it), 1 rank, 2 peer, 3 stage, 4 wanted value, 5 value seen,
    6 unused, 7 complete. Written by the GPU, word 7 last with a release at system scope; read by the host.
    """

    def __init__(self, stages: dict[int, str]) -> None:
        """`stages`: what the numbers that kernels pass mean."""
        self._stages = stages
        self._words = torch.zeros(REPORT_WORDS, dtype=torch.int32, pin_memory=torch.cuda.is_available())

    @property
    def address(self) -> int:
        """To pass to kernels."""
        return self._words.data_ptr()

    def check(self) -> None:
        """Raise `WaitExpiredError` if a wait has expired since construction."""
        if self._words[7].item():
            _, rank, peer, stage, wanted, seen, _, _ = (int(word) & 0xFFFFFFFF for word in self._words.tolist())
            raise WaitExpiredError(
                f"rank {rank} waited for rank {peer} in {self._stages.get(stage, f'stage {stage}')} "
                f"beyond the limit: wanted {wanted}, saw {seen}"
            )


@cute.jit
def reached(seen: Uint32, wanted: Uint32) -> Boolean:
    """Whether a counter that only grows has come to `wanted`, across its wrap-around."""
    return Int32(seen - wanted) >= 0


@cute.jit
def wait(
    flag: Int64, wanted: Uint32, scope: cutlass.Constexpr, limit_ns: Int64, report: Int64, rank: Int32, peer: Int32,
    stage: cutlass.Constexpr, exact: cutlass.Constexpr = False,
) -> Boolean:  # fmt: skip
    """Until the u32 at `flag` has come to `wanted`; then everything its releasing writer published is visible.

    One thread waits; a block barrier after it passes the visibility on to the block. exact: for a flag that may be so
    old that it seems to be ahead: it must equal `wanted`.

    Returns:
        False if `limit_ns` ran out first; the report then names rank, peer, stage and both values.
    """
    seen = ptx.load_acquire(flag, scope)
    arrived = (seen == wanted) if exact else reached(seen, wanted)
    if not arrived:
        polls, deadline, in_time = Int32(0), Uint64(0), Boolean(True)
        while in_time and not arrived:
            seen = ptx.load_acquire(flag, scope)
            arrived = (seen == wanted) if exact else reached(seen, wanted)
            polls += 1
            if polls % POLLS_PER_CLOCK == 0:
                now = ptx.clock_ns()
                if deadline == 0:
                    deadline = now + Uint64(limit_ns)
                in_time = now < deadline
        if not arrived:
            report_expired(report, rank, peer, stage, wanted, seen)
    return arrived


@cute.jit
def report_expired(
    report: Int64, rank: Int32, peer: Int32, stage: cutlass.Constexpr, wanted: Uint32, seen: Uint32
) -> None:
    """Fill the report, unless another wait already has."""
    if ptx.compare_and_swap(report, Uint32(0), Uint32(1), "sys") == 0:
        for i, value in enumerate((Uint32(rank), Uint32(peer), Uint32(stage), wanted, seen)):
            ptx.store_relaxed(report + 4 * (i + 1), value, "sys")
        ptx.store_release(report + 4 * (REPORT_WORDS - 1), Uint32(1), "sys")


@cute.jit
def grid_barrier(
    counters: Int64, wanted: Uint32, limit_ns: Int64, report: Int64, rank: Int32, stage: cutlass.Constexpr
) -> None:
    """All blocks of the grid; they must be co-resident (cooperative launch).

    counters: `COUNTERS` u32 in device memory, `COUNTER_BYTES` apart. Every block adds one to each of them, a thread
    each (release); one thread of every block reads one of them (acquire). They publish what the block wrote before the
    barrier to every block after it.
    wanted: the counters' value after all blocks have arrived, i.e. blocks × barriers passed since they were 0.
    """
    cute.arch.sync_threads()
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if thread < COUNTERS:
        ptx.add_release(counters + Int64(thread) * COUNTER_BYTES, Uint32(1), "gpu")
    if thread == 0:
        read = counters + Int64(block % COUNTERS) * COUNTER_BYTES
        wait(read, wanted, "gpu", limit_ns, report, rank, rank, stage)
    cute.arch.sync_threads()


@cute.jit
def signal(flag: Int64, value: Uint32, scope: cutlass.Constexpr) -> None:
    """After a block barrier, one thread publishes what the block wrote, with `value` at `flag`."""
    cute.arch.sync_threads()
    if cute.arch.thread_idx()[0] == 0:
        ptx.store_release(flag, value, scope)
