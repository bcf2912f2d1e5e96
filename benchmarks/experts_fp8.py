"""FP8 experts by DeepGEMM, kernel by kernel, and whole MoE blocks in FP8 and in MXFP4; part of `benchmarks.experts`.

A block is the engine's own: router, quantisation, dispatch, experts, combine, residual and norm. Weights and tokens are
random, which spreads tokens over the experts about evenly. The first call of a shape waits for DeepGEMM to compile its
kernel. A failed check ends the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.graphs import time_call
from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.protocol import AllToAllConfig, Routing
from rose_dist.comm.expert_placement import Placement
from rose_dist.comm.layout import Layout
from rose_dist.kernels.formats import FP8, ScaleLayout
from rose_dist.kernels.fp8_experts import MANY, Fp8Rows, fp8_expert_linear, fp8_expert_swiglu
from rose_dist.kernels.mxfp4_experts import ExpertRows
from rose_dist.kernels.quantize import dequantize, quantize
from rose_dist.kernels.routing import route
from rose_dist.kernels.swiglu import Gate, Rows, activate_quantized
from rose_dist.layers.expert_map import ExpertMap
from rose_dist.layers.expert_matrices import Fp8Matrix, MoeWeights
from rose_dist.layers.experts import Experts, ExpertShare
from rose_dist.layers.moe import MoE
from rose_dist.layers.norm import RMSNorm
from rose_dist.models.gpt_oss import fp8_exchange
from rose_dist.models.random_weights import fill_randomly

DEVICE = torch.device("cuda", 0)
HIDDEN, TOP_K, LIMIT, LAYERS = 2880, 4, 7.0, 4
TOKENS = (1, 8, 64, 128, 512, 1024, 4096)
KINDS: tuple[MoeWeights, MoeWeights] = ("mxfp4", "fp8")


def blocks(kind: MoeWeights, experts: int, most: int) -> list[MoE]:
    """Of so many layers, with one exchange for all."""
    sizes = AllToAllConfig(num_experts=experts, top_k=TOP_K, hidden=HIDDEN, max_tokens=most, dtype=torch.bfloat16)
    gpu = GpuOptions(device=DEVICE)
    if kind == "fp8":
        sizes, gpu = fp8_exchange(sizes, gpu, Layout.of(1))
    exchange, held = Local(sizes, gpu=gpu), ExpertShare(experts, range(experts), 1, 0)
    found = []
    with DEVICE:
        for seed in range(LAYERS):
            matrices = Experts(HIDDEN, HIDDEN, held, limit=LIMIT, stored="mxfp4", kept=kind, dtype=torch.bfloat16)
            load = torch.zeros(experts, dtype=torch.int64)
            expert_map = ExpertMap(Placement.initial(experts, 1, 0), 0, load)
            block = MoE(HIDDEN, matrices, TOP_K, exchange, expert_map, dtype=torch.bfloat16)
            fill_randomly(block, seed)
            found.append(block)
    return found


class Dispatched:
    """Tokens as they come to a layer's experts."""

    def __init__(self, block: MoE, tokens: int) -> None:
        x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
        chosen = route(block.router(x), block.rule)
        codes, scales = quantize(x, FP8)
        given = block.exchange.dispatch(codes, Routing(chosen.ids, chosen.weights), scales=scales)
        assert given.scales is not None
        # The exchange's buffers are used again.
        own = torch.empty_strided(given.scales.shape, given.scales.stride(), device=DEVICE).copy_(given.scales)
        self.x = Fp8Rows(given.x.clone(), own)
        assert given.slots is not None
        listed = Rows(places=given.slots.flatten().clone(), experts=chosen.ids.flatten())
        self.rows = ExpertRows(
            given.counts.clone(), given.offsets.clone(), block._most_rows(tokens), layout=given.layout, listed=listed
        )


