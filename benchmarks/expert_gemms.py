"""The kernels of MXFP4 expert layers with many rows, gpt-oss-120b, side by side, at the sizes of prompts.

    python -m benchmarks.expert_gemms [--tokens 512 1024 2048 4096] [--kernels "bf16*" ...] [--out D]

Each is checked against fp32 first, those with rows in FP8 against fp32 on values quantised alike; a failed check ends
the run. Routing is uniform, as in `benchmarks.experts`. Rows are there in groups: what making those of packed rows
takes, which a dispatch on one GPU does by itself, is a column of its own.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experts import FLOP_A_ROW, LAYERS, LIMIT, MODELS, Layer, per_layer, routed, show
from benchmarks.graphs import copy_rate, table
from benchmarks.kernel_builds import build
from rose_dist.kernels import jit, launch
from rose_dist.kernels.e4m3_tiling import E4M3_SHAPES
from rose_dist.kernels.mxfp4 import BLOCK, dequantize_mxfp4
from rose_dist.kernels.mxfp4_e4m3 import launch_gemm as launch_e4m3
from rose_dist.kernels.mxfp4_e4m3 import reference as reference_e4m3
from rose_dist.kernels.mxfp4_experts import ExpertLayer, ExpertRows, launch_warp_gemm, launch_warpgroup_gemm
from rose_dist.kernels.mxfp4_layout import TILE_BYTES
from rose_dist.kernels.row_groups import group_rows
from rose_dist.kernels.swiglu import ALPHA
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES

TOKENS = (512, 1024, 2048, 4096)
BF16 = {f"bf16 {shape.widths[-1]}": shape for shape in WARPGROUP_SHAPES.variants}
"""By the most rows of x that warpgroups multiply at a time."""
FP8 = {f"fp8 {shape.widths[-1]}": shape for shape in E4M3_SHAPES.variants}
"""As `BF16`."""
KERNELS = (*BF16, *FP8)
Call = Callable[[Layer], object]


def figures(layers: list[Layer], tokens: int, name: str, rate: float) -> dict[str, Any]:
    """`name` of `KERNELS`, or "warp"."""
    torch.manual_seed(tokens)
    x, rows, _ = routed(tokens, layers[0].gate_up.experts)
    first, second, group, y = halves(x, rows, name)
    first(layers[0])
    second(layers[0])
    few = torch.where(torch.arange(len(rows.counts), device=x.device) < 6, rows.counts, 0)
    own = slice(0, int(few.sum()))
    reference = reference_e4m3 if name in FP8 else reference_bf16
    wanted = reference(x, *layers[0].pair, replace(rows, counts=few), LIMIT)[own].float()
    error = float((y[own].float() - wanted).norm() / wanted.norm())
    if not error <= 2e-2:
        sys.exit(f"WRONG RESULT: {tokens} tokens, {name}: relative error {error:.3g}")
    one, two = (per_layer(layers, call, replays=5) for call in (first, second))
    moved = int((rows.counts > 0).sum()) * sum(w.data[0].numel() for w in (layers[0].gate_up, layers[0].down))
    return {
        "tokens": tokens, "kernel": name, "first us": one, "second us": two, "both us": one + two,
        "% of copy": 100 * moved / rate / (one + two), "TFLOP/s": FLOP_A_ROW * x.shape[0] / (one + two) / 1e6,
        "relative error": error, "grouping us": 0.0 if group is None else per_layer(layers, group, replays=5),
    }  # fmt: skip


def halves(x: Tensor, rows: ExpertRows, name: str) -> tuple[Call, Call, Call | None, Tensor]:
    """Both layers, what puts packed rows into groups for them, and where the second's results are."""
    y = torch.empty_like(x)
    if name == "warp":
        h = torch.empty_like(x)
        return (
            lambda layer: launch_warp_gemm(x, *layer.pair[0], rows, h, gated=True, alpha=ALPHA, limit=LIMIT),
            lambda layer: launch_warp_gemm(h, *layer.pair[1], rows, y, gated=False, alpha=0.0, limit=0.0),
            None,
            y,
        )
    dtype = torch.uint8 if name in FP8 else torch.bfloat16
    grouped = group_rows(x, rows.counts, rows.offsets, dtype)
    cells, scales = grouped.cells, grouped.scales
    h = torch.empty_like(cells)

    def one(layer: Layer) -> None:
        if name in FP8:
            launch_e4m3(cells, scales, layer.pair[0], rows, h, FP8[name], alpha=ALPHA, limit=LIMIT)
        else:
            launch_warpgroup_gemm(cells, layer.pair[0], rows, h, BF16[name], gated=True, alpha=ALPHA, limit=LIMIT)

    def two(layer: Layer) -> None:
        if name in FP8:
            launch_e4m3(h, None, layer.pair[1], rows, y, FP8[name], alpha=0.0, limit=0.0)
        else:
            launch_warpgroup_gemm(h, layer.pair[1], rows, y, BF16[name], gated=False, alpha=0.0, limit=0.0)

    return one, two, lambda _: group_rows(x, rows.counts, rows.offsets, dtype), y


