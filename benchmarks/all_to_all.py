"""MoE dispatch and combine, and the all-reduce they share: checked against torch first, then timed in CUDA graphs.

    python -m benchmarks.all_to_all [--out FOLDER] [--budget SECONDS]
        one GPU: dispatch and combine
    python -m benchmarks.all_to_all --ranks 2 [--out FOLDER] [--budget SECONDS]
        2 or more GPUs of one NVLink domain: all-reduce, experts spread over them, ranks that are late or killed;
        then the first GPU alone. `--sections`: some of
        checks,sizes,fused,flashinfer,names,late,killed,local

`--budget` bounds the checks: replays of captured graphs with fresh routing, 2,000 a shape if the time allows. Times are
medians in microseconds a call. The floor is the traffic at this run's copy rate. A failed check ends the run. What
stands beside our all-reduce is named at the head of the results, with the reason for what is missing. Section
`flashinfer` has FlashInfer's two, whose kernels nvcc compiles first: `python -m benchmarks.flashinfer_modules` does it
beforehand. Section `names`: the kernels that NCCL takes for symmetric memory; its profile comes after what is timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.graphs import captured, copy_rate, fill_rate, table, time_call
from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.protocol import AllToAllConfig, Routing
from rose_dist.kernels.moe_combine import combine

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16
REPLAYS = 2000


@dataclass(frozen=True)
class Model:
    """A model's MoE sizes."""

    name: str
    hidden: int
    top_k: int
    experts: int


MODELS = (Model("gpt-oss-120b", 2880, 4, 128), Model("deepseek-v3", 7168, 8, 256))
TOKENS = (1, 8, 32, 64, 128, 512, 4096, 16384)


def fresh_ids(model: Model, tokens: int, skipped: float) -> torch.Tensor:
    """Distinct experts a token; a share of them −1."""
    ids = torch.rand(tokens, model.experts, device=DEVICE).topk(model.top_k, dim=1).indices.int()
    return torch.where(torch.rand(ids.shape, device=DEVICE) < skipped, -1, ids)


