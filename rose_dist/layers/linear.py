"""Linear layers, whole or one tensor-parallel rank's part."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rose_dist.kernels.projection import project
from rose_dist.layers.weights import Piece, Weight, copy_into, length, parameter


class Linear(nn.Module):
    """y = x Wᵀ + b over a rectangle of W.

    A column-parallel layer holds some rows of W and b, and gives that part of y. A row-parallel layer holds some
    columns, takes that part of x, and gives a summand of y: exactly one rank may add the bias.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        dtype: torch.dtype,
        rows: slice | None = None,
        columns: slice | None = None,
        bias: bool = True,
        adds_bias: bool = True,
    ) -> None:
        """
        Args:
            inputs, outputs: the checkpoint's whole dimensions.
            rows, columns: this rank's part of the weight [outputs, inputs]; None is all.
            bias: whether the checkpoint has one.
            adds_bias: False on the row-parallel ranks that leave it to another.
        """
        super().__init__()
        self.shape = (outputs, inputs)
        self.part = (rows or slice(0, outputs), columns or slice(0, inputs))
        self.weight = parameter(length(self.part[0]), length(self.part[1]), dtype=dtype)
        self.has_bias = bias
        self.bias = parameter(length(self.part[0]), dtype=dtype) if bias and adds_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight((Piece.of(prefix + "weight", self.shape, *self.part),), copy_into(self.weight))
        if self.has_bias:
            store = None if self.bias is None else copy_into(self.bias)
            yield Weight((Piece.of(prefix + "bias", self.shape[:1], self.part[0]),), store)


class PackedLinear(nn.Module):
    """Several column-parallel layers over the same input as one product, e.g. q_proj, k_proj and v_proj.

    Their checkpoint names stand beside this module's own: `self_attn.qkv_proj` reads `self_attn.q_proj.weight`, ….
    """

    def __init__(self, inputs: int, members: dict[str, tuple[int, slice]], *, dtype: torch.dtype, bias: bool) -> None:
        """
        Args:
            members: name → (whole output rows, this rank's rows), in the order of the packed output.
        """
        super().__init__()
        self.inputs = inputs
        self.members = members
        self.sizes = [length(rows) for _, rows in members.values()]
        self.weight = parameter(sum(self.sizes), inputs, dtype=dtype)
        self.bias = parameter(sum(self.sizes), dtype=dtype) if bias else None

    def weights(self, prefix: str) -> Iterator[Weight]:
        parent = prefix.rsplit(".", 2)[0]
        packed = torch.split(self.weight, self.sizes)
        biases = [None] * len(self.sizes) if self.bias is None else torch.split(self.bias, self.sizes)
        for (name, (outputs, rows)), weight, bias in zip(self.members.items(), packed, biases, strict=True):
            yield Weight((Piece.of(f"{parent}.{name}.weight", (outputs, self.inputs), rows),), copy_into(weight))
            if bias is not None:
                yield Weight((Piece.of(f"{parent}.{name}.bias", (outputs,), rows),), copy_into(bias))
