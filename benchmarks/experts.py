"""GPT-OSS's MXFP4 expert layers with few rows on one GPU: checked against fp32 first, then timed in CUDA graphs. Those
with many: `expert_gemms.py`.

    python -m benchmarks.experts [--models gpt-oss-120b gpt-oss-20b] [--tokens 1 2 4 …] [--sweep | --fp8] [--out D]

Routing is uniform: every token goes to 4 distinct experts at random. A graph goes through several layers, each with its
own weights, so that none are left in L2 from the time before. Bytes are those of the experts touched, once; the share
is that of this run's copy rate. `--sweep` times variants of the kernel instead, on gpt-oss-120b, those of the tokens
named (all by default), alone and between a dispatch and a combine. A failed check ends the run.
`--fp8` times FP8 experts by DeepGEMM instead, and whole MoE blocks in FP8 and in MXFP4 (`experts_fp8.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import experts_fp8
from benchmarks.graphs import copy_rate, table, time_call
from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.protocol import AllToAllConfig, Routing
from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.kernels.mxfp4_experts import (
    ExpertLayer,
    ExpertRows,
    expert_linear,
    expert_mlp,
    expert_swiglu,
    launch_both,
    launch_one,
    tiling,
)
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, PackedMxfp4
from rose_dist.kernels.stream_tiling import EXPERT_SHAPES, StreamShape
from rose_dist.kernels.swiglu import ALPHA
from rose_dist.kernels.variants import EXPERT_GEMM_ROWS

DEVICE = torch.device("cuda", 0)
HIDDEN, TOP_K, LIMIT = 2880, 4, 7.0
MODELS = {"gpt-oss-120b": 128, "gpt-oss-20b": 32}
"""Experts."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
LAYERS = 6
FLOP_A_ROW = 2 * 3 * HIDDEN * HIDDEN


@dataclass(frozen=True)
class Variant:
    """What a sweep compares. `shape`: None is the kernel for many rows; `together`: both layers in one launch."""

    name: str
    shape: StreamShape | None
    together: bool = True


def variants(shape: StreamShape) -> tuple[Variant, ...]:
    """Of a kernel of few rows."""
    return (
        Variant("two launches", shape, together=False), Variant("one launch", shape),
        Variant("64 KB under way", replace(shape, in_flight=64 << 10)),
        Variant("96 KB under way", replace(shape, in_flight=96 << 10)),
        Variant("144 KB under way", replace(shape, in_flight=144 << 10)),
    )  # fmt: skip


ONE, FOUR, EIGHT = EXPERT_SHAPES.variants
SWEEP: dict[int, tuple[Variant, ...]] = {
    1: variants(ONE),
    2: (*variants(ONE), Variant("4 rows", FOUR)),
    4: (*variants(ONE), Variant("4 rows", FOUR)),
    8: (*variants(FOUR), Variant("8 rows", EIGHT)),
    32: (*variants(FOUR), Variant("8 rows", EIGHT)),
    64: variants(EIGHT),
    128: (*variants(EIGHT), Variant("many rows", None)),
    256: (Variant("8 rows", EIGHT), Variant("many rows", None)),
}
"""By tokens."""


@dataclass
class Layer:
    """Random weights of one MoE layer."""

    gate_up: PackedMxfp4
    down: PackedMxfp4
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor

    @classmethod
    def random(cls, experts: int) -> Layer:
        weights = [PackedMxfp4.empty(experts, rows, HIDDEN, DEVICE) for rows in (2 * HIDDEN, HIDDEN)]
        for weight in weights:
            weight.data.random_(0, 256)
            weight.data[..., CODE_BYTES:].random_(238, 246)  # scales 2^-15 … 2^-8
            for expert in range(experts):
                weight.find_tops(expert)
        biases = [torch.randn(experts, weight.rows, device=DEVICE).bfloat16() for weight in weights]
        return cls(*weights, *biases)

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        return expert_mlp(x, *self.pair, rows, limit=LIMIT)

    @property
    def pair(self) -> tuple[ExpertLayer, ExpertLayer]:
        return ExpertLayer(self.gate_up, self.gate_up_bias), ExpertLayer(self.down, self.down_bias)

    def apart(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """Two launches."""
        first, second = self.pair
        return expert_linear(expert_swiglu(x, *first, rows, limit=LIMIT), *second, rows)


def routed(tokens: int, experts: int) -> tuple[torch.Tensor, ExpertRows, torch.Tensor]:
    """Rows packed by expert, whose they are, and the tokens' experts."""
    ids = torch.rand(tokens, experts, device=DEVICE).topk(TOP_K, dim=1).indices.int()
    counts = torch.bincount(ids.flatten(), minlength=experts).int()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=DEVICE), counts.long().cumsum(0)])
    x = torch.randn(tokens * TOP_K, HIDDEN, device=DEVICE).bfloat16()
    mean = tokens * TOP_K / experts
    return x, ExpertRows(counts, offsets, min(tokens, math.ceil(mean + 3 * mean**0.5))), ids


