"""Experts in MXFP4 for tests: weights, rows, and what float64 makes of them."""

from __future__ import annotations

from typing import Any

import torch

from rose_dist.kernels import mxfp4_experts
from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.kernels.mxfp4_experts import (
    ExpertLayer,
    ExpertRows,
    expert_linear,
    expert_swiglu,
    launch_warpgroup_gemm,
)
from rose_dist.kernels.mxfp4_layout import PackedMxfp4, pack_mxfp4
from rose_dist.kernels.row_groups import GROUPS, empty_groups, group_rows
from rose_dist.kernels.variants import EXPERT_GEMM_ROWS
from tests.kernels.test_mxfp4_layout import random_mxfp4

LIMIT = 7.0
POISON = -23131
"""0xA5A5: never written."""


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
        self.x = torch.randn(max(starts[-1], 1), columns).bfloat16()
        self.live = [r for e, count in enumerate(counts) for r in range(starts[e], starts[e] + count)]

    def exact(self, x: torch.Tensor | None = None, *, gated: bool) -> torch.Tensor:
        x = self.x if x is None else x
        weights = dequantize_mxfp4(self.blocks, self.scales, torch.float32).double()
        out = torch.zeros(x.shape[0], weights.shape[1] // (2 if gated else 1), dtype=torch.float64)
        for expert, count in enumerate(self.counts.tolist()):
            part = slice(int(self.offsets[expert]), int(self.offsets[expert]) + count)
            y = x[part].double() @ weights[expert].T
            if self.bias is not None:
                y = y + self.bias[expert].double()
            if gated:
                gate, linear = y[:, 0::2].clamp(max=LIMIT), y[:, 1::2].clamp(-LIMIT, LIMIT)
                y = gate / (1 + (-1.702 * gate).exp()) * (linear + 1)
            out[part] = y
        return out

    def packed(self, gpu: Any) -> PackedMxfp4:
        packed = pack_mxfp4(self.blocks, self.scales)
        return PackedMxfp4(*(gpu.tensor(t) for t in (packed.data, packed.rescale, packed.tops)))

    def expert_rows(self, gpu: Any, most: int = 0) -> ExpertRows:
        return ExpertRows(gpu.tensor(self.counts), gpu.tensor(self.offsets), most or int(self.counts.max()))

    def run(self, gpu: Any, *, gated: bool, most: int = 0) -> torch.Tensor:
        bias = None if self.bias is None else gpu.tensor(self.bias)
        x, weight, rows = gpu.tensor(self.x), self.packed(gpu), self.expert_rows(gpu, most)
        if gpu.info.arch.hopper and rows.most >= EXPERT_GEMM_ROWS:
            return self.run_groups(gpu, x, ExpertLayer(weight, bias), rows, gated=gated)
        out = expert_swiglu(x, weight, bias, rows, limit=LIMIT) if gated else expert_linear(x, weight, bias, rows)
        return gpu.plain(out)

    def run_groups(
        self, gpu: Any, x: torch.Tensor, layer: ExpertLayer, rows: ExpertRows, *, gated: bool
    ) -> torch.Tensor:
        """One layer as `expert_mlp` has it on Hopper; rows of nobody are poison."""
        shape, outputs = mxfp4_experts.WARPGROUP_SHAPES.select(rows.most), layer.weight.rows
        groups = group_rows(x, rows.counts, rows.offsets, torch.bfloat16).cells
        device = torch.device("cuda", 0)
        options = {"alpha": 1.702, "limit": LIMIT}
        if not gated:
            out = torch.empty(x.shape[0], outputs, dtype=torch.bfloat16, device=device)
            launch_warpgroup_gemm(groups, layer, rows, out, shape, gated=False, **options)
            return gpu.plain(out)
        h = empty_groups(groups.shape[0], outputs // 2, torch.bfloat16, device)
        launch_warpgroup_gemm(groups, layer, rows, h, shape, gated=True, **options)
        found, out = (
            gpu.plain(h),
            torch.full((x.shape[0], outputs // 2), POISON, dtype=torch.int16).view(torch.bfloat16),
        )
        starts = GROUPS.starts(self.counts).tolist()
        slots = [starts[e] + i for e, count in enumerate(self.counts.tolist()) for i in range(count)]
        for row, slot in zip(self.live, slots, strict=True):
            out[row] = found[slot // 8, :, slot % 8].flatten()
        assert (found.view(torch.int16) == POISON).sum() >= found.numel() - len(slots) * outputs // 2
        return out


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.double() - wanted).abs()
    assert (error <= wanted.abs() * 2**-8 + 1e-4).all(), error.max()
