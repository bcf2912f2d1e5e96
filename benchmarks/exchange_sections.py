"""What exchange.py measures: a rank's part of every section."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.all_to_all_ranks import ALIGN_CYCLES, CHECK_SPIN
from benchmarks.exchange_layers import BF16, MODELS, Layer, Model, varied
from benchmarks.exchange_vdev import vdev
from benchmarks.gpu_ranks import Control, link_rate, memory_of
from benchmarks.graphs import captured, time_call
from rose_dist.kernels import jit, launch
from rose_dist.kernels.arch import Arch, device_info
from rose_dist.kernels.exchange_kernels import ExchangeKernels
from rose_dist.kernels.exchange_order import order_kernel
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.formats import FP8
from rose_dist.kernels.probe import MOVES, PEER_WAYS, PeerCopies
from rose_dist.kernels.quantize import quantize
from rose_dist.kernels.sync import WaitExpiredError

TOKENS = (1, 8, 32, 64, 128, 4096)
CHECKED = (1, 7, 64, 128, 600)
REPLAYS = 1024
STEPS = 512
CHAINED = (1, 8, 64, 128)
FORMS = (16, 32, 64, 128, 256)
SECTIONS = ("checks", "times", "chain", "dead")
PARTIAL = {"partial_sums": True}
AS_PACKETS, AS_ROWS = {"most_result_packet_bytes": 1 << 40}, {"most_result_packet_bytes": 0}
CHUNKS = ({"chunk": 8}, {"chunk": 16})
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "checks": ({}, PARTIAL), "times": ({}, PARTIAL), "chain": ({}, PARTIAL),
    "forms": (AS_PACKETS, AS_ROWS, AS_PACKETS | PARTIAL, AS_ROWS | PARTIAL),
    "prefill": (*CHUNKS, *(chunk | PARTIAL for chunk in CHUNKS)), "flashinfer": (PARTIAL,),
}  # fmt: skip
"""Layouts of each section; of the others, the usual one."""
MOST_TOKENS = {"forms": max(FORMS), "dead": 8}
"""That each section's layouts are built for."""
SHARES = (0.1, 0.17, 0.25, 0.33, 0.5)
"""Of the blocks, that send."""
BLOCKS = (8, 16, 24, 33, 44, 66, 132)
"""That copy to the next rank."""
HEAP = 16 << 30


