"""The several-GPU part of all_to_all.py: one process a GPU, started here."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.all_reduce_peers import (
    EPS,
    FLASHINFER_MODULES,
    LIBRARIES,
    MOST_BYTES,
    Peers,
    beside_flashinfer,
    symmetric_kernels,
)
from benchmarks.all_to_all_late import killed, late
from benchmarks.flashinfer_modules import Builds
from benchmarks.gpu_ranks import NO_MULTICAST, Control, link_rate, memory_of
from benchmarks.graphs import copy_rate, time_call
from rose_dist.comm import all_reduce as comm_all_reduce
from rose_dist.kernels import all_reduce as kernels_all_reduce
from rose_dist.kernels import jit
from rose_dist.kernels.all_reduce import AllReduce, Sizes
from rose_dist.kernels.all_reduce_kernels import combine_kernels, usual_kernels
from rose_dist.kernels.arch import Arch, device_info
from rose_dist.kernels.linear_add import MAX_ROWS, linear_add
from rose_dist.kernels.moe_combine import combine
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm

BF16 = torch.bfloat16
SHAPES = ((2880, 4), (7168, 8))
ROWS = {2880: (1, 2, 4, 8, 11, 16, 32, 64, 128, 256, 512, 1024, 4096), 7168: (1, 8, 32, 64, 256, 1024)}
"""By hidden size; also as many as fill `MOST_BYTES`."""
FUSED_ROWS = (1, 8, 32, 64, 128)
GAINS = (
    ("norm gains x", "all-reduce + residual, norm", "all-reduce, add, torch norm"),
    ("linear gains x", "linear + all-reduce + residual", "linear, all-reduce + residual"),
    ("combine gains x", "combine + all-reduce", "combine, all-reduce, round"),
    (
        "combine and norm gain x", "combine + all-reduce + residual, norm",
        "combine, all-reduce in bf16, residual + norm",
    ),
)  # fmt: skip
"""What is compared: together, and apart."""
LINEAR = (2880, 4096)
"""Outputs and inputs of GPT-OSS's output projection."""
ONE_SHOT_MOST = 4 << 20
"""Of the comparison of one shot with two."""
SECTIONS = ("checks", "sizes", "fused", "flashinfer", "names", "late", "killed")
ALIGN_CYCLES = 150_000
CHECK_SPIN = 20_000
"""Most cycles by which ranks are put out of step before a replay."""


