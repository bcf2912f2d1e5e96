"""What the host does to launch a step of GPT-OSS kernel by kernel, as prefills and mixed steps are.

    python -m benchmarks.host_overhead [--tokens 128 1024] [--decodes 0] [--moe-activations fp8] [--profile]
        [--out FOLDER]

Microseconds a layer: the difference of models of two depths, so that what a step does once falls out. On a GPU nothing
is waited for within a pass: the time is that of the calls alone. Without one a tiny model's tensors pass for a GPU's,
launches of kernels end before the driver, and torch's operations run on the CPU, but for matrix products and flash
attention, which are left out: each then lacks a launch's 2 to 3 us, and these their library's share. A GPU also prints
what a layer costs in prefill graphs.
Weights are random, experts few: neither changes what the host does.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import json
import logging
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.graphs import table
from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.paged_planner import PagedPlanner
from rose_dist.engine.prefill_graphs import PrefillGraphs
from rose_dist.engine.runner import ModelRunner
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.kernels import jit, launch, paged_prefill
from rose_dist.kernels.arch import HOPPER, DeviceInfo
from rose_dist.kernels.paged_attention import DecodeWorkspace
from rose_dist.layers.expert_matrices import MoeActivations
from rose_dist.layers.forward_batch import ForwardBatch
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.gpt_oss import GptOssForCausalLM
from rose_dist.models.gpt_oss_config import GptOssConfig
from rose_dist.models.presets import PRESETS
from rose_dist.models.random_weights import fill_randomly

DEPTHS = (4, 12)
"""Layers. The deeper pass has some 300 launches: the driver's queue holds 1,024."""
BLOCK = 16


@contextmanager
def no_gpu() -> Iterator[list[str]]:
    """All tensors are taken for a GPU's. Gives the names of the kernels launched within."""
    launched: list[str] = []

    def load(kernel: jit.Kernel) -> jit.Launcher:
        name = type(kernel).__name__
        return lambda *arguments: launched.append(name)

    def flash(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], device=q.device)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_empty(x.shape[0], weight.shape[0])

    # Functions, since mocks take long to be called.
    info = DeviceInfo(HOPPER, 132)

    def describe(index: int) -> DeviceInfo:
        return info

    def stream(index: int) -> int:
        return 0

    def current() -> int:
        return -1

    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(jit, "load", load),
        mock.patch.object(launch, "device_info", describe),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", stream, create=True),
        mock.patch.object(torch._C, "_cuda_getDevice", current, create=True),
        mock.patch.object(paged_prefill, "_flash", flash),
        mock.patch.object(torch.nn.functional, "linear", linear),
    ):
        yield launched


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


TINY = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