def check(layer: Layer, tokens: int, experts: int) -> float:
    """`relative_error` of the public functions."""
    x, rows, _ = routed(tokens, experts)
    h = expert_swiglu(x, layer.gate_up, layer.gate_up_bias, rows, limit=LIMIT)
    return relative_error(layer, x, rows, h, layer(x, rows))


def relative_error(layer: Layer, x: torch.Tensor, rows: ExpertRows, h: torch.Tensor, y: torch.Tensor) -> float:
    """The largest of any expert's rows, of six experts; ends the run above 2e-2."""
    worst = 0.0
    for expert in rows.counts.nonzero().flatten().tolist()[:6]:
        part = slice(int(rows.offsets[expert]), int(rows.offsets[expert + 1]))
        w1, w2 = (dequantize_mxfp4(*weight.load(expert), torch.float32) for weight in (layer.gate_up, layer.down))
        gate_up = x[part].float() @ w1.T + layer.gate_up_bias[expert].float()
        gate, linear = gate_up[:, 0::2].clamp(max=LIMIT), gate_up[:, 1::2].clamp(-LIMIT, LIMIT)
        wanted_h = gate * torch.sigmoid(ALPHA * gate) * (linear + 1)
        wanted_y = h[part].float() @ w2.T + layer.down_bias[expert].float()
        for name, got, wanted in (("first", h[part], wanted_h), ("second", y[part], wanted_y)):
            error = float((got.float() - wanted).norm() / wanted.norm())
            worst = max(worst, error)
            if not error <= 2e-2:
                sys.exit(f"WRONG RESULT: {x.shape[0]} rows, expert {expert}, {name} layer: relative error {error:.3g}")
    return worst


def per_layer(layers: list[Layer], call: Callable[[Layer], Any], replays: int = 30) -> float:
    """Microseconds a layer."""

    def all_layers() -> None:
        for layer in layers:
            call(layer)

    return time_call(all_layers, calls=2, replays=replays) / len(layers)


def figures(layers: list[Layer], model: str, tokens: int, rate: float) -> dict[str, Any]:
    experts = MODELS[model]
    x, rows, _ = routed(tokens, experts)
    touched = int((rows.counts > 0).sum())
    first, second = (weight.data[0].numel() * touched for weight in (layers[0].gate_up, layers[0].down))
    h = torch.randn(x.shape[0], HIDDEN, device=DEVICE).bfloat16()
    one = per_layer(layers, lambda layer: expert_swiglu(x, layer.gate_up, layer.gate_up_bias, rows, limit=LIMIT))
    two = per_layer(layers, lambda layer: expert_linear(h, layer.down, layer.down_bias, rows))
    both = per_layer(layers, lambda layer: layer(x, rows))
    return {
        "model": model, "tokens": tokens, "experts touched": touched, "most rows": int(rows.counts.max()),
        "MB": (first + second) / 1e6, "first us": one, "% of copy": 100 * first / rate / one, "second us": two,
        "% of copy ": 100 * second / rate / two, "both us": both, "TB/s": (first + second) / both / 1e6,
        "both % of copy": 100 * (first + second) / rate / both, "TFLOP/s": FLOP_A_ROW * x.shape[0] / both / 1e6,
    }  # fmt: skip


