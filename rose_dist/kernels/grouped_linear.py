"""One linear layer an expert over rows that are packed by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels.linear import linear, row_products, splits
from rose_dist.kernels.mxfp4_experts import ExpertRows


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
    counts = rows.counts.tolist()
    held = [(start, expert) for expert, start in enumerate(rows.offsets.tolist()[: len(counts)]) if counts[expert]]
    if x.dtype == torch.float32 and splits(weight):
        row_products(x, weight, bias, y, [pair for pair in held if counts[pair[1]] == 1])
        held = [pair for pair in held if counts[pair[1]] > 1]
    for start, expert in held:
        part = slice(start, start + counts[expert])
        y[part] = linear(x[part], weight[expert], None if bias is None else bias[expert])
    return y


def on_device(x: Tensor, weight: Tensor, bias: Tensor | None, rows: ExpertRows) -> Tensor:
    """`grouped_linear` by torch's grouped product, with nothing read by the host."""
    ends = rows.offsets[1:].int()
    y: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    if bias is None:
        return y
    every = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    return y.add_(bias[torch.searchsorted(ends, every, right=True).clamp_(max=weight.shape[0] - 1)])