class Pass:
    """A model of so many layers, and the calls that launch one step of it."""

    def __init__(
        self, layers: int, device: torch.device, tokens: int, decodes: int, activations: MoeActivations
    ) -> None:
        preset = PRESETS["gpt-oss-120b"] | {"num_hidden_layers": layers, "num_experts": 16, "vocab_size": 1024}
        preset = preset | (TINY if device.type == "cpu" else {})
        sizes = EngineConfig(
            Path(), device=device, dtype="bfloat16", kv_tokens=4 * tokens + 32 * BLOCK * decodes,
            max_step_tokens=tokens + decodes, max_running=max(decodes, 1), max_context=8192,
        )  # fmt: skip
        options = BuildOptions(
            World.join(log_level=logging.WARNING).groups(Layout.of(1)), tokens + decodes, torch.bfloat16, device,
            "mxfp4", moe_activations=activations,
        )  # fmt: skip
        self.model = GptOssForCausalLM(GptOssConfig.from_json(preset), options)
        fill_randomly(self.model)
        self.runner = ModelRunner(self.model, sizes)
        if device.type == "cpu":
            self._pass_for_gpu()
        blocks = list(range(-(-tokens // BLOCK)))
        sequences = [SequenceStep([1], 20, [(0, [2 * i, 2 * i + 1])] * 2, True) for i in range(decodes)]
        self.step = Step([*sequences, SequenceStep([1] * tokens, 0, [(0, blocks)] * 2, True)])
        self.batch: ForwardBatch
        self.batch, self.numbers = self.runner._numbered_batch(self.step, self.step.token_count)

    def _pass_for_gpu(self) -> None:
        """Plan and exchange as on a GPU."""
        group, sizes = self.model.kv_groups[0], self.runner.config
        workspace = DecodeWorkspace.allocate(
            requests=sizes.max_running, query_heads=self.model.query_heads, key_heads=group.key_heads,
            head_dim=group.head_dim, context=8192, device=sizes.device,
        )  # fmt: skip
        self.runner._planners = [
            PagedPlanner(number, spec.window, BLOCK, storage, self.runner._inputs, workspace)
            for number, (spec, storage) in enumerate(zip(self.runner.specs, self.runner.storages, strict=True))
        ]
        exchange = Local(self.model.model.exchange.config, gpu=GpuOptions(device=sizes.device))
        for block in self.model.moe_layers:
            block.exchange = exchange

    @torch.inference_mode()
    def __call__(self) -> None:
        self.model(self.batch)

    def graphed(self) -> Callable[[], None]:
        """The same step by prefill graphs in pieces, captured here."""
        sizes = (self.step.token_count,)
        graphs = PrefillGraphs(self.model, self.runner.storages, self.runner.sampled, sizes, BLOCK)
        graphs.capture()

        @torch.inference_mode()
        def run() -> None:
            graphs.run(self.batch, self.numbers)

        return run

    @torch.inference_mode()
    def plan(self) -> None:
        self.runner._batch(self.step)


def micros(call: Callable[[], None], synchronise: Callable[[], None], rounds: int = 100) -> float:
    """The least processor time that `call` takes in this thread: other work on the machine does not count."""
    samples = []
    gc.disable()
    for _ in range(rounds):
        synchronise()
        begun = time.thread_time()
        call()
        samples.append((time.thread_time() - begun) * 1e6)
    gc.enable()
    return min(samples)


def operations(call: Callable[[], None]) -> Counter[str]:
    with Operations() as counted:
        call()
    return counted.counts


def measure(
    device: torch.device, tokens: int, decodes: int, activations: MoeActivations, launched: list[str], profiled: bool
) -> dict[str, Any]:
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    shallow, deep = (Pass(layers, device, tokens, decodes, activations) for layers in DEPTHS)
    layers = DEPTHS[1] - DEPTHS[0]
    first, second = micros(shallow, synchronise), micros(deep, synchronise)
    counts = operations(deep)
    counts.subtract(operations(shallow))
    row = {
        "tokens": tokens, "decodes": decodes, "us a layer": (second - first) / layers,
        "us besides": first - DEPTHS[0] * (second - first) / layers, "us to plan": micros(shallow.plan, synchronise),
        "torch operations a layer": sum(counts.values()) / layers,
    }  # fmt: skip
    if device.type == "cuda":
        first, second = (micros(step.graphed(), synchronise) for step in (shallow, deep))
        row["us a layer with prefill graphs"] = (second - first) / layers
    print(", ".join(f"{name} {n / layers:g}" for name, n in counts.most_common() if n))
    if device.type == "cpu":
        launched.clear()
        deep()
        kernels = Counter(launched)
        row["kernels a layer"] = sum(n // DEPTHS[1] for n in kernels.values())
        print(", ".join(f"{name} {n // DEPTHS[1]}" for name, n in kernels.items() if n >= DEPTHS[1]))
    if profiled:
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(20):
            deep()
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--decodes", nargs="+", type=int, default=[0, 8])
    parser.add_argument("--moe-activations", choices=get_args(MoeActivations), default="bf16")
    parser.add_argument("--profile", action="store_true", help="also print where Python spends the time")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    real = torch.cuda.is_available()
    device = torch.device("cuda", 0) if real else torch.device("cpu")
    rows = []
    with nullcontext([]) if real else no_gpu() as launched:
        for tokens, decodes in itertools.product(arguments.tokens, arguments.decodes):
            activations = arguments.moe_activations
            rows.append(measure(device, tokens, decodes, activations, launched, arguments.profile))
    print(table(rows))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "host_overhead.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
