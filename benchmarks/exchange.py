"""Dispatch and combine between data-parallel GPUs of one NVLink domain: checked to the bit, then timed beside others.

    python -m benchmarks.exchange --ranks 2 [--out FOLDER] [--budget SECONDS] [--sections checks,times,chain,dead]

Starts one process a GPU. Every line is printed when it is known, and the results so far are written after each section,
so that a section that fails loses no other. Section `vdev`, torch's all_to_all_vdev_2d, wants NVSHMEM for itself: run
it alone. `--budget` bounds the checks. Times are medians of CUDA graph replays in microseconds, of the slowest rank;
combine is the pair's time less dispatch's. The floor is the bytes that must cross NVLink at the rate that this run's
own copies reach, both ways at once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.all_to_all_ranks import ALIGN_CYCLES, CHECK_SPIN, Control, memory_of
from benchmarks.exchange_layers import BF16, MODELS, Inputs, Layer, Model
from benchmarks.graphs import captured, table, time_call
from rose_dist.kernels.arch import device_info
from rose_dist.kernels.sync import WaitExpiredError

TOKENS = (1, 8, 32, 64, 128, 4096)
CHECKED = (1, 7, 64, 128, 600)
REPLAYS = 1024
STEPS = 512
SECTIONS = ("checks", "times", "chain", "dead")


class Rank:
    """One rank's part."""

    def __init__(self, device: torch.device) -> None:
        self.control, self.device = Control(), device
        self.rank, self.ranks = self.control.rank, self.control.size
        self.sms = min(self.control.all_gather_objects(device_info(device.index).sms))
        self.token = torch.zeros(1, device=device)
        self.rate = self.link_rate()

    @functools.cached_property
    def memory(self) -> Any:
        """Collective at its first use."""
        memory, name = memory_of(self.control, self.device)
        self.say(f"symmetric memory: {name}")
        return memory

    def say(self, value: Any) -> None:
        if self.rank == 0:
            print(value, flush=True)

    def layer(self, model: Model, tokens: int) -> Layer:
        return Layer(model, tokens, self.control, self.device, self.memory.take, self.sms)

    def align(self) -> None:
        """On the stream: all GPUs get here at once, then wait for as long as their hosts need to send the graph."""
        dist.all_reduce(self.token)
        torch.cuda._sleep(ALIGN_CYCLES)

    def time(self, call: Callable[[], Any], calls: int = 20) -> float | None:
        """The slowest rank's median; None if it fails on any rank."""
        try:
            mine: float | None = time_call(call, calls=calls, replays=40, meet=self.align)
        except Exception as error:
            print(f"rank {self.rank}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            mine = None
        values = self.control.all_gather_objects(mine)
        return None if None in values else max(values)

    def link_rate(self, size: int = 256 << 20) -> float:
        """Bytes a microsecond of a copy to the next GPU while every GPU does so."""
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", (self.rank + 1) % self.ranks))
        torch.cuda.synchronize()
        samples = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.align()
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3)
        rate = size / statistics.median(samples[2:])
        return float(min(self.control.all_gather_objects(rate)))

    # --- Checks -------------------------------------------------------------------------------------------------------

    def checks(self, budget_s: float) -> list[dict[str, Any]]:
        """Graph replays and eager halves with fresh routing, bounds and random delays, to the bit."""
        rows = []
        for model in MODELS:
            layer = self.layer(model, max(CHECKED))
            for tokens in CHECKED:
                for name in ("one launch", "halves"):
                    share = budget_s / len(MODELS) / len(CHECKED) / 2
                    rows.append(self.check(layer.resized(tokens), name, share))
                    self.say(rows[-1])
            del layer
            torch.cuda.empty_cache()
        return rows

    def check(self, layer: Layer, name: str, budget_s: float) -> dict[str, Any]:
        call = layer if name == "one launch" else layer.apart
        graph = captured(call)
        problem, start, count = "", time.perf_counter(), 0
        while count < REPLAYS and not problem:
            for _ in range(25):
                everyone = layer.refill(count)
                torch.cuda._sleep(int(torch.randint(CHECK_SPIN, ())))
                graph.replay()
                problem = problem or layer.wrong(everyone)
                count += 1
            layer.moe.check()
            said = self.control.all_gather_objects((problem, time.perf_counter() - start > budget_s))
            problem = next((text for text, _ in said if text), "")
            if any(over for _, over in said):
                break
        line = {"model": layer.model.name, "tokens": layer.tokens, "how": name, "replays": count}
        return line | {"wrong": problem or 0}

    # --- Times --------------------------------------------------------------------------------------------------------

    def times(self, budget_s: float) -> list[dict[str, Any]]:
        del budget_s
        rows = []
        for model in MODELS:
            layer = self.layer(model, max(TOKENS))
            for tokens in TOKENS:
                rows.append(self.line(layer.resized(tokens)))
                self.say(rows[-1])
                layer.moe.check()
            del layer
            torch.cuda.empty_cache()
        return rows

    def line(self, layer: Layer) -> dict[str, Any]:
        calls = 20 if layer.tokens <= 128 else 4
        floors = [max(self.control.all_gather_objects(size)) / self.rate for size in layer.moved()]
        line: dict[str, Any] = {"model": layer.model.name, "tokens": layer.tokens}
        dispatch, pair = self.time(layer.dispatch, calls), self.time(layer.exchange, calls)
        line |= {"dispatch us": dispatch, "combine us": None if None in (dispatch, pair) else pair - dispatch}  # type: ignore[operator]
        line |= {"pair us": pair, "pair floor us": sum(floors)}
        if pair:
            line["pair % of link rate"] = 100 * sum(floors) / pair
        for name, call in self.others(layer).items():
            line[name] = self.time(call, calls)
        return line

    def others(self, layer: Layer) -> dict[str, Callable[[], Any]]:
        """NCCL with rows of the same sizes: whole exchanges, but no ordering by expert and no weighting."""
        model, tokens, ranks = layer.model, layer.tokens, self.ranks
        x = layer.inputs.x.view(torch.uint8)
        sent = x.repeat(ranks, 1)
        received = torch.empty_like(sent)
        results = torch.zeros(tokens * model.top_k, model.hidden, dtype=BF16, device=self.device)
        results = results[: len(results) // ranks * ranks] if len(results) >= ranks else results.repeat(ranks, 1)
        returned = torch.empty_like(results)
        gathered = torch.zeros(ranks * tokens, model.hidden, dtype=BF16, device=self.device)
        scattered = torch.zeros(tokens, model.hidden, dtype=BF16, device=self.device)

        def all_to_all() -> None:
            dist.all_to_all_single(received, sent)
            dist.all_to_all_single(returned, results)

        def gather_scatter() -> None:
            dist.all_gather_into_tensor(received, x)
            dist.reduce_scatter_tensor(scattered, gathered)

        return {"NCCL all-to-all pair us": all_to_all, "NCCL gather + scatter us": gather_scatter}

    def vdev(self, budget_s: float) -> list[dict[str, Any]]:
        """torch's symmetric-memory dispatch (not its combine), a row a pair, in bf16."""
        del budget_s
        import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415

        symmetric.set_backend("NVSHMEM")
        operation, name = torch.ops.symm_mem.all_to_all_vdev_2d, dist.group.WORLD.group_name  # type: ignore[union-attr]
        rows = []
        for model in (MODELS[0], MODELS[2]):
            for tokens in TOKENS:
                pairs, local = tokens * model.top_k, model.experts // self.ranks
                x = symmetric.empty(pairs, model.hidden, dtype=BF16, device=self.device)
                out = symmetric.empty(pairs * self.ranks, model.hidden, dtype=BF16, device=self.device)
                splits = symmetric.empty(model.experts, dtype=torch.int64, device=self.device)
                both = symmetric.empty(2, self.ranks * local, dtype=torch.int64, device=self.device)
                for tensor in (x, out, splits, both):
                    symmetric.rendezvous(tensor, name)
                ids = Inputs.of(model, tokens, self.rank, 0, self.device, whole=True).ids
                splits.copy_(torch.bincount(ids.flatten().long(), minlength=model.experts))
                call = functools.partial(operation, x, out, splits, both, name)
                line = {"model": model.name, "tokens": tokens, "dispatch us": self.time(call)}
                rows.append(line)
                self.say(line)
        return rows

    # --- A free-running chain -----------------------------------------------------------------------------------------

    def chain(self, budget_s: float) -> list[dict[str, Any]]:
        """Dispatch, a copy in place of the experts, combine: step after step with nothing that aligns the ranks."""
        del budget_s
        rows = []
        for model in MODELS:
            for tokens in (1, 8, 64, 128):
                layer = self.layer(model, tokens)
                graph = captured(layer)
                self.control.meet()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
                torch.cuda._sleep(50 * ALIGN_CYCLES)  # the host gets ahead
                for event in events[:-1]:
                    event.record()
                    graph.replay()
                events[-1].record()
                torch.cuda.synchronize()
                layer.moe.check()
                steps = sorted(a.elapsed_time(b) * 1e3 for a, b in pairwise(events[16:]))
                said = self.control.all_gather_objects((statistics.median(steps), steps[int(len(steps) * 0.99)]))
                p50, p99 = (max(values) for values in zip(*said, strict=True))
                rows.append({
                    "model": model.name, "tokens": tokens, "steps": STEPS, "p50 us": p50, "p99 us": p99,
                    "p99 / p50": p99 / p50,
                })  # fmt: skip
                self.say(rows[-1])
        return rows

    def dead(self, budget_s: float) -> str:
        """The last rank misses a dispatch: the others must say so, and soon. Nothing may follow on that layer."""
        del budget_s
        layer = self.layer(MODELS[0], 8)
        layer.moe.exchange._wait = (layer.moe.exchange.report.address, 300_000_000, self.rank)
        layer()
        torch.cuda.synchronize()
        self.control.meet()
        message, seconds = "", 0.0
        if self.rank < self.ranks - 1:
            start = time.perf_counter()
            layer.dispatch()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            try:
                layer.moe.check()
            except WaitExpiredError as error:
                message = str(error)
        said = self.control.all_gather_objects((message, seconds))
        missed = [rank for rank, (text, _) in enumerate(said[:-1]) if not text]
        return f"NOT NOTICED by ranks {missed}" if missed else f"{said[0][0]} (after {said[0][1]:.2f} s)"


def work(rank: int, arguments: argparse.Namespace, answers: Any) -> None:
    """A rank's process: each section's result, or what went wrong in it, as soon as it is known."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=120)
    dist.init_process_group("nccl", rank=rank, world_size=arguments.ranks, device_id=device, timeout=limit)
    try:
        one = Rank(device)
        answers.put({"NVLink GB/s each way": one.rate / 1e3})
        for section in arguments.sections.split(","):
            try:
                result: Any = getattr(one, section)(arguments.budget)
            except Exception:
                traceback.print_exc()
                result = f"FAILED on rank {rank}: {traceback.format_exc(limit=1)}"
            outcome = one.control.all_gather_objects(isinstance(result, str) and result.startswith("FAILED"))
            if rank == 0 or (isinstance(result, str) and result.startswith("FAILED")):
                print(section, "done" if not any(outcome) else "failed", flush=True)
                answers.put({section: result})
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    time.sleep(1.0)  # the queue's pipe
    os._exit(0)  # peers' teardown must not wait for one another


def write(results: dict[str, Any], folder: Path, ranks: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"exchange_{ranks}.json").write_text(json.dumps(results, indent=1))
    tables = [f"## {key}\n\n{table(value)}" for key, value in results.items() if isinstance(value, list)]
    facts = [f"- {key}: {value}" for key, value in results.items() if not isinstance(value, list)]
    (folder / f"exchange_{ranks}.md").write_text("\n".join([*facts, "", *tables]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for the checks")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    arguments = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    processes = [context.Process(target=work, args=(rank, arguments, answers)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    save = functools.partial(write, results, arguments.out, arguments.ranks)
    while any(process.is_alive() for process in processes) or not answers.empty():
        if not answers.empty():
            results.update(answers.get())
            save()
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(2.0)
            while not answers.empty():
                results.update(answers.get())
            for process in processes:
                process.terminate()
            results["failed"] = "a rank ended; what it said is above"
            break
        time.sleep(0.05)
    save()
    wrong = [line for line in results.get("checks", ()) if isinstance(line, dict) and line["wrong"]]
    print((arguments.out / f"exchange_{arguments.ranks}.md").read_text())
    if wrong or "failed" in results or not isinstance(results.get("checks", []), list):
        sys.exit(f"WRONG OR FAILED: {wrong or 'see above'}")


if __name__ == "__main__":
    main()
