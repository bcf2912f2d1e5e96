"""Root-mean-square normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale every row of `x` to unit root mean square, times `weight`.

    Args:
        x: [rows, hidden], fp32 or bf16.
        weight: [hidden].
        eps: added to the mean square.

    Returns:
        [rows, hidden] of `x`'s dtype. Computed in fp32: x · rsqrt(mean(x²) + eps) · weight, then rounded once.
    """
    if x.dtype == weight.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)`, and the sum as the next residual.

    The sum is rounded to the residual's dtype before it is normalised, as the reference models do.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
