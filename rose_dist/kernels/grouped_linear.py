"""One linear layer an expert over rows that are packed by expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rose_dist.kernels import quantize
from rose_dist.kernels.formats import MXFP4
from rose_dist.kernels.linear import linear
from rose_dist.kernels.mxfp4 import BLOCK, dequantize_mxfp4


@dataclass(frozen=True)
class ExpertRows:
    """Which rows belong to which expert; the same object serves all layers over the same rows.

    counts: int32 [experts].
    offsets: int64 [experts + 1]: expert e has rows from `offsets[e]` on; behind the last expert's, rows hold anything.
    """

    counts: Tensor
    offsets: Tensor

    @cached_property
    def on_host(self) -> list[tuple[int, slice]]:
        """Experts that have rows, and which."""
        rows = zip(self.counts.tolist(), self.offsets.tolist(), strict=False)
        return [(expert, slice(start, start + count)) for expert, (count, start) in enumerate(rows) if count]

    @cached_property
    def ends(self) -> Tensor:
        """int32 [experts], the row after each expert's last."""
        return self.offsets[1:].int()

    def experts(self, rows: int) -> Tensor:
        """int64 [rows], each row's expert; any for rows behind the last expert's."""
        every = torch.arange(rows, dtype=torch.int32, device=self.ends.device)
        return torch.searchsorted(self.ends, every, right=True).clamp_(max=self.ends.shape[0] - 1)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: ExpertRows) -> Tensor:
    """y[r] = weight[e] · x[r] + bias[e] for the expert e that row r belongs to.

    Args:
        x: [rows, in].
        weight: [experts, out, in].
        bias: [experts, out] or None.

    Returns:
        [rows, out]; rows of no expert hold anything.
    """
    if x.is_cuda:
        return on_device(x, weight, bias, rows)
    y = x.new_empty(x.shape[0], weight.shape[1])
    for expert, part in rows.on_host:
        y[part] = linear(x[part], weight[expert], None if bias is None else bias[expert])
    return y


def grouped_linear_mxfp4(x: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor | None, rows: ExpertRows) -> Tensor:
    """`grouped_linear` with weights in MXFP4, decoded for this one product: `blocks` uint8 [experts, out, in / 32, 16],
    `scales` uint8 [experts, out, in / 32].
    """
    if x.is_cuda:
        experts, out, groups = scales.shape
        codes, plain = blocks.view(experts * out, groups * BLOCK // 2), scales.view(experts * out, groups)
        weight = quantize.dequantize(codes, plain, MXFP4, dtype=x.dtype)
        return on_device(x, weight.view(experts, out, -1), bias, rows)
    y = x.new_empty(x.shape[0], blocks.shape[1])
    for expert, part in rows.on_host:
        weight = dequantize_mxfp4(blocks[expert], scales[expert], x.dtype)
        y[part] = linear(x[part], weight, None if bias is None else bias[expert])
    return y


def on_device(x: Tensor, weight: Tensor, bias: Tensor | None, rows: ExpertRows) -> Tensor:
    """`grouped_linear` by torch's grouped product, with nothing read by the host."""
    y: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=rows.ends)
    return y if bias is None else y.add_(bias[rows.experts(x.shape[0])])
