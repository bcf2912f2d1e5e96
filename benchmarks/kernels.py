"""Times every kernel in CUDA graphs against the copy rate of the same run and against what else there is.

    python -m benchmarks.kernels [--out benchmarks/results/h200] [--only TEXT[,TEXT]] [--compile] [--flashinfer DIR]

`--only` takes whole sections (norms, qk_norms, activations, quantisers, routers, embeddings, barrier, cold_start) and
the cases whose "kernel shape" holds one of the texts, as in `--only "routers,barrier,rms_norm_fp8"`, and writes
kernels_selected instead of kernels. Writes the .json and the .md after every section, so that an interrupted run keeps
what it has. Kernels are compiled first, by all CPU cores. A time is the median over graph replays divided by the calls
in the graph; the spread is the distance from the 10th to the 90th percentile. Peers: other tilings of the same kernel
(`kernel_variants.py`), eager torch, with `--compile` torch.compile, quack if it can be imported, and FlashInfer's
kernels if `--flashinfer` names a folder with its `norm` and `silu_and_mul` modules built as fi_norm.so and fi_silu.so.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import grid_barrier, kernel_builds
from benchmarks.graphs import copy_rate
from benchmarks.kernel_cases import SECTIONS, Call, Case, Peers
from benchmarks.kernel_variants import Variant
from benchmarks.row_cold_start import cold_start

BIG = 1 << 28
"""Bytes of traffic from which on a kernel is compared with a copy."""
BUDGET_S = 0.12
COPIES = {"4 GiB": 4 << 30, "1 GiB": 1 << 30, "512 MiB": 512 << 20}


@dataclass
class Time:
    """Microseconds a call."""

    median: float
    spread: float


def calls_of(call: Call) -> int:
    """How many calls a graph should have, so that its own launch counts little."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return max(2, min(50, int(0.02 / (time.perf_counter() - start))))


def time_call(call: Call, calls: int) -> Time:
    """Median over replays of a graph of so many calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(calls)]
    del kept
    samples = []
    until = time.perf_counter() + BUDGET_S
    while len(samples) < 12 or (time.perf_counter() < until and len(samples) < 200):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / calls)
    deciles = statistics.quantiles(samples[2:], n=10)
    return Time(statistics.median(samples[2:]), deciles[-1] - deciles[0])


def time_variant(variant: Variant, call: Call, calls: int) -> Time:
    """In a graph of as many calls as the kernel's own."""
    with variant():
        return time_call(call, calls)


def time_peer(call: Call) -> Time:
    return time_call(call, calls_of(call))


