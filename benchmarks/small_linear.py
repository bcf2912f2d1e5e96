"""GPT-OSS's dense layers for few rows on one GPU, against cuBLAS: checked, then timed in CUDA graphs.

    python -m benchmarks.small_linear [--rows 1 4 8 16] [--out FOLDER]

A graph goes through several weights of a layer, so that none are left in L2 from the time before. The share is that of
this run's copy rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.graphs import copy_rate, table, time_call
from rose_dist.kernels.small_linear import small_linear

LAYERS = {"qkv": (5120, 2880, 8), "o": (2880, 4096, 8), "router": (128, 2880, 64), "lm_head": (201088, 2880, 1)}
"""Outputs, inputs, how many weights a graph goes through."""


def per_layer(weights: list[torch.Tensor], call: Callable[[torch.Tensor], Any]) -> float:
    def all_layers() -> None:
        for weight in weights:
            call(weight)

    return time_call(all_layers, calls=1 if len(weights) > 1 else 4, replays=30) / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    rate = copy_rate()
    results: list[dict[str, Any]] = []
    print(f"copy rate {rate / 1e6:.2f} TB/s", flush=True)
    for name, (outputs, inputs, copies) in LAYERS.items():
        weights = [torch.randn(outputs, inputs, device="cuda").div_(16).bfloat16() for _ in range(copies)]
        bias = torch.randn(outputs, device="cuda").bfloat16()
        for rows in arguments.rows:
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            wanted = x.double() @ weights[0].double().T + bias.double()
            error = float((small_linear(x, weights[0], bias).double() - wanted).norm() / wanted.norm())
            if not error <= 1e-2:
                sys.exit(f"WRONG RESULT: {name}, {rows} rows: relative error {error:.3g}")
            ours = per_layer(weights, lambda weight, x=x, bias=bias: small_linear(x, weight, bias))
            peer = per_layer(weights, lambda weight, x=x, bias=bias: functional.linear(x, weight, bias))
            floor = 2 * outputs * inputs / rate
            row = {
                "layer": name, "rows": rows, "us": ours, "cuBLAS us": peer, "floor us": floor,
                "% of copy": 100 * floor / ours, "cuBLAS % of copy": 100 * floor / peer, "error": error,
            }  # fmt: skip
            results.append(row)
            print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        del weights
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "small_linear.json").write_text(json.dumps({"copy TB/s": rate / 1e6, "rows": results}, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
