"""The kernels of MXFP4 expert layers with many rows, gpt-oss-120b, side by side, at the sizes of prompts.

    python -m benchmarks.expert_gemms [--tokens 512 1024 2048 4096] [--kernels 160 ...] [--out benchmarks/results]

Each is checked against fp32 first, those with rows in FP8 against fp32 on values quantised alike; a failed check ends
the run. Routing is uniform, as in `benchmarks.experts`. In FP8 the first layer's time includes quantising its rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.experts import FLOP_A_ROW, HIDDEN, LAYERS, LIMIT, MODELS, Layer, per_layer, relative_error, routed, show
from benchmarks.graphs import copy_rate, table
from rose_dist.kernels.e4m3_tiling import E4M3_SHAPES
from rose_dist.kernels.mxfp4_e4m3 import reference
from rose_dist.kernels.mxfp4_e4m3 import launch_gemm as launch_e4m3
from rose_dist.kernels.mxfp4_experts import launch_one, launch_warp_gemm, launch_warpgroup_gemm, tiling
from rose_dist.kernels.row_groups import empty_groups, group_rows
from rose_dist.kernels.stream_tiling import EXPERT_SHAPES
from rose_dist.kernels.swiglu import ALPHA
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES

TOKENS = (512, 1024, 2048, 4096)
BF16_160 = WARPGROUP_SHAPES.variants[-1]
BF16 = {
    **{f"bf16 rows {shape.widths[-1]}": shape for shape in WARPGROUP_SHAPES.variants},
    "bf16 rows 128": replace(BF16_160, widths=(96, 112, 128), stages=8),
    "bf16 rows 160, 3 blocks a stage": replace(BF16_160, step_columns=3, stages=5),
}
"""By the most rows of x that warpgroups multiply at a time."""
FP8_64, FP8_160 = E4M3_SHAPES.variants
FP8 = {
    "fp8 rows 64": FP8_64,
    "fp8 rows 128": replace(FP8_160, widths=(48, 72, 80, 112, 120, 128), stages=7),
    "fp8 rows 160": FP8_160,
    "fp8 rows 160, 5 blocks a stage": replace(FP8_160, widths=(88, 112, 120, 128, 144, 160), step_columns=5, stages=4),
}
"""As `GEMMS`."""


def figures(layers: list[Layer], tokens: int, name: str, rate: float) -> dict[str, Any]:
    """`name` of `GEMMS`, or "few rows"."""
    torch.manual_seed(tokens)
    x, rows, _ = routed(tokens, layers[0].gate_up.experts)
    h, y = torch.empty_like(x), torch.empty_like(x)
    shape = EXPERT_SHAPES.select(8)

    def call(layer: Layer, gated: bool) -> None:
        weight, bias = (layer.gate_up, layer.gate_up_bias) if gated else (layer.down, layer.down_bias)
        source, out, options = (x, h, {"gated": True}) if gated else (h, y, {"gated": False})
        if name in GEMMS:
            GEMMS[name](source, weight, bias, rows, out, alpha=ALPHA, limit=LIMIT, **options)
        else:
            launch_one(source, weight, bias, rows, out, tiling(weight, shape), alpha=ALPHA, limit=LIMIT, **options)

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


def fp8_figures(layers: list[Layer], tokens: int, name: str, rate: float) -> dict[str, Any]:
    """`name` of `FP8`."""
    torch.manual_seed(tokens)
    shape = FP8[name]
    x, rows, _ = routed(tokens, layers[0].gate_up.experts)
    h, y = empty_codes(x.shape[0], rows, HIDDEN, x.device), torch.empty_like(x)

    def first(layer: Layer) -> None:
        launch_e4m3(*quantize_rows(x, rows), layer.pair[0], rows, h, shape, alpha=ALPHA, limit=LIMIT)

    def second(layer: Layer) -> None:
        launch_e4m3(h, None, layer.pair[1], rows, y, shape, alpha=0.0, limit=0.0)

    first(layers[0])
    second(layers[0])
    few = torch.where(torch.arange(len(rows.counts), device=x.device) < 6, rows.counts, 0)
    own = slice(0, int(few.sum()))
    wanted = reference(x, *layers[0].pair, replace(rows, counts=few), LIMIT)[own].float()
    error = float((y[own].float() - wanted).norm() / wanted.norm())
    if not error <= 2e-2:
        sys.exit(f"WRONG RESULT: {tokens} tokens, {name}: relative error {error:.3g}")
    quantising = per_layer(layers, lambda _: quantize_rows(x, rows), replays=5)
    one, two = (per_layer(layers, call, replays=5) for call in (first, second))
    moved = int((rows.counts > 0).sum()) * sum(w.data[0].numel() for w in (layers[0].gate_up, layers[0].down))
    return {
        "tokens": tokens, "kernel": name, "first us": one, "second us": two, "both us": one + two,
        "% of copy": 100 * moved / rate / (one + two), "TFLOP/s": FLOP_A_ROW * x.shape[0] / (one + two) / 1e6,
        "relative error": error, "quantising us": quantising,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--kernels", nargs="+", default=list(GEMMS), choices=("few rows", *GEMMS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    rate = copy_rate()
    print(f"copy rate {rate / 1e6:.2f} TB/s", flush=True)
    layers = [Layer.random(MODELS["gpt-oss-120b"]) for _ in range(LAYERS)]
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        for name in arguments.kernels:
            rows.append(figures(layers, tokens, name, rate))
            show(begin, rows[-1])
        for name in FP8:
            rows.append(fp8_figures(layers, tokens, name, rate))
            show(begin, rows[-1])
    results = {"gpu": torch.cuda.get_device_name(0), "copy TB/s": rate / 1e6, "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "expert_gemms.json").write_text(json.dumps(results, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
