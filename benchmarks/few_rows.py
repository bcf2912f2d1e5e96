"""GPT-OSS-120b's launches for few rows beside those that they replace, on one GPU: checked, then timed in CUDA graphs.

    python -m benchmarks.few_rows [--rows 1 4 8] [--out FOLDER]

A graph goes through several layers, each with its own weights, so that none are left in L2 from the time before.
`layer` is all of a decoder layer but attention, with its experts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.experts import Layer as ExpertLayer
from benchmarks.graphs import copy_rate, table, time_call
from rose_dist.kernels import layer_meeting
from rose_dist.kernels.combine_norm import combine_norm
from rose_dist.kernels.expert_map import map_experts
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.handover import Handover
from rose_dist.kernels.linear_add import MAX_ROWS, linear_add
from rose_dist.kernels.linear_rotary import linear_rotary
from rose_dist.kernels.moe_combine import combine
from rose_dist.kernels.moe_dispatch import Dispatcher, PackedRows
from rose_dist.kernels.mxfp4_experts import ExpertRows
from rose_dist.kernels.qk_norm import PagedCache
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm
from rose_dist.kernels.rotary import rotate_and_store
from rose_dist.kernels.route_rows import route_rows
from rose_dist.kernels.routing import Router, route
from rose_dist.kernels.small_linear import small_linear

HIDDEN, QUERY_HEADS, KEY_HEADS, HEAD_DIM, EXPERTS, TOP_K, EPS = 2880, 64, 8, 64, 128, 4, 1e-5
ATTENDED, OUTPUTS = QUERY_HEADS * HEAD_DIM, (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM
LAYERS, SLOTS = 6, 64
DEVICE = torch.device("cuda", 0)
RULE = Router(TOP_K)
Hidden = tuple[torch.Tensor, torch.Tensor]
"""Normalised, and the residual stream."""


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


class Layer:
    """One layer's weights, with its steps either way."""

    def __init__(self, rows: int, dispatcher: Dispatcher) -> None:
        self.qkv, self.qkv_bias = random(OUTPUTS, HIDDEN, scale=0.02), random(OUTPUTS)
        self.o, self.o_bias = random(HIDDEN, ATTENDED, scale=0.02), random(HIDDEN)
        self.router, self.router_bias = random(EXPERTS, HIDDEN, scale=0.02), random(EXPERTS)
        self.norms = [random(HIDDEN).abs() for _ in range(2)]
        self.experts = ExpertLayer.random(EXPERTS)
        self.load = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
        self.cache = PagedCache(
            *(random(SLOTS, KEY_HEADS, HEAD_DIM) for _ in range(2)), torch.arange(rows, device=DEVICE)
        )
        angles = torch.rand(rows, HEAD_DIM // 2, device=DEVICE) * 6
        self.turns = (angles.cos(), angles.sin())
        self.dispatcher = dispatcher
        self.packed = PackedRows(
            random(rows * TOP_K, HIDDEN), None, torch.zeros(rows, TOP_K, dtype=torch.int32, device=DEVICE),
            torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE),
            torch.zeros(EXPERTS + 1, dtype=torch.int64, device=DEVICE),
        )  # fmt: skip

    def queries(self, normed: torch.Tensor) -> torch.Tensor:
        """[rows, query heads · head_dim]."""
        qkv = small_linear(normed, self.qkv, self.qkv_bias).view(len(normed), -1, HEAD_DIM)
        return rotate_and_store(qkv, KEY_HEADS, *self.turns, self.cache).reshape(len(normed), -1)

    def queries_fused(self, normed: torch.Tensor) -> torch.Tensor:
        q = linear_rotary(normed, self.qkv, self.qkv_bias, KEY_HEADS, *self.turns, self.cache)
        return q.flatten(1)

    def routed(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output projection to packed rows: the router's weights, and the residual stream."""
        out = small_linear(attended, self.o, self.o_bias)
        normed, total = add_rms_norm(out, residual, self.norms[0], EPS)
        chosen = route(small_linear(normed, self.router, self.router_bias), RULE)
        ids = map_experts(chosen.ids, self.load)
        self.dispatcher(normed, None, ids, len(normed), None, self.packed)
        return chosen.weights, total

    def routed_fused(
        self, attended: torch.Tensor, residual: torch.Tensor, handover: Handover | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = linear_add(attended, self.o, self.o_bias, residual)
        chosen = route_rows(
            total, self.norms[0], EPS, self.router, self.router_bias, RULE, self.load, self.packed, handover=handover
        )  # fmt: skip
        return chosen.weights, total

    def ended(self, results: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor) -> Hidden:
        out = torch.empty_like(residual)
        combine(results, self.packed.slots, weights, out, tokens=len(residual))
        return add_rms_norm(out, residual, self.norms[1], EPS)

    def ended_fused(self, results: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor) -> Hidden:
        return combine_norm(results, self.packed.slots, weights, residual, self.norms[1], EPS), residual

    def whole(self, fused: bool, together: bool, hidden: Hidden) -> Hidden:
        """All but attention; with the experts' layers together in one launch or not."""
        queries, routed, ended = (
            (self.queries_fused, self.routed_fused, self.ended_fused)
            if fused
            else (self.queries, self.routed, self.ended)
        )
        weights, total = routed(queries(hidden[0]), hidden[1])
        rows = ExpertRows(self.packed.counts, self.packed.offsets, most_rows(len(total)))
        experts = self.experts if together else self.experts.apart
        return ended(experts(self.packed.x, rows), weights, total)

    def handed(self, hidden: Hidden) -> Hidden:
        """`whole` for one row, whose experts get it before the router's launch has ended."""
        handover = layer_meeting.meeting(DEVICE).handover(HIDDEN)
        weights, total = self.routed_fused(self.queries_fused(hidden[0]), hidden[1], handover)
        rows = ExpertRows(self.packed.counts, self.packed.offsets, 1, handover=handover)
        return self.ended_fused(self.experts(self.packed.x, rows), weights, total)


def most_rows(tokens: int) -> int:
    """As the model's layers expect of the largest expert."""
    mean = tokens * TOP_K / EXPERTS
    return min(tokens, math.ceil(mean + 3 * mean**0.5))


def timed(layers: list[Layer], call: Callable[[Layer], Any]) -> float:
    """Microseconds a layer."""

    def all_layers() -> None:
        for layer in layers:
            call(layer)

    return time_call(all_layers, replays=60, calls=2) / len(layers)


def check(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((got.double() - wanted.double()).norm() / wanted.double().norm())
    if not error <= 1e-2:
        sys.exit(f"WRONG RESULT: {name}: relative error {error:.3g}")


def figures(layers: list[Layer], rows: int, rate: float) -> list[dict[str, Any]]:
    layer = layers[0]
    hidden = (rms_norm(random(rows, HIDDEN), layer.norms[1], EPS), random(rows, HIDDEN))
    attended, results = layer.queries(hidden[0]), random(rows * TOP_K, HIDDEN)
    check("queries", layer.queries_fused(hidden[0]), attended)
    weights, total = layer.routed(attended, hidden[1])
    slots, packed = layer.packed.slots.clone(), layer.packed.x.clone()
    for one, other in zip(layer.routed_fused(attended, hidden[1]), (weights, total), strict=True):
        check("routing and residual", one, other)
    if not torch.equal(slots, layer.packed.slots):
        print("other experts were chosen, as near ties may be", flush=True)
    else:
        check("packed rows", layer.packed.x, packed)
    for one, other in zip(
        layer.ended_fused(results, weights, total.clone()), layer.ended(results, weights, total), strict=True
    ):
        check("combine", one, other)
    linear = 2 * OUTPUTS * HIDDEN, 2 * HIDDEN * (ATTENDED + EXPERTS)
    touched = int((layer.packed.counts > 0).sum())
    experts = touched * (layer.experts.gate_up.data[0].numel() + layer.experts.down.data[0].numel())

    def through(fused: bool, together: bool, handed: bool = False) -> float:
        def all_layers() -> None:
            state = (hidden[0], hidden[1].clone())
            for one in layers:
                state = one.handed(state) if handed else one.whole(fused, together, state)

        return time_call(all_layers, replays=60, calls=1) / len(layers)

    steps: list[tuple[str, int, int, int, Callable[[], float], Callable[[], float]]] = [
        (
            "qkv, rotary, cache", 2, 1, linear[0], lambda: timed(layers, lambda one: one.queries(hidden[0])),
            lambda: timed(layers, lambda one: one.queries_fused(hidden[0])),
        ),
        (
            "o to packed rows", 6, 2, linear[1], lambda: timed(layers, lambda one: one.routed(attended, hidden[1])),
            lambda: timed(layers, lambda one: one.routed_fused(attended, hidden[1])),
        ),
        (
            "combine, residual, norm", 2, 1, 0, lambda: timed(layers, lambda one: one.ended(results, weights, total)),
            lambda: timed(layers, lambda one: one.ended_fused(results, weights, total)),
        ),
        (
            "layer, experts' layers apart", 12, 6, sum(linear) + experts, lambda: through(False, False),
            lambda: through(True, False),
        ),
        ("layer", 11, 5, sum(linear) + experts, lambda: through(False, True), lambda: through(True, True)),
    ]  # fmt: skip
    if rows == 1:
        for one, other in zip(layer.handed(hidden), layer.whole(True, True, hidden), strict=True):
            check("a layer whose row is handed over", one, other)
        steps.append((
            "layer, its row handed over", 5, 5, sum(linear) + experts, lambda: through(True, True),
            lambda: through(True, True, True),
        ))  # fmt: skip
    return [
        {
            "rows": rows, "what": what, "launches": before, "us": apart(), "launches fused": after, "us fused": fused(),
            "floor us": moved / rate,
        }
        for what, before, after, moved, apart, fused in steps
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, MAX_ROWS])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"copy rate {rate / 1e6:.2f} TB/s", flush=True)
    results: list[dict[str, Any]] = []
    for rows in arguments.rows:
        torch.manual_seed(rows)
        dispatcher = Dispatcher(
            DEVICE, experts=EXPERTS, first_expert=0, top_k=TOP_K, row_bytes=2 * HIDDEN, scale_bytes=0,
            layout=PackedLayout(), max_tokens=MAX_ROWS,
        )  # fmt: skip
        results += figures([Layer(rows, dispatcher) for _ in range(LAYERS)], rows, rate)
        print(table([one for one in results if one["rows"] == rows]), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {"gpu": torch.cuda.get_device_name(0), "copy TB/s": rate / 1e6, "rows": results}
    (arguments.out / "few_rows.json").write_text(json.dumps(content, indent=1))
    (arguments.out / "few_rows.md").write_text(table(results))


if __name__ == "__main__":
    main()
