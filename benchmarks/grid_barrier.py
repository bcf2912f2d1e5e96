"""Times the grid barrier, for `kernels.py`."""

from __future__ import annotations

import statistics

import torch

from benchmarks.kernel_cases import CUDA
from rose_dist.kernels import jit, launch, probe
from rose_dist.kernels.sync import COUNTER_BYTES, COUNTERS, WaitReport

REPEATS = (100, 1100)


def barriers() -> dict[str, float]:
    """us a grid barrier, by blocks: the difference of two launches with different numbers of them."""
    most = torch.cuda.get_device_properties(0).multi_processor_count
    return {str(blocks): _time(blocks) for blocks in (16, 66, most)}


def kernels() -> list[jit.Kernel]:
    arch = launch.device(torch.zeros(1, device=CUDA)).arch
    return [probe.GridBarriers(arch, repeats, work=False) for repeats in REPEATS]


def _time(blocks: int) -> float:
    arch = launch.device(torch.zeros(1, device=CUDA)).arch
    report = WaitReport({probe.BARRIER_STAGE: "the grid barrier"})
    times = []
    for repeats in REPEATS:
        loaded = jit.load(probe.GridBarriers(arch, repeats, work=False))
        counters = torch.zeros(COUNTERS * COUNTER_BYTES // 4, dtype=torch.int32, device=CUDA)
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
