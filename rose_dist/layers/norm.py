"""RMS norm as a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm
from rose_dist.layers.weights import Piece, Weight, copy_into, parameter


class RMSNorm(nn.Module):
    """[rows, hidden] → [rows, hidden]; with a residual, the sum of both is normalised and returned too."""

    def __init__(self, hidden: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(hidden, dtype=dtype)

    def forward(self, x: Tensor, *, ends_chain: bool = False) -> Tensor:
        """ends_chain: as for `rms_norm`."""
        return rms_norm(x, self.weight, self.eps, ends_chain=ends_chain)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """norm(x + residual) and x + residual."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight((Piece.of(prefix + "weight", tuple(self.weight.shape)),), copy_into(self.weight))