def run(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`save` is given the results so far after each section."""
    builds = Builds(FLASHINFER_MODULES if "flashinfer" in arguments.sections.split(",") else ())
    print(f"{build(device_info(0).arch, arguments.ranks)} kernels built", flush=True)
    arguments.flashinfer = builds.wait(arguments.flashinfer_limit)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    os.environ.update(NO_MULTICAST)
    processes = [context.Process(target=_rank, args=(rank, arguments, answers)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    results: dict[str, Any] = {}
    while any(process.is_alive() for process in processes) or not answers.empty():
        if not answers.empty():
            results |= answers.get()
            save(results)
        if any(process.exitcode not in (None, 0, -signal.SIGKILL) for process in processes):
            for process in processes:
                process.terminate()
            sys.exit("a rank failed; what it said is above")
        time.sleep(0.05)
    return results


def build(arch: Arch, ranks: int) -> int:
    """Compile all kernels to disk, by all cores; their number."""
    kernels: dict[jit.Kernel, None] = {}
    for hidden, k in SHAPES:
        sizes = Sizes(ranks, hidden, BF16, MOST_BYTES // (hidden * 2), device_info(0).sms)
        wide = Sizes(ranks, hidden, torch.float32, max(FUSED_ROWS), sizes.sms)
        kernels |= dict.fromkeys((*usual_kernels(arch, sizes), *usual_kernels(arch, wide)))
        kernels |= dict.fromkeys(combine_kernels(arch, sizes, BF16, k, BF16))
    missing = [kernel for kernel in kernels if not jit.cache_path(kernel).exists()]
    if missing:  # each process takes seconds to start
        with ProcessPoolExecutor(
            min(os.cpu_count() or 1, len(missing)), torch.multiprocessing.get_context("spawn")
        ) as pool:
            list(pool.map(jit.build, missing))
    return len(missing)


def _rank(rank: int, arguments: argparse.Namespace, answers: Any) -> None:
    from benchmarks.all_to_all_checks import CheckedBench  # noqa: PLC0415  it derives from `Bench`

    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=arguments.ranks, device_id=device)
        bench = CheckedBench(Control(), device)
        parts: dict[str, Callable[[float], dict[str, Any]]] = {
            "checks": bench.checks, "sizes": bench.sizes, "fused": bench.fused,
            "flashinfer": lambda _: beside_flashinfer(bench, ROWS, arguments.flashinfer),
            "names": lambda _: symmetric_kernels(bench),
            "late": lambda _: late(bench), "killed": lambda _: killed(bench),
        }  # fmt: skip
        for name in arguments.sections.split(","):
            start = time.perf_counter()
            result = parts[name](arguments.budget)
            if rank == 0:
                print(result, f"({time.perf_counter() - start:.0f} s)", flush=True)
                answers.put(result)
            if name != "killed":
                bench.control.meet()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    time.sleep(1.0)  # the queue's pipe
    os._exit(0)  # peers' teardown must not wait for one another


class Bench:
    """One rank's part."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self.control, self.device, self.rank, self.ranks = control, device, control.rank, control.size
        self.memory, self.heap = memory_of(control, device)
        self.ours: dict[tuple[int, str], Any] = {}
        for hidden, _ in SHAPES:
            self.ours[hidden, "ours"] = reduce = self.all_reduce(hidden)
            self.ours[hidden, "one shot"] = _Fixed(self.all_reduce(hidden, ONE_SHOT_MOST), ONE_SHOT_MOST)
            self.ours[hidden, "two shots"] = _Fixed(reduce, 0)
        self.wide = {
            hidden: comm_all_reduce.create(self.memory, hidden=hidden, dtype=torch.float32, max_rows=max(FUSED_ROWS))
            for hidden, _ in SHAPES
        }
        self.token = torch.zeros(1, device=device)
        self.rate, self.link = copy_rate(), link_rate(self.control, device, self.align)

    def all_reduce(self, hidden: int, most: int | None = None) -> AllReduce:
        """With one shot for up to `most` bytes."""
        rows, usual = MOST_BYTES // (hidden * 2), kernels_all_reduce.ONE_SHOT_BYTES
        kernels_all_reduce.ONE_SHOT_BYTES = usual if most is None else usual | {self.ranks: most}
        reduce = comm_all_reduce.create(self.memory, hidden=hidden, dtype=BF16, max_rows=rows)
        kernels_all_reduce.ONE_SHOT_BYTES = usual
        return reduce

    def values(self, shape: tuple[int, ...], seed: int) -> list[Tensor]:
        """What each rank gives: all ranks can make it."""
        made = []
        for rank in range(self.ranks):
            generator = torch.Generator(self.device).manual_seed(1000 * seed + rank)
            made.append(torch.randn(shape, generator=generator, device=self.device).to(BF16))
        return made

    def time(self, call: Callable[[], Any] | None, calls: int = 20) -> float | None:
        """The slowest rank's median; None if it fails on any rank."""
        try:
            mine = None if call is None else time_call(call, calls=calls, replays=40, meet=self.align)
        except Exception as error:
            print(f"rank {self.rank}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            mine = None
        values = self.control.all_gather_objects(mine)
        return None if None in values else max(values)

    def align(self) -> None:
        """On the stream: all GPUs get here at once, and then wait for as long as their hosts need to send the graph."""
        dist.all_reduce(self.token)
        torch.cuda._sleep(ALIGN_CYCLES)

    def meet(self) -> None:
        torch.cuda.synchronize()
        self.control.meet()

    def sizes(self, budget_s: float) -> dict[str, Any]:
        del budget_s
        peers, table = Peers(self, LIBRARIES, {}), []
        for hidden, _ in SHAPES:
            for rows in (*ROWS[hidden], MOST_BYTES // (hidden * 2)):
                x, out = (torch.randn(rows, hidden, device=self.device).to(BF16) for _ in range(2))
                size = x.numel() * 2
                line: dict[str, Any] = {"rows": rows, "hidden": hidden, "KB": size / 1024}
                kinds = ["ours", *(["one shot"] if size <= ONE_SHOT_MOST else [])]
                kinds += ["two shots"] if size >= 1 << 19 else []
                for kind in kinds:
                    line[f"{kind} us"] = self.time(functools.partial(self.ours[hidden, kind], x, out))
                calls = peers.calls(x)
                line |= {name: self.time(call) for name, call in calls.items()}
                crossing = 2 * size * (self.ranks - 1) / self.ranks
                line["GB/s each way"] = crossing / line["ours us"] / 1e3
                line["% of link"] = 100 * crossing / self.link / line["ours us"]
                fastest = min((line[name] for name in calls if line[name]), default=math.nan)
                line["fastest other / ours"] = fastest / line["ours us"]
                table.append(line)
                if self.rank == 0:
                    print(line, flush=True)
        facts = {"copy TB/s": self.rate / 1e6, "NVLink GB/s each way": self.link / 1e3}
        return {"all-reduces beside": str(peers), "all_reduce": table} | facts

    def fused(self, budget_s: float) -> dict[str, Any]:
        """What ends the halves of a layer against the launches that it replaces."""
        del budget_s
        table = []
        for hidden, k in SHAPES:
            weight = torch.randn(hidden, device=self.device).to(BF16)
            for rows in FUSED_ROWS:
                x, residual, out = (torch.randn(rows, hidden, device=self.device).to(BF16) for _ in range(3))
                expert_rows = torch.randn(rows * k, hidden, device=self.device).to(BF16)
                slots = torch.randperm(rows * k, device=self.device).view(rows, k).int()
                slots = torch.where(torch.rand(slots.shape, device=self.device) < 0.5, slots, -1)
                weights, sums = torch.rand(rows, k, device=self.device), torch.empty(rows, hidden, device=self.device)

                calls = self.layer_ends(hidden, x, residual, weight)
                if hidden == LINEAR[0] and rows <= MAX_ROWS:
                    calls |= self.linears(residual)
                calls |= self.combines(hidden, (expert_rows, slots, weights, out), sums, residual, weight)
                line: dict[str, Any] = {"rows": rows, "hidden": hidden}
                line |= {f"{name} us": self.time(call) for name, call in calls.items()}
                for gain, together, apart in GAINS:
                    if together in calls:
                        line[gain] = line[f"{apart} us"] / line[f"{together} us"]
                table.append(line)
                if self.rank == 0:
                    print(line, flush=True)
        return {"fused": table}

    def layer_ends(self, hidden: int, x: Tensor, residual: Tensor, weight: Tensor) -> dict[str, Callable[[], Any]]:
        """Sums over the ranks, added to the residual and normalised."""
        reduce = self.ours[hidden, "ours"]

        def ours() -> Tensor:
            reduce.add(x, residual)
            return rms_norm(residual, weight, EPS)

        def apart() -> Tensor:
            total = residual + reduce(x)
            return torch.nn.functional.rms_norm(total, weight.shape, weight, EPS)

        return {
            "all-reduce + residual": functools.partial(reduce.add, x, residual), "all-reduce + residual, norm": ours,
            "all-reduce, residual + norm": lambda: add_rms_norm(reduce(x), residual, weight, EPS),
            "all-reduce, add, torch norm": apart,
        }  # fmt: skip

    def linears(self, residual: Tensor) -> dict[str, Callable[[], Any]]:
        """An output projection whose inputs are spread over the ranks, added to the residual."""
        hidden, inputs = LINEAR[0], LINEAR[1] // self.ranks
        reduce, x = self.ours[hidden, "ours"], torch.randn(len(residual), inputs, device=self.device).to(BF16)
        # So many that they come from memory, as in a model.
        weights = itertools.cycle(torch.randn(12, hidden, inputs, device=self.device).to(BF16))

        def apart() -> None:
            reduce.add(linear_add(x, next(weights), None, None), residual)

        return {
            "linear + all-reduce + residual": lambda: reduce.add_linear(x, next(weights), None, residual),
            "linear, all-reduce + residual": apart,
        }  # fmt: skip

    def combines(
        self, hidden: int, combined: tuple[Tensor, Tensor, Tensor, Tensor], sums: Tensor, residual: Tensor,
        weight: Tensor,
    ) -> dict[str, Callable[[], Any]]:  # fmt: skip
        """Sums over experts, then over the ranks, in fp32 or rounded between the two."""
        reduce, wide, rows = self.ours[hidden, "ours"], self.wide[hidden], len(sums)
        *source, out = combined

        def apart() -> None:
            combine(*source, sums, tokens=rows)
            out.copy_(wide(sums, sums))

        def rounded() -> Tensor:
            combine(*source, out, tokens=rows)
            return reduce(out, out)

        def layer_end() -> Tensor:
            reduce.combine(*source, residual, tokens=rows, accumulate=True)
            return rms_norm(residual, weight, EPS)

        return {
            "combine + all-reduce": functools.partial(reduce.combine, *source, out, tokens=rows),
            "combine, all-reduce, round": apart, "combine, all-reduce in bf16": rounded,
            "combine + all-reduce + residual, norm": layer_end,
            "combine, all-reduce in bf16, residual + norm": lambda: add_rms_norm(rounded(), residual, weight, EPS),
        }  # fmt: skip


class _Fixed:
    """An `AllReduce` that makes one shot of up to `most` bytes."""

    def __init__(self, reduce: AllReduce, most: int) -> None:
        self.reduce, self._most = reduce, most
        self.check, self.sizes = reduce.check, reduce.sizes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        usual = kernels_all_reduce.ONE_SHOT_BYTES
        kernels_all_reduce.ONE_SHOT_BYTES = usual | {self.sizes.ranks: self._most}
        try:
            return self.reduce(x, out)
        finally:
            kernels_all_reduce.ONE_SHOT_BYTES = usual
