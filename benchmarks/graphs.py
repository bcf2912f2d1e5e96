"""Times inside CUDA graphs, and the floor that a run's own copy rate sets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


def captured(call: Call, calls: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of so many calls; the first, outside it, loads what is needed."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def time_call(call: Call, *, calls: int = 20, replays: int = 0, meet: Call = lambda: None) -> float:
    """Median microseconds a call over replays of a graph of `calls` calls; `meet` is called before each replay.

    `replays`: how many; 0: as many as go into a fifth of a second, which ranks that wait for one another must not do.
    """
    graph = captured(call, calls)
    samples = []
    until = time.perf_counter() + 0.2
    while len(samples) < (replays or 12) or (not replays and time.perf_counter() < until and len(samples) < 200):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        meet()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples[2:])


def copy_rate(size: int = 4 << 30, copies: int = 1) -> float:
    """Bytes a microsecond of device-to-device copies that move `size` bytes each, read and written counted.

    Launched by themselves, `copies` in a row: as a node of a graph the same copy takes half as long again.
    """
    source = torch.randn(size // 8, device="cuda")
    target = torch.empty_like(source)
    samples = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(copies):
            target.copy_(source)
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / copies)
    return size / statistics.median(samples[2:])


def fill_rate(size: int = 2 << 30) -> float:
    """Bytes a microsecond that are written where nothing is read: what dispatch does most."""
    target = torch.empty(size // 4, device="cuda")
    return size / time_call(lambda: target.fill_(1.0), calls=1, replays=20)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, columns in the order of the first row that has them."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
