"""The experts of a mixture-of-experts block, or one rank's part of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rose_dist.kernels import mxfp4_e4m3
from rose_dist.kernels.fp8_experts import Fp8Rows, fp8_expert_linear, fp8_expert_swiglu
from rose_dist.kernels.grouped_linear import grouped_linear
from rose_dist.kernels.mxfp4_experts import ExpertLayer, ExpertRows, expert_mlp
from rose_dist.kernels.swiglu import clamped_swiglu
from rose_dist.layers.expert_matrices import (
    DenseMatrix,
    Fp8Matrix,
    MoeActivations,
    MoeWeights,
    PackedMatrix,
    expert_matrix,
)
from rose_dist.layers.weights import Piece, Weight, copy_into, length, parameter, share

MXFP4_BLOCK = 32
"""Values that share a scale; slices of the intermediate dimension are cut at block borders."""


@dataclass(frozen=True)
class ExpertShare:
    """The experts, and the slice of each one's intermediate dimension, that one rank holds.

    experts: expert ids, in the order of the rank's slots.
    slices, slice_index: over how many ranks an expert is spread, and which of them this is.
    """

    num_experts: int
    experts: Sequence[int]
    slices: int
    slice_index: int

    def intermediate(self, size: int) -> slice:
        unit = MXFP4_BLOCK if size % MXFP4_BLOCK == 0 else 1
        return share(size, self.slices, self.slice_index, unit)


class Experts(nn.Module):
    """GPT-OSS experts: W2 · swiglu(W1 x + b1) + b2 each, over rows packed by expert."""

    def __init__(
        self, hidden: int, intermediate: int, held: ExpertShare, *, limit: float, stored: MoeWeights,
        kept: MoeWeights, dtype: torch.dtype, activations: MoeActivations = "bf16",
    ) -> None:  # fmt: skip
        """
        Args:
            hidden, intermediate: the checkpoint's whole dimensions.
            limit: clamp of the activation.
            stored: what the checkpoint holds.
            kept: what this layer holds; MXFP4 only where it is stored too.
            activations: FP8 only with MXFP4.
        """
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.held = held
        self.limit = limit
        self.stored = stored
        self.part = held.intermediate(intermediate)
        self.dtype = dtype
        self.rows_in_fp8 = activations == "fp8"
        count, width = len(held.experts), length(self.part)
        self.gate_up_proj = expert_matrix(kept, count, 2 * width, hidden, dtype)
        self.gate_up_proj_bias = parameter(count, 2 * width, dtype=dtype)
        self.down_proj = expert_matrix(kept, count, hidden, width, dtype)
        # Of an expert's slices the first adds the bias: the sum over the ranks then holds it once.
        self.down_proj_bias = parameter(count, hidden, dtype=dtype) if held.slice_index == 0 else None

    @property
    def late_bias(self) -> Tensor | None:
        """What `forward` leaves to combine: [experts, hidden], to be added to each expert's rows."""
        return self.down_proj_bias if isinstance(self.down_proj, Fp8Matrix) else None

    @property
    def takes_handover(self) -> bool:
        """Whether `forward` takes a single token's row and experts by `ExpertRows.handover` on a GPU: with all experts
        here. Where ranks share them it has not been measured.
        """
        first, second = self.gate_up_proj, self.down_proj
        packed = isinstance(first, PackedMatrix) and isinstance(second, PackedMatrix)
        return packed and length(self.part) == self.hidden and len(self.held.experts) == self.held.num_experts

    def forward(self, x: Tensor, rows: ExpertRows, scales: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:
        """[rows, hidden] packed by local expert → [rows, hidden], to which `late_bias` is to be added. With FP8
        matrices rows may be quantised already, as `Fp8Rows` says; on a GPU they must be. ahead: weights that a later
        launch reads, which few rows leave time to fetch.
        """
        first, second = self.gate_up_proj, self.down_proj
        b1, b2 = self.gate_up_proj_bias, self.down_proj_bias
        if isinstance(first, PackedMatrix) and isinstance(second, PackedMatrix):
            layers = ExpertLayer(first.packed, b1), ExpertLayer(second.packed, b2)
            if self.rows_in_fp8 and mxfp4_e4m3.takes(rows):
                return mxfp4_e4m3.expert_mlp_e4m3(x, *layers, rows, limit=self.limit)
            return expert_mlp(x, *layers, rows, limit=self.limit, ahead=ahead)
        if isinstance(first, Fp8Matrix) and isinstance(second, Fp8Matrix):
            given = Fp8Rows.of(x) if scales is None else Fp8Rows(x, scales)
            quantised = fp8_expert_swiglu(given, first.weight, b1, rows, limit=self.limit, dtype=self.dtype)
            return fp8_expert_linear(quantised, second.weight, rows, self.dtype)
        assert isinstance(first, DenseMatrix)
        assert isinstance(second, DenseMatrix)
        activated = clamped_swiglu(grouped_linear(x, first.weight, b1, rows), limit=self.limit)
        return grouped_linear(activated, second.weight, b2, rows)

    def weights(self, prefix: str) -> Iterator[Weight]:
        experts, hidden, intermediate = self.held.num_experts, self.hidden, self.intermediate
        both = slice(2 * self.part.start, 2 * self.part.stop)
        matrices = (
            (prefix + "gate_up_proj", (2 * intermediate, hidden), both, slice(0, hidden), self.gate_up_proj),
            (prefix + "down_proj", (hidden, intermediate), slice(0, hidden), self.part, self.down_proj),
        )
        for name, shape, rows, columns, matrix in matrices:
            for local, expert in enumerate(self.held.experts):
                pieces = self._matrix(name, shape, slice(expert, expert + 1), rows, columns)
                yield Weight(pieces, matrix.store_packed(local) if len(pieces) > 1 else matrix.store(local))
            if not self.held.experts:
                yield Weight(self._matrix(name, shape, slice(0, 0), rows, columns), None)
        biases: tuple[tuple[str, tuple[int, int], slice, Tensor | None], ...] = (
            (prefix + "gate_up_proj_bias", (experts, 2 * intermediate), both, self.gate_up_proj_bias),
            (prefix + "down_proj_bias", (experts, hidden), slice(0, hidden), self.down_proj_bias),
        )
        for name, whole, part, bias in biases:
            for local, expert in enumerate(self.held.experts):
                piece = Piece.of(name, whole, slice(expert, expert + 1), part)
                yield Weight((piece,), None if bias is None else copy_into(bias[local : local + 1]))
            if not self.held.experts:
                yield Weight((Piece.of(name, whole, slice(0, 0)),), None)

    def _matrix(
        self, name: str, shape: tuple[int, int], expert: slice, rows: slice, columns: slice
    ) -> tuple[Piece, ...]:
        """The pieces of one expert's matrix [rows, columns]: blocks and scales, or the transposed matrix."""
        experts = self.held.num_experts
        if self.stored == "bf16":
            return (Piece.of(name, (experts, shape[1], shape[0]), expert, columns, rows),)
        blocks = slice(columns.start // MXFP4_BLOCK, columns.stop // MXFP4_BLOCK)
        grid = (experts, shape[0], shape[1] // MXFP4_BLOCK)
        return (
            Piece.of(name + "_blocks", (*grid, MXFP4_BLOCK // 2), expert, rows, blocks, dtype=torch.uint8),
            Piece.of(name + "_scales", grid, expert, rows, blocks, dtype=torch.uint8),
        )
