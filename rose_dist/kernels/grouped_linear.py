"""One linear layer an expert over rows that are packed by expert."""

from __future__ import annotations

from torch import Tensor

from rose_dist.kernels.linear import linear


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    """y[r] = weight[e] · x[r] + bias[e] for the expert e that row r belongs to.

    Args:
        x: [rows, in]; the rows of expert 0 first, then those of expert 1, …
        weight: [experts, out, in].
        bias: [experts, out] or None.
        counts: rows of each expert, summing to `rows`.

    Returns:
        [rows, out].
    """
    y = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            y[part] = linear(x[part], weight[expert], None if bias is None else bias[expert])
            start += count
    return y
