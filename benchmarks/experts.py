"""GPT-OSS's MXFP4 expert layers on one GPU: checked against fp32 first, then timed in CUDA graphs.

    python -m benchmarks.experts [--models gpt-oss-120b …] [--tokens 1 2 4 …] [--sweep | --gemms | --fp8] [--out FOLDER]

Routing is uniform: every token goes to 4 distinct experts at random. A graph goes through several layers, each with its
own weights, so that none are left in L2 from the time before. Bytes are those of the experts touched, once; the share
is that of this run's copy rate. `--sweep` times other shapes of the kernel too. A failed check ends the run. `--gemms`
checks and times, and does nothing else, the kernels for many rows at 512, 1024 and 4096 tokens (or those of --tokens);
`--fp8` likewise FP8 experts by DeepGEMM and whole MoE blocks in FP8 and in MXFP4 (`experts_fp8.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import experts_fp8
from benchmarks.graphs import copy_rate, table, time_call
from rose_dist.kernels import launch
from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.kernels.mxfp4_experts import (
    ExpertRows,
    expert_linear,
    expert_swiglu,
    launch_gemm,
    launch_tiling,
    launch_warp_gemm,
    launch_warpgroup_gemm,
    tiling,
)  # fmt: skip
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, PackedMxfp4
from rose_dist.kernels.swiglu import ALPHA
from rose_dist.kernels.variants import EXPERT_SHAPES, StreamShape
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES

DEVICE = torch.device("cuda", 0)
HIDDEN, TOP_K, LIMIT = 2880, 4, 7.0
MODELS = {"gpt-oss-120b": 128, "gpt-oss-20b": 32}
"""Experts."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 4096)
LAYERS = 6
FLOP_A_ROW = 2 * 3 * HIDDEN * HIDDEN
Launch = Callable[..., None]
GEMM_TOKENS = (512, 1024, 4096)
GEMMS: dict[str, Launch] = {
    "warp": launch_warp_gemm,
    "warpgroup 64": partial(launch_warpgroup_gemm, shape=WARPGROUP_SHAPES.variants[0]),
    "warpgroup 128": partial(launch_warpgroup_gemm, shape=WARPGROUP_SHAPES.variants[1]),
}
"""Kernels for many rows, by the rows that they multiply at a time."""
SWEEP: dict[int, tuple[StreamShape | None, ...]] = {
    1: (
        StreamShape(15, 3, 5, rows=1, buffers=2, per_sm=2), StreamShape(15, 3, 6, rows=1, buffers=2),
        StreamShape(15, 3, 9, rows=1, buffers=2), StreamShape(15, 6, 10, rows=1, buffers=2, per_sm=2),
        StreamShape(9, 5, 6, rows=1, buffers=2, per_sm=2), StreamShape(18, 5, 8, rows=1, buffers=2),
    ),
    8: (
        StreamShape(15, 3, 4, rows=4, buffers=1, per_sm=2), StreamShape(15, 3, 8, rows=4, buffers=1),
        StreamShape(15, 3, 6, rows=8, buffers=1), StreamShape(15, 3, 4, rows=8, buffers=1),
        StreamShape(15, 6, 12, rows=8, buffers=1), StreamShape(9, 5, 10, rows=8, buffers=1),
        StreamShape(18, 5, 8, rows=8, buffers=1),
    ),
    64: (
        StreamShape(15, 3, 4, rows=16, buffers=1), StreamShape(15, 6, 8, rows=16, buffers=1),
        StreamShape(15, 3, 6, rows=8, buffers=1), StreamShape(9, 5, 8, rows=16, buffers=1), None,
    ),
    256: (StreamShape(15, 3, 4, rows=16, buffers=1), None),
    512: (StreamShape(15, 3, 4, rows=16, buffers=1), None),
    1024: (StreamShape(15, 3, 4, rows=16, buffers=1), None),
}  # fmt: skip
"""By tokens: shapes to compare."""


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
        biases = [torch.randn(experts, weight.rows, device=DEVICE).bfloat16() for weight in weights]
        return cls(*weights, *biases)

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        h = expert_swiglu(x, self.gate_up, self.gate_up_bias, rows, limit=LIMIT)
        return expert_linear(h, self.down, self.down_bias, rows, early=True)


def routed(tokens: int, experts: int) -> tuple[torch.Tensor, ExpertRows]:
    ids = torch.rand(tokens, experts, device=DEVICE).topk(TOP_K, dim=1).indices
    counts = torch.bincount(ids.flatten(), minlength=experts).int()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=DEVICE), counts.long().cumsum(0)])
    x = torch.randn(tokens * TOP_K, HIDDEN, device=DEVICE).bfloat16()
    mean = tokens * TOP_K / experts
    return x, ExpertRows(counts, offsets, max(1, round(mean + 3 * mean**0.5)))


def check(layer: Layer, tokens: int, experts: int) -> float:
    """`relative_error` of the public functions."""
    x, rows = routed(tokens, experts)
    h = expert_swiglu(x, layer.gate_up, layer.gate_up_bias, rows, limit=LIMIT)
    return relative_error(layer, x, rows, h, expert_linear(h, layer.down, layer.down_bias, rows, early=True))


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
    x, rows = routed(tokens, experts)
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


