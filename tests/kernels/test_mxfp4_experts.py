"""MXFP4 experts against float64 on the dequantised weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.kernels.mxfp4_experts import ExpertRows, expert_linear, expert_swiglu
from rose_dist.kernels.mxfp4_layout import PackedMxfp4, pack_mxfp4
from tests.kernels.test_mxfp4_layout import random_mxfp4

LIMIT = 7.0


class Layer:
    """Weights, bias and rows of a few experts, and the exact results."""

    def __init__(self, counts: list[int], columns: int, rows: int, *, padding: int = 0, bias: bool = True) -> None:
        experts = len(counts)
        self.blocks, self.scales = random_mxfp4(experts, rows, columns // 32, low=118, high=124)
        self.bias = (torch.randn(experts, rows) * 2).bfloat16() if bias else None
        self.counts = torch.tensor(counts, dtype=torch.int32)
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count + padding)
        self.offsets = torch.tensor(starts, dtype=torch.int64)
        self.x = torch.randn(starts[-1], columns).bfloat16()
        self.live = [r for e, count in enumerate(counts) for r in range(starts[e], starts[e] + count)]

    def exact(self, *, gated: bool) -> torch.Tensor:
        weights = dequantize_mxfp4(self.blocks, self.scales, torch.float32).double()
        out = torch.zeros(self.x.shape[0], weights.shape[1] // (2 if gated else 1), dtype=torch.float64)
        for expert, count in enumerate(self.counts.tolist()):
            part = slice(int(self.offsets[expert]), int(self.offsets[expert]) + count)
            y = self.x[part].double() @ weights[expert].T
            if self.bias is not None:
                y = y + self.bias[expert].double()
            if gated:
                gate, linear = y[:, 0::2].clamp(max=LIMIT), y[:, 1::2].clamp(-LIMIT, LIMIT)
                y = gate / (1 + (-1.702 * gate).exp()) * (linear + 1)
            out[part] = y
        return out

    def packed(self, gpu: Any) -> PackedMxfp4:
        packed = pack_mxfp4(self.blocks, self.scales)
        return PackedMxfp4(gpu.tensor(packed.data), gpu.tensor(packed.rescale))

    def run(self, gpu: Any, *, gated: bool, most: int = 0) -> torch.Tensor:
        rows = ExpertRows(gpu.tensor(self.counts), gpu.tensor(self.offsets), most or int(self.counts.max()))
        bias = None if self.bias is None else gpu.tensor(self.bias)
        x, weight = gpu.tensor(self.x), self.packed(gpu)
        out = expert_swiglu(x, weight, bias, rows, limit=LIMIT) if gated else expert_linear(x, weight, bias, rows)
        return gpu.plain(out)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, scale: float) -> None:
    error = (got.double() - wanted).abs()
    assert (error <= wanted.abs() * 2**-8 + scale).all(), error.max()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("counts", "most"),
    [([1, 0, 0, 1], 1), ([0, 3, 4], 4), ([7, 8, 0, 1], 8), ([9, 17, 0, 2], 17)],
    ids=str,
)
def test_matches_float64(gpu: Any, gated: bool, counts: list[int], most: int) -> None:
    layer = Layer(counts, 128, 96)
    assert_close(layer.run(gpu, gated=gated, most=most)[layer.live], layer.exact(gated=gated)[layer.live], 1e-4)
