"""y = x Wᵀ + b. The CPU implementation takes, for few rows, the products that torch's libraries do fast."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FEW_ROWS = 32
"""Up to here W xᵀ beats x Wᵀ in fp32."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    Args:
        x: [rows, in].
        weight: [out, in].
        bias: [out] or None.

    Returns:
        [rows, out].
    """
    rows = x.shape[0]
    if x.is_cuda or x.dtype != torch.float32 or not 0 < rows <= FEW_ROWS:
        return functional.linear(x, weight, bias)
    y = _one_row(x, weight) if rows == 1 else torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


def _one_row(x: Tensor, weight: Tensor) -> Tensor:
    """The matrix-vector product, a slice of W's rows a thread; the library's own runs on one.

    For 49,152 × 576 on 2 cores 1.9 ms instead of 7.0, for 768 × 576 32 us instead of 110.
    """
    out, inputs = weight.shape
    parts = max(2, torch.get_num_threads())
    if out % parts:
        return functional.linear(x, weight)
    # Transposed, not viewed: with strides (1, in) the product goes to the library, with (1, 1) to a loop 3.6 × slower.
    column = x.t().expand(parts, inputs, 1)
    return torch.bmm(weight.view(parts, out // parts, inputs), column).view(1, out)