def sweep(layers: list[Layer], tokens: int, shape: StreamShape | None, rate: float) -> dict[str, Any]:
    """Both kernels in one shape; None is the kernel for many rows."""
    torch.manual_seed(tokens)
    x, rows = routed(tokens, layers[0].gate_up.experts)
    touched = int((rows.counts > 0).sum())
    h, y = torch.empty_like(x), torch.empty_like(x)
    device = launch.device(x)

    def call(layer: Layer) -> None:
        for weight, bias, source, out, gated in (
            (layer.gate_up, layer.gate_up_bias, x, h, True), (layer.down, layer.down_bias, h, y, False),
        ):  # fmt: skip
            if shape is None:
                launch_gemm(source, weight, bias, rows, out, gated=gated, alpha=ALPHA, limit=LIMIT)
                continue
            launch_tiling(
                source, weight, bias, rows, out, tiling(weight, shape), device, gated=gated, early=not gated,
                alpha=ALPHA, limit=LIMIT,
            )  # fmt: skip

    us = per_layer(layers, call)
    moved = touched * (layers[0].gate_up.data[0].numel() + layers[0].down.data[0].numel())
    return {
        "tokens": tokens, "shape": str(shape or "many rows"), "both us": us, "% of copy": 100 * moved / rate / us,
        "TFLOP/s": FLOP_A_ROW * x.shape[0] / us / 1e6,
    }  # fmt: skip


def gemms(layers: list[Layer], tokens: int, name: str, rate: float) -> dict[str, Any]:
    """Each layer by one of the kernels for many rows; "few rows" is the one for few."""
    torch.manual_seed(tokens)
    x, rows = routed(tokens, layers[0].gate_up.experts)
    h, y = torch.empty_like(x), torch.empty_like(x)
    device, shape = launch.device(x), EXPERT_SHAPES.select(16)

    def call(layer: Layer, gated: bool) -> None:
        weight, bias = (layer.gate_up, layer.gate_up_bias) if gated else (layer.down, layer.down_bias)
        source, out, options = (x, h, {"gated": True}) if gated else (h, y, {"gated": False})
        if name in GEMMS:
            GEMMS[name](source, weight, bias, rows, out, alpha=ALPHA, limit=LIMIT, **options)
        else:
            launch_tiling(
                source, weight, bias, rows, out, tiling(weight, shape), device, early=False, alpha=ALPHA, limit=LIMIT,
                **options,
            )  # fmt: skip

    for gated in (True, False):
        call(layers[0], gated)
    error = relative_error(layers[0], x, rows, h, y)
    one, two = (per_layer(layers, lambda layer, gated=gated: call(layer, gated), replays=5) for gated in (True, False))
    moved = int((rows.counts > 0).sum()) * sum(w.data[0].numel() for w in (layers[0].gate_up, layers[0].down))
    return {
        "tokens": tokens, "kernel": name, "first us": one, "second us": two, "both us": one + two,
        "% of copy": 100 * moved / rate / (one + two), "TFLOP/s": FLOP_A_ROW * x.shape[0] / (one + two) / 1e6,
        "relative error": error,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--gemms", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    rate = copy_rate()
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "copy TB/s": rate / 1e6,
        "rows": [],
        "sweep": [],
        "gemms": [],
        "fp8": [],
    }
    print(f"copy rate {rate / 1e6:.2f} TB/s", flush=True)
    for model in arguments.models:
        if arguments.fp8:
            for row in experts_fp8.rows(model, MODELS[model], arguments.tokens or experts_fp8.TOKENS, rate):
                results["fp8"].append(row)
                print(f"[{time.perf_counter() - begin:5.1f} s] {row}", flush=True)
            continue
        layers = [Layer.random(MODELS[model]) for _ in range(LAYERS)]
        if arguments.gemms:
            for tokens in arguments.tokens or GEMM_TOKENS:
                for name in ("few rows", *GEMMS) if tokens <= 1024 else GEMMS:
                    results["gemms"].append({"model": model, **gemms(layers, tokens, name, rate)})
                    print(f"[{time.perf_counter() - begin:5.1f} s] {results['gemms'][-1]}", flush=True)
            continue
        for tokens in arguments.tokens or TOKENS:
            torch.manual_seed(tokens)
            error = check(layers[0], tokens, MODELS[model])
            row = figures(layers, model, tokens, rate)
            results["rows"].append(row)
            shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            print(f"[{time.perf_counter() - begin:5.1f} s] {shown}; relative error {error:.2g}", flush=True)
        if arguments.sweep and model == "gpt-oss-120b":
            for tokens, shapes in SWEEP.items():
                for shape in shapes:
                    results["sweep"].append(sweep(layers, tokens, shape, rate))
                    print(f"[{time.perf_counter() - begin:5.1f} s] {results['sweep'][-1]}", flush=True)
        del layers
        torch.cuda.empty_cache()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = "experts_gemms.json" if arguments.gemms else "experts_fp8.json" if arguments.fp8 else "experts.json"
    (arguments.out / file).write_text(json.dumps(results, indent=1))
    print(*(table(results[part]) for part in ("rows", "sweep", "gemms", "fp8") if results[part]), sep="\n")


if __name__ == "__main__":
    main()