def measure(case: Case, compile_peers: bool) -> dict[str, Any]:
    """All times of one case; a peer that fails is noted, not fatal."""
    calls = calls_of(case.call)
    own = time_call(case.call, calls)
    row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "bytes": case.bytes, "us": asdict(own)}
    row["tb_s"] = case.bytes / own.median / 1e6
    if case.bytes >= BIG:
        row["copy_tb_s"] = copy_rate(case.bytes, copies=4) / 1e6
    timed: dict[str, Callable[[], Time]] = {}
    for name, variant in case.variants.items():
        timed[name] = functools.partial(time_variant, variant, case.call, calls)
    others = dict(case.peers)
    if case.compiled is not None and compile_peers:
        torch._dynamo.reset()
        others["torch.compile"] = torch.compile(case.compiled, dynamic=False)
    for name, call in others.items():
        timed[name] = functools.partial(time_peer, call)
    row["peers"] = {}
    for name, time_it in timed.items():
        try:
            row["peers"][name] = asdict(time_it())
        except Exception as error:
            row["peers"][name] = {"failed": str(error)[:200]}
    return row


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine, copies = result["machine"], result["copy_tb_s"]
    lines = [
        f"# Kernels on {machine['gpu']}",
        "",
        f"`{result['command']}`, {result['date']}, driver {machine['driver']}, torch {machine['torch']};",
        f"peers: {machine['peers']}.",
        "",
        f"Copy rate in this run (bytes read and written): {copies['4 GiB']:.2f} TB/s for 4 GiB of traffic, "
        f"{copies['512 MiB']:.2f} TB/s for 512 MiB; shares are of the first.",
        "Times are us a call in a CUDA graph, median (spread p10-p90); a peer's factor is its time over ours.",
        "Peers by their tiling: the same kernel with another one.",
        "",
        "| kernel | shape | us | TB/s | of copy rate | of a copy of its size | peers, us |",
        "|---|---|---|---|---|---|---|",
    ]
    rate = result["copy_tb_s"]["4 GiB"]
    for row in result["cases"]:
        if "failed" in row:
            lines.append(f"| {row['kernel']} | {row['shape']} | failed: {row['failed'][:80]} | | | | |")
            continue
        own = row["us"]["median"]
        peers = ", ".join(
            f"{name} {t['median']:.2f} ({t['median'] / own:.2f}x)" if "median" in t else f"{name} failed"
            for name, t in row["peers"].items()
        )
        speed = " | | "
        if "copy_tb_s" in row:
            speed = f"{row['tb_s']:.2f} | {row['tb_s'] / rate:.0%} | {row['tb_s'] / row['copy_tb_s']:.0%}"
        us = f"{own:.2f} ({row['us']['spread']:.2f})"
        lines.append(f"| {row['kernel']} | {row['shape']} | {us} | {speed} | {peers} |")
    extras = {"Grid barrier, us by blocks": "barrier", "Cold start of GPT-OSS's variants, s": "cold_start"}
    for title, key in extras.items():
        if key in result:
            lines += ["", f"{title}: `{json.dumps(result[key])}`"]
    return "\n".join(lines) + "\n"


def describe_machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    return {"gpu": torch.cuda.get_device_name(), "driver": driver[0] if driver else "?", "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/h200", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--compile", action="store_true", help="torch.compile is a peer, too")
    parser.add_argument("--flashinfer")
    parser.add_argument("--compile-until", type=float, default=150.0, help="seconds after which it is left out")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    started = time.perf_counter()
    peers = Peers(arguments.flashinfer)
    result: dict[str, Any] = {
        "command": "python " + " ".join(["-m benchmarks.kernels", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {**describe_machine(), "peers": ", ".join(peers.found)},
        "copy_tb_s": {name: copy_rate(size) / 1e6 for name, size in COPIES.items()},
        "cases": [],
    }

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - started, 1)
        name = "kernels_selected" if arguments.only else "kernels"
        (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1))
        (arguments.out / f"{name}.md").write_text(table(result))

    extras = {"barrier": grid_barrier.barriers, "cold_start": cold_start}
    wanted = arguments.only.split(",")
    whole = {*wanted} <= {*SECTIONS, *extras}

    def chosen(section: str) -> Iterator[Case]:
        if whole and section not in wanted:
            return
        for case in SECTIONS[section](peers):
            if section in wanted or any(text in f"{case.kernel} {case.shape}" for text in wanted):
                yield case

    kernels = kernel_builds.kernels_of(case for section in SECTIONS for case in chosen(section))
    if "barrier" in wanted or not arguments.only:
        kernels += grid_barrier.kernels()
    kernel_builds.build(kernels)
    print(f"{len(kernels)} kernels compiled after {time.perf_counter() - started:.0f} s", flush=True)
    for section in SECTIONS:
        for case in chosen(section):
            compile_peers = arguments.compile and time.perf_counter() - started < arguments.compile_until
            try:
                row = measure(case, compile_peers)
                print(
                    f"{row['kernel']:32} {row['shape']:20} {row['us']['median']:9.2f} us {row['tb_s']:6.2f} TB/s",
                    flush=True,
                )
            except Exception as error:
                traceback.print_exc()
                row = {"kernel": case.kernel, "shape": case.shape, "failed": f"{type(error).__name__}: {error}"}
            result["cases"].append(row)
        save()
    for key, function in extras.items():
        if key in wanted or not arguments.only:
            try:
                result[key] = function()
            except Exception:
                traceback.print_exc()
            print(key, result.get(key), flush=True)
    save()
    print(table(result))


if __name__ == "__main__":
    main()