class Run:
    """Both layers in one variant, and the same between a dispatch and a combine."""

    def __init__(self, tokens: int, experts: int, variant: Variant) -> None:
        torch.manual_seed(tokens)
        self.variant = variant
        self.x, self.rows, ids = routed(tokens, experts)
        self.h, self.y = torch.empty_like(self.x), torch.empty_like(self.x)
        config = AllToAllConfig(
            num_experts=experts, top_k=TOP_K, hidden=HIDDEN, max_tokens=tokens, dtype=torch.bfloat16
        )
        self.exchange = Local(config, gpu=GpuOptions(device=DEVICE))
        self.tokens = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.tokens)
        self.routing = Routing(ids, torch.rand(tokens, TOP_K, device=DEVICE))

    def layers(self, layer: Layer, x: torch.Tensor, rows: ExpertRows) -> None:
        first, second = layer.pair
        if self.variant.shape is not None and self.variant.together:
            shape = tiling(self.variant.shape, first.weight, second.weight)
            launch_both(x, first, self.h, second, self.y, rows, shape, alpha=ALPHA, limit=LIMIT)
            return
        if self.variant.shape is None:
            self.y = expert_mlp(x, first, second, replace(rows, most=EXPERT_GEMM_ROWS), limit=LIMIT)
            return
        for (weight, bias), source, out, gated in ((first, x, self.h, True), (second, self.h, self.y, False)):
            shape = tiling(self.variant.shape, weight)
            launch_one(source, weight, bias, rows, out, shape, gated=gated, alpha=ALPHA, limit=LIMIT)

    def alone(self, layer: Layer) -> None:
        self.layers(layer, self.x, self.rows)

    def exchanged(self, layer: Layer) -> None:
        dispatched = self.exchange.dispatch(self.tokens, self.routing)
        self.layers(layer, dispatched.x, ExpertRows(dispatched.counts, dispatched.offsets, self.rows.most))
        self.exchange.combine(self.y, dispatched, out=self.out)


def sweep(layers: list[Layer], tokens: int, variant: Variant, rate: float) -> dict[str, Any]:
    """One variant's times; it has to give what the default gives."""
    run = Run(tokens, layers[0].gate_up.experts, variant)
    wanted = layers[0](run.x, run.rows).float()
    run.alone(layers[0])
    error = float((run.y.float() - wanted).norm() / wanted.norm())
    if not error <= 2e-2:
        sys.exit(f"WRONG RESULT: {tokens} tokens, {variant}: relative error {error:.3g}")
    us, exchanged = per_layer(layers, run.alone), per_layer(layers, run.exchanged)
    touched = int((run.rows.counts > 0).sum())
    moved = touched * (layers[0].gate_up.data[0].numel() + layers[0].down.data[0].numel())
    return {
        "tokens": tokens, "variant": variant.name, "both us": us, "% of copy": 100 * moved / rate / us,
        "with dispatch and combine us": exchanged, "TFLOP/s": FLOP_A_ROW * run.x.shape[0] / us / 1e6,
        "shape": str(variant.shape or ""),
    }  # fmt: skip


def show(begin: float, row: dict[str, Any]) -> None:
    shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    print(f"[{time.perf_counter() - begin:5.1f} s] {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    rate = copy_rate()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "copy TB/s": rate / 1e6, "rows": []}
    print(f"copy rate {rate / 1e6:.2f} TB/s", flush=True)
    for model in ["gpt-oss-120b"] if arguments.sweep else arguments.models:
        if arguments.fp8:
            for row in experts_fp8.rows(model, MODELS[model], arguments.tokens or experts_fp8.TOKENS, rate):
                show(begin, row)
                results["rows"].append(row)
            continue
        layers = [Layer.random(MODELS[model]) for _ in range(LAYERS)]
        for tokens in arguments.tokens or (SWEEP if arguments.sweep else TOKENS):
            torch.manual_seed(tokens)
            error = check(layers[0], tokens, MODELS[model])
            if arguments.sweep:
                rows = [sweep(layers, tokens, variant, rate) for variant in SWEEP[tokens]]
            else:
                rows = [figures(layers, model, tokens, rate) | {"relative error": error}]
            for row in rows:
                show(begin, row)
            results["rows"] += rows
        del layers
        torch.cuda.empty_cache()
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "experts_sweep.json" if arguments.sweep else "experts_fp8.json" if arguments.fp8 else "experts.json"
    (arguments.out / name).write_text(json.dumps(results, indent=1))
    print(table(results["rows"]))


if __name__ == "__main__":
    main()