def reference_bf16(x: Tensor, gate_up: ExpertLayer, down: ExpertLayer, rows: ExpertRows, limit: float) -> Tensor:
    """In fp32, rounded between the layers."""
    out = torch.zeros_like(x)
    for expert in rows.counts.nonzero().flatten().tolist():
        part = slice(int(rows.offsets[expert]), int(rows.offsets[expert] + rows.counts[expert]))
        w1, w2 = (dequantize_mxfp4(*layer.weight.load(expert), torch.float32) for layer in (gate_up, down))
        assert gate_up.bias is not None
        assert down.bias is not None
        y = x[part].float() @ w1.T + gate_up.bias[expert].float()
        gate, linear = y[:, 0::2].clamp(max=limit), y[:, 1::2].clamp(-limit, limit)
        h = (gate * torch.sigmoid(ALPHA * gate) * (linear + 1)).to(x.dtype)
        out[part] = (h.float() @ w2.T + down.bias[expert].float()).to(x.dtype)
    return out


def kernels_of(name: str, layer: Layer) -> list[jit.Kernel]:
    """What `name` launches on this GPU; none of "warp"."""
    from rose_dist.kernels.cute.mxfp4_experts_e4m3 import E4m3ExpertGemm  # noqa: PLC0415 - they load the compiler
    from rose_dist.kernels.cute.mxfp4_experts_warpgroup import WarpgroupExpertGemm  # noqa: PLC0415

    arch, kernels = launch.device(layer.gate_up.data).arch, list[jit.Kernel]()
    for weight, gated in ((layer.gate_up, True), (layer.down, False)):
        sizes = (arch, weight.experts, weight.data.shape[1])
        if name in FP8:
            kernels.append(E4m3ExpertGemm(*sizes, FP8[name].tiling(weight.columns // BLOCK), gated))
        elif name in BF16:
            kernels.append(WarpgroupExpertGemm(*sizes, BF16[name].tiling(weight.columns // BLOCK, TILE_BYTES), gated))
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--kernels", nargs="+", default=["*"], help=f"patterns of: warp, {', '.join(KERNELS)}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    rate = copy_rate()
    print(f"copy rate {rate / 1e6:.2f} TB/s", flush=True)
    layers = [Layer.random(MODELS["gpt-oss-120b"]) for _ in range(LAYERS)]
    names = [name for name in ("warp", *KERNELS) if any(fnmatch.fnmatch(name, own) for own in arguments.kernels)]
    build([kernel for name in names for kernel in kernels_of(name, layers[0])])
    print(f"[{time.perf_counter() - begin:5.1f} s] compiled", flush=True)
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        for name in names:
            rows.append(figures(layers, tokens, name, rate))
            show(begin, rows[-1])
    results = {"gpu": torch.cuda.get_device_name(0), "copy TB/s": rate / 1e6, "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "expert_gemms.json").write_text(json.dumps(results, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
