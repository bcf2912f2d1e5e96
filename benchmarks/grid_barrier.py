"""Times the grid barrier, for `kernels.py`."""

from __future__ import annotations

import statistics

import torch

from benchmarks.kernel_cases import CUDA
from rose_dist.kernels import jit, launch, probe
from rose_dist.kernels.sync import COUNTER_BYTES, WaitReport

COPIES = (1, 2, 4, 8)
"""Of the counter."""
REPEATS = (100, 1100)


def barriers() -> dict[str, dict[str, float]]:
    """us a grid barrier, by blocks and by copies of the counter: the difference of two launches with different numbers
    of them.
    """
    most = torch.cuda.get_device_properties(0).multi_processor_count
    return {str(blocks): {str(copies): _time(blocks, copies) for copies in COPIES} for blocks in (16, 66, most)}


def kernels() -> list[jit.Kernel]:
    arch = launch.device(torch.zeros(1, device=CUDA)).arch
    return [probe.GridBarriers(arch, repeats, work=False, copies=copies) for copies in COPIES for repeats in REPEATS]


def _time(blocks: int, copies: int) -> float:
    arch = launch.device(torch.zeros(1, device=CUDA)).arch
    report = WaitReport({probe.BARRIER_STAGE: "the grid barrier"})
    times = []
    for repeats in REPEATS:
        loaded = jit.load(probe.GridBarriers(arch, repeats, work=False, copies=copies))
        counters = torch.zeros(copies * COUNTER_BYTES // 4, dtype=torch.int32, device=CUDA)
        slots = torch.zeros(blocks, dtype=torch.int32, device=CUDA)
        samples = []
        for attempt in range(9):
            base = attempt * blocks * repeats
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launch.run(loaded, counters, counters, base, slots, report.address, 10**10, blocks)
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3)
        report.check()
        times.append(statistics.median(samples))
    return (times[1] - times[0]) / (REPEATS[1] - REPEATS[0])