def check(block: MoE, tokens: int) -> float:
    """The largest relative error of some experts' products against fp32 on the dequantised operands; ends the run above
    2e-2 (with what quantising the activation adds, 4e-2).
    """
    given, experts = Dispatched(block, tokens), block.experts
    first, second = experts.gate_up_proj, experts.down_proj
    assert isinstance(first, Fp8Matrix)
    assert isinstance(second, Fp8Matrix)
    h = fp8_expert_swiglu(
        given.x, first.weight, experts.gate_up_proj_bias, given.rows, limit=LIMIT, dtype=torch.bfloat16
    )
    y = fp8_expert_linear(h, second.weight, given.rows, torch.bfloat16)
    wide, wide_h = (by_rows(rows) for rows in (given.x, h))
    worst = 0.0
    for expert in given.rows.counts.nonzero().flatten().tolist()[:6]:
        start = int(given.rows.offsets[expert])
        part = slice(start, start + int(given.rows.counts[expert]))
        gate_up = wide[part] @ first.weight.dequantize(expert).T + experts.gate_up_proj_bias[expert].float()
        gate, linear = gate_up[:, 0::2].clamp(max=LIMIT), gate_up[:, 1::2].clamp(-LIMIT, LIMIT)
        wanted_h = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
        wanted_y = wide_h[part] @ second.weight.dequantize(expert).T
        for name, got, wanted, most in (("first", wide_h[part], wanted_h, 4e-2), ("second", y[part], wanted_y, 2e-2)):
            error = float((got.float() - wanted).norm() / wanted.norm())
            worst = max(worst, error if name == "second" else 0.0)
            if not error <= most:
                sys.exit(f"WRONG RESULT: {tokens} tokens, expert {expert}, {name} layer: relative error {error:.3g}")
    return worst


def by_rows(x: Fp8Rows) -> torch.Tensor:
    """fp32 [rows, columns]."""
    scales = x.scales.reshape(x.codes.shape[0], -1).contiguous()
    return dequantize(x.codes, scales, FP8, dtype=torch.float32)


def rows(model: str, experts: int, numbers: Sequence[int], rate: float) -> Iterator[dict[str, Any]]:
    """A line for each number of tokens."""
    packed, kept = (blocks(kind, experts, max(numbers)) for kind in KINDS)
    bytes_an_expert = sum(
        matrix.codes[0].numel() for matrix in (kept[0].experts.gate_up_proj, kept[0].experts.down_proj)
    )
    for tokens in numbers:
        torch.manual_seed(tokens)
        error = check(kept[0], tokens)
        x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
        residual = torch.zeros_like(x)
        with DEVICE:
            norm = RMSNorm(HIDDEN, 1e-5, torch.bfloat16)
        norm.weight.data.fill_(1.0)
        given = Dispatched(kept[0], tokens)
        touched = int((given.rows.counts > 0).sum())
        first, second, activation = kernels(given)
        us = {
            "FP8 first us": per_layer(kept, lambda block, call=first: call(block.experts)),
            "activation us": per_layer(kept, lambda block, call=activation: call(block.experts)),
            "FP8 second us": per_layer(kept, lambda block, call=second: call(block.experts)),
            "FP8 block us": per_layer(kept, lambda block, x=x, r=residual, n=norm: block.add(x, r, n)),
            "MXFP4 block us": per_layer(packed, lambda block, x=x, r=residual, n=norm: block.add(x, r, n)),
        }
        products = us["FP8 first us"] + us["FP8 second us"]
        yield {
            "model": model, "tokens": tokens, "packing": "contiguous" if given.rows.layout == MANY else "masked",
            "experts touched": touched, **us, "products % of copy": 100 * bytes_an_expert * touched / rate / products,
            "products TFLOP/s": 2 * bytes_an_expert * tokens * TOP_K / products / 1e6, "error": error,
        }  # fmt: skip


def kernels(given: Dispatched) -> tuple[Callable[[Experts], Any], ...]:
    """First product, second product, and the activation between them."""
    rows = given.rows
    gate_up = torch.randn(given.x.codes.shape[0], 2 * HIDDEN, device=DEVICE).bfloat16()

    def activate(layer: Experts) -> Any:
        return activate_quantized(
            Gate.CLAMPED_SWIGLU, gate_up, FP8, layout=ScaleLayout.COLUMNS, group_rows=rows.layout.rows_per_expert,
            limit=LIMIT, bias=layer.gate_up_proj_bias, rows=rows.listed,
        )  # fmt: skip

    return (
        lambda layer: fp8_expert_linear(given.x, layer.gate_up_proj.weight, rows, torch.bfloat16),
        lambda layer: fp8_expert_linear(given.x, layer.down_proj.weight, rows, torch.bfloat16),
        activate,
    )


def per_layer(layers: list[MoE], call: Callable[[MoE], Any]) -> float:
    """Microseconds a layer; each with its own weights, so that none are left in L2 from the time before."""

    def all_layers() -> None:
        for layer in layers:
            call(layer)

    return time_call(all_layers, calls=2, replays=20) / len(layers)