class Layer:
    """Dispatch, experts that return what they get, combine; on static tensors, so that it can be captured."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        config = AllToAllConfig(
            num_experts=model.experts, top_k=model.top_k, hidden=model.hidden, max_tokens=tokens, dtype=BF16
        )
        self.moe = Local(config, gpu=GpuOptions(device=DEVICE))
        self.x = torch.randn(tokens, model.hidden, device=DEVICE).to(BF16)
        self.ids = fresh_ids(model, tokens, 0.0)
        self.weights = torch.rand(tokens, model.top_k, device=DEVICE)
        self.rows = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
        self.out = torch.empty_like(self.x)
        self.routing = Routing(self.ids, self.weights)

    def dispatch(self) -> Any:
        return self.moe.dispatch(self.x, self.routing, rows=self.rows)

    def __call__(self) -> None:
        self.dispatched = self.dispatch()
        self.moe.combine(self.dispatched.x, self.dispatched, out=self.out)

    def wrong(self) -> torch.Tensor:
        """Whether the last replay left a wrong element anywhere, as a tensor: nothing is read on the host."""
        k, live = self.model.top_k, torch.arange(self.tokens, device=DEVICE) < self.rows
        keys = torch.where(live[:, None] & (self.ids >= 0), self.ids, self.model.experts).flatten().long()
        order = keys.argsort(stable=True)
        held = keys[order] < self.model.experts
        packed = self.dispatched.x[: keys.numel()]
        bad = ((packed.view(torch.int16) != self.x[order // k].view(torch.int16)) & held[:, None]).any()
        counts = torch.zeros(self.model.experts + 1, dtype=torch.int64, device=DEVICE).scatter_add_(
            0, keys, torch.ones_like(keys)
        )
        bad |= (self.dispatched.counts != counts[:-1]).any()
        total = torch.zeros(self.x.shape, device=DEVICE)
        for j in range(k):
            product = self.weights[:, j, None] * self.x.float()
            total = torch.where(self.ids[:, j, None] >= 0, total + product, total)
        return bad | ((self.out.view(torch.int16) != total.to(BF16).view(torch.int16)) & live[:, None]).any()


def check(model: Model, tokens: int, budget_s: float) -> dict[str, Any]:
    """Replays one graph with fresh routing, weights and bounds over poisoned buffers."""
    layer = Layer(model, tokens)
    graph = captured(layer)
    bad = torch.zeros((), dtype=torch.bool, device=DEVICE)
    until, replays = time.perf_counter() + budget_s, 0
    while replays < REPLAYS and time.perf_counter() < until:
        if replays % 5 == 4:  # duplicates
            layer.ids.random_(-1, model.experts)
        else:
            layer.ids.copy_(fresh_ids(model, tokens, (0.0, 0.2, 0.0, 1.0)[replays % 4]))
        layer.weights.uniform_()
        layer.rows.random_(0, tokens + 1)
        layer.dispatched.x.fill_(torch.nan)
        layer.out.fill_(torch.nan)
        graph.replay()
        bad |= layer.wrong()
        replays += 1
        if replays % 50 == 0:
            torch.cuda.synchronize()
            layer.moe.check()
    if bad.item():
        sys.exit(f"WRONG RESULT: {model.name}, {tokens} tokens, within {replays} replays")
    return {"model": model.name, "tokens": tokens, "replays": replays, "wrong": 0}


def times(model: Model, tokens: int, rate: float) -> dict[str, Any]:
    layer = Layer(model, tokens)
    k, row = model.top_k, model.hidden * 2
    dispatched = layer.dispatch()
    packed = dispatched.handle.packed
    rows, out = packed.x.clone(), layer.out

    def torch_dispatch() -> Any:
        order = layer.ids.flatten().argsort(stable=True)
        return layer.x.index_select(0, order // k)

    slots = packed.slots.flatten().clamp(min=0)

    def torch_combine() -> Any:
        return (rows.index_select(0, slots).view(tokens, k, -1) * layer.weights[:, :, None]).sum(1)

    def ours_combine() -> None:
        combine(rows, packed.slots, layer.weights, out, tokens=tokens, live_rows=layer.rows)

    combining = time_call(ours_combine)
    peer_combining = time_call(torch_combine, calls=4)
    del dispatched
    moved = tokens * row * (k + 1)
    dispatching = time_call(layer.dispatch)
    return {
        "model": model.name, "tokens": tokens, "dispatch us": dispatching,
        "torch sort + gather us": time_call(torch_dispatch, calls=4), "combine us": combining,
        "torch gather + sum us": peer_combining, "floor us": moved / rate,
        "dispatch % of copy rate": 100 * moved / rate / dispatching,
        "combine % of copy rate": 100 * moved / rate / combining,
    }  # fmt: skip


def checked(sizes: list[tuple[Model, int]], budget_s: float) -> list[dict[str, Any]]:
    checks = []
    for model, tokens in sizes:
        checks.append(check(model, tokens, budget_s / len(sizes)))
        print(checks[-1], flush=True)
    return checks


def timed(sizes: list[tuple[Model, int]]) -> dict[str, Any]:
    rate, filled = copy_rate(), fill_rate()
    print(f"copy rate {rate / 1e6:.2f} TB/s, of a fill {filled / 1e6:.2f}", flush=True)
    rows = []
    for model, tokens in sizes:
        rows.append(times(model, tokens, rate))
        print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    return {"copy TB/s": rate / 1e6, "fill TB/s": filled / 1e6, "local": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for the checks")
    parser.add_argument("--sections", default="", help="with several ranks: names, with commas; all")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of the one GPU's rows")
    parser.add_argument("--flashinfer-limit", type=float, default=40.0, help="seconds that its kernels may compile")
    arguments = parser.parse_args()
    on_one = [(model, tokens) for model in MODELS for tokens in arguments.tokens]
    results: dict[str, Any]
    if arguments.ranks == 1:
        results = {"checks": checked(on_one, arguments.budget)} | timed(on_one)
    else:
        from benchmarks import all_to_all_ranks  # noqa: PLC0415  starts processes

        sections = (arguments.sections or ",".join((*all_to_all_ranks.SECTIONS, "local"))).split(",")
        arguments.sections = ",".join(name for name in sections if name != "local")
        save = functools.partial(write, arguments=arguments)
        results = all_to_all_ranks.run(arguments, save) if arguments.sections else {}
        if "local" in sections:
            results |= timed(on_one)
    print(write(results, arguments).read_text())


def write(results: dict[str, Any], arguments: argparse.Namespace) -> Path:
    """The table for people; the numbers for programs are beside it."""
    results = dict(results)
    results["gpu"] = torch.cuda.get_device_name(0)
    results["torch"] = torch.__version__
    query = ("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader")
    results["driver and clocks"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"all_to_all_{arguments.ranks}"
    (arguments.out / f"{name}.json").write_text(json.dumps(results, indent=1))
    tables = [f"## {key}\n\n{table(value)}" for key, value in results.items() if isinstance(value, list)]
    facts = [f"- {key}: {value}" for key, value in results.items() if not isinstance(value, list)]
    path = arguments.out / f"{name}.md"
    path.write_text("\n".join([*facts, "", *tables]))
    return path


if __name__ == "__main__":
    main()
