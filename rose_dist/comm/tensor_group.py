"""What layers ask of their tensor-parallel group, on whatever device its tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class TensorGroup(Protocol):
    """The ranks that hold the same tokens. Every method is collective: all ranks call it, in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place; the bits are the same on every rank."""

    def add_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        """Add the sum of x Wᵀ + b over the ranks to `residual`, in place; sizes as for `kernels.linear_add`."""

    def gather_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """fp32 [rows, widths[rank]] of every rank side by side, [rows, Σ widths], on the first rank; None elsewhere.
        The widths are those of `even_split`. GPUs whose group is for bf16 round to it.
        """

    def broadcast(self, tensor: Tensor) -> None:
        """The first rank's int64 [n] values into every rank's tensor, in place."""