class Rank:
    """One rank's part."""

    def __init__(self, device: torch.device, models: list[Model], tokens: tuple[int, ...]) -> None:
        self.control, self.device, self.models, self._tokens = Control(), device, models, tokens
        self.rank, self.ranks = self.control.rank, self.control.size
        self.sms = min(self.control.all_gather_objects(device_info(device.index).sms))
        self.token = torch.zeros(1, device=device)
        self._layers: dict[Any, Layer] = {}
        self.rate = link_rate(self.control, device, self.align)

    @functools.cached_property
    def memory(self) -> Any:
        """Collective at its first use."""
        memory, name = memory_of(self.control, self.device, HEAP)
        self.say(f"symmetric memory: {name}")
        return memory

    def say(self, value: Any) -> None:
        if self.rank == 0:
            print(value, flush=True)

    def layer(self, model: Model, section: str, changes: dict[str, Any] | None = None) -> Layer:
        """For as many tokens as the section may need. All are kept: their symmetric memory can't be given back."""
        most, changes = MOST_TOKENS.get(section, max(TOKENS)), changes or {}
        key = (model, most, *changes.items())
        if key not in self._layers:
            self._layers[key] = Layer(model, most, self.control, self.device, self.memory.take, self.sms, changes)
        return self._layers[key]

    def sizes(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        return self._tokens or usual

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

    # --- Checks -------------------------------------------------------------------------------------------------------

    def checks(self, budget_s: float) -> list[dict[str, Any]]:
        """Graph replays and eager halves with fresh routing, bounds and random delays, to the bit."""
        rows = []
        for model in self.models:
            sizes = self.sizes(CHECKED)
            for changes in VARIANTS["checks"]:
                layer = self.layer(model, "checks", changes)
                for tokens in sizes:
                    for name in ("one launch", "halves"):
                        share = budget_s / len(self.models) / len(sizes) / 4
                        rows.append(self.check(layer.resized(tokens), name, share))
                        self.say(rows[-1])
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
        line = {"model": layer.model.name, "back": layer.back, "tokens": layer.tokens, "how": name, "replays": count}
        return line | {"wrong": problem or 0}

    # --- Times --------------------------------------------------------------------------------------------------------

    def times(self, budget_s: float) -> list[dict[str, Any]]:
        del budget_s
        rows = []
        for model in self.models:
            layers = [self.layer(model, "times", changes) for changes in VARIANTS["times"]]
            for tokens in self.sizes(TOKENS):
                others = {
                    name: self.time(call, 20 if tokens <= 256 else 4)
                    for name, call in self.others(layers[0].resized(tokens)).items()
                }
                for layer in layers:
                    rows.append(self.line(layer.resized(tokens)) | others)
                    self.say(rows[-1])
                    layer.moe.check()
        return rows

    def line(self, layer: Layer) -> dict[str, Any]:
        calls = 20 if layer.tokens <= 256 else 4
        floors = [max(self.control.all_gather_objects(size)) / self.rate for size in layer.moved()]
        line: dict[str, Any] = {"model": layer.model.name, "back": layer.back, "tokens": layer.tokens}
        dispatch, pair = self.time(layer.dispatch, calls), self.time(layer.exchange, calls)
        line |= {"dispatch us": dispatch, "combine us": None if None in (dispatch, pair) else pair - dispatch}  # type: ignore[operator]
        line |= {"pair us": pair, "dispatch floor us": floors[0], "combine floor us": floors[1]}
        if pair:
            line["pair % of link rate"] = 100 * sum(floors) / pair
            line["pair - 1.5 floors us"] = pair - 1.5 * sum(floors)
        return line

    def forms(self, budget_s: float) -> list[dict[str, Any]]:
        """From where on results should come back as plain rows, and what it saves to quantise on the way."""
        del budget_s
        rows = []
        for model in self.models:
            for changes in VARIANTS["forms"]:
                layer = self.layer(model, "forms", changes)
                packets = changes["most_result_packet_bytes"] > 0
                for tokens in self.sizes(FORMS):
                    results = {"results": "packets" if packets else "plain rows"}
                    rows.append(results | self.line(layer.resized(tokens)))
                    if model.fused and changes is AS_ROWS:
                        rows[-1]["quantise us"] = self.time(
                            functools.partial(quantize, layer.resized(tokens).inputs.x, FP8)
                        )
                    self.say(rows[-1])
                    layer.moe.check()
        return rows

    def prefill(self, budget_s: float) -> list[dict[str, Any]]:
        """How rows travel best, and sending and taking are best shared out."""
        del budget_s
        rows = []
        for model in self.models:
            for changes in VARIANTS["prefill"]:
                layer = self.layer(model, "prefill", changes)
                exchange, chunk = layer.moe.exchange, layer.moe.layout.chunk
                usual = exchange.pushers
                arms = [(int(self.sms * share),) * 2 for share in SHARES]
                for tokens, pushers in product(self.sizes((max(TOKENS),)), [*arms, usual]):
                    exchange.pushers = pushers
                    arm = {"chunk": chunk, "blocks that send": str(pushers)}
                    rows.append(arm | self.line(layer.resized(tokens)))
                    self.say(rows[-1])
                    layer.moe.check()
                exchange.pushers = usual
        return rows

    def links(self, budget_s: float) -> list[dict[str, Any]]:
        """What blocks can do on the links while all ranks do the same: copies to or from the next rank."""
        del budget_s
        rows, count = [], (64 << 20) // MOVES.row_bytes
        region = self.memory.take(2 * count * MOVES.row_bytes)
        near, far = (region.addresses[(self.rank + i) % self.ranks] for i in range(2))
        for blocks in BLOCKS:
            line: dict[str, Any] = {"blocks": blocks}
            for way in PEER_WAYS:
                source, target = (far, near) if "loads" in way else (near, far)
                arguments = source, target + count * MOVES.row_bytes, count, blocks
                kernel = jit.load(PeerCopies(device_info(self.device.index).arch, way))
                call = functools.partial(launch.run, kernel, self.token, *arguments)
                took = self.time(call, 4)
                line[f"{way} GB/s"] = None if took is None else count * MOVES.row_bytes / took / 1e3
                line[f"{way} % of copies"] = None if took is None else 100 * count * MOVES.row_bytes / took / self.rate
            rows.append(line)
            self.say(line)
        return rows

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
        del budget_s
        return vdev(self)

    # --- A free-running chain -----------------------------------------------------------------------------------------

    def chain(self, budget_s: float) -> list[dict[str, Any]]:
        """Dispatch, a copy in place of the experts, combine: step after step with nothing that aligns the ranks."""
        del budget_s
        rows = []
        for model in self.models:
            for changes, tokens in product(VARIANTS["chain"], self.sizes(CHAINED)):
                layer = self.layer(model, "chain", changes).resized(tokens)
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
                    "model": model.name, "back": layer.back, "tokens": tokens, "steps": STEPS, "p50 us": p50,
                    "p99 us": p99, "p99 / p50": p99 / p50,
                })  # fmt: skip
                self.say(rows[-1])
        return rows

    def dead(self, budget_s: float) -> str:
        """The last rank misses a dispatch: the others must say so, and soon. Nothing may follow on that layer."""
        del budget_s
        layer = self.layer(MODELS[0], "dead")
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


def build_kernels(arch: Arch, sections: Iterable[str], models: list[Model], ranks: int) -> int:
    """All that the sections' layers load, compiled to disk by as many processes as there are cores; their number."""
    kernels: dict[jit.Kernel, None] = {}
    for section in sections:
        if section == "links":
            kernels |= dict.fromkeys(PeerCopies(arch, way) for way in PEER_WAYS)
        for model in {"dead": [MODELS[0]], "vdev": [], "links": []}.get(section, models):
            config = model.config(MOST_TOKENS.get(section, max(TOKENS)))
            for changes in VARIANTS.get(section, ({},)):
                layout = varied(config, ranks, 1, changes)
                kernels |= dict.fromkeys(ExchangeKernels(arch, layout, PackedLayout(), config.expert_dtype).usual())
                if layout.has_rows:
                    kernels[order_kernel(arch, layout)] = None
    context = torch.multiprocessing.get_context("spawn")
    missing = [kernel for kernel in kernels if not jit.cache_path(kernel).exists()]
    if missing:  # each process takes seconds to start
        with ProcessPoolExecutor(min(os.cpu_count() or 1, len(missing)), context) as pool:
            list(pool.map(jit.build, missing))
    return len(missing)
