"""What the device does during some steps, by torch's profiler."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile, schedule

WARM_UP = 2
"""Calls that are not counted."""
MOST_GAPS = 6


@dataclass(frozen=True)
class Breakdown:
    """
    kernels: name → microseconds and launches a step, the longest first.
    micros: a step's time on the device, from its first kernel to its last.
    idle: share of that time in which the device ran nothing.
    gaps: what ran before and what after it ran nothing → microseconds a step, the most first.
    """

    kernels: dict[str, tuple[float, float]]
    micros: float
    idle: float
    gaps: dict[tuple[str, str], float]

    def text(self, most: int = 20) -> str:
        total = sum(micros for micros, _ in self.kernels.values())
        lines = [f"{total:10.1f} us a step in kernels, {self.idle:.1%} of the time in none"]
        for name, (micros, launches) in list(self.kernels.items())[:most]:
            lines.append(f"{micros:10.1f} us {micros / max(total, 1e-9):6.1%} {launches:7.1f} x  {name[:110]}")
        for (before, after), micros in list(self.gaps.items())[:MOST_GAPS]:
            lines.append(f"{micros:10.1f} us nothing between {before[:50]} and {after[:50]}")
        return "\n".join(lines)


def breakdown(step: Callable[[], Any], steps: int, apart_s: float = math.inf) -> Breakdown:
    """Of `steps` calls, after others that the profiler's own start slows down.

    apart_s: for calls that leave the device without work for as long between them: such gaps are no step's.
    """
    gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    phases = schedule(wait=0, warmup=WARM_UP, active=steps, repeat=1)
    with profile(activities=activities, schedule=phases, acc_events=True) as profiler:
        for number in range(WARM_UP + steps):
            step()
            if gpu and number + 1 == WARM_UP + steps:
                torch.cuda.synchronize()
            profiler.step()
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == kind]
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        entry = sums[event.name]
        entry[0] += (event.self_device_time_total if gpu else event.self_cpu_time_total) / steps
        entry[1] += 1 / steps
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in events]
    busy, gaps = busy_and_gaps(spans, apart_s * 1e6)
    idle = sum(gaps.values())
    return Breakdown(
        {name: (micros, launches) for name, (micros, launches) in ordered},
        (busy + idle) / steps,
        idle / (busy + idle) if idle else 0.0,
        {pair: micros / steps for pair, micros in gaps.items()},
    )


def busy_and_gaps(
    spans: list[tuple[float, float, str]], apart: float = math.inf
) -> tuple[float, dict[tuple[str, str], float]]:
    """Time that some span covers, and time that none does but for gaps of `apart` and more, by the names of the span
    that ended last and of the next; the most first.
    """
    busy, gaps = 0.0, defaultdict[tuple[str, str], float](float)
    reached, last = min((start for start, _, _ in spans), default=0.0), ""
    for start, end, name in sorted(spans):
        if 0 < start - reached < apart:
            gaps[last, name] += start - reached
        if end > reached:
            busy += end - max(start, reached)
            reached, last = end, name
    return busy, dict(sorted(gaps.items(), key=lambda item: -item[1]))
