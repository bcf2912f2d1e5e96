"""The mixture-of-experts block: router, exchange, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rose_dist.comm.all_to_all.protocol import AllToAll, Routing
from rose_dist.kernels.grouped_linear import grouped_linear
from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.kernels.routing import topk_softmax
from rose_dist.kernels.swiglu import clamped_swiglu
from rose_dist.layers.expert_map import ExpertMap
from rose_dist.layers.linear import Linear
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
        self, hidden: int, intermediate: int, held: ExpertShare, *, limit: float, mxfp4: bool, dtype: torch.dtype
    ) -> None:
        """
        Args:
            hidden, intermediate: the checkpoint's whole dimensions.
            limit: clamp of the activation.
            mxfp4: the checkpoint's weights are MXFP4 blocks and scales, dequantised once, at load.
        """
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.held = held
        self.limit = limit
        self.mxfp4 = mxfp4
        self.part = held.intermediate(intermediate)
        count, width = len(held.experts), length(self.part)
        self.gate_up_proj = parameter(count, 2 * width, hidden, dtype=dtype)
        self.gate_up_proj_bias = parameter(count, 2 * width, dtype=dtype)
        self.down_proj = parameter(count, hidden, width, dtype=dtype)
        # Of an expert's slices the first adds the bias: the sum over the ranks then holds it once.
        self.down_proj_bias = parameter(count, hidden, dtype=dtype) if held.slice_index == 0 else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[rows, hidden] packed by local expert, int32 [local experts] → [rows, hidden]."""
        rows = counts.tolist()
        gate_up = grouped_linear(x, self.gate_up_proj, self.gate_up_proj_bias, rows)
        return grouped_linear(clamped_swiglu(gate_up, limit=self.limit), self.down_proj, self.down_proj_bias, rows)

    def weights(self, prefix: str) -> Iterator[Weight]:
        experts, hidden, intermediate = self.held.num_experts, self.hidden, self.intermediate
        both = slice(2 * self.part.start, 2 * self.part.stop)
        matrices = (
            (prefix + "gate_up_proj", (2 * intermediate, hidden), both, slice(0, hidden), self.gate_up_proj),
            (prefix + "down_proj", (hidden, intermediate), slice(0, hidden), self.part, self.down_proj),
        )
        for name, shape, rows, columns, destination in matrices:
            for local, expert in enumerate(self.held.experts):
                pieces = self._matrix(name, shape, slice(expert, expert + 1), rows, columns)
                yield Weight(pieces, self._store(destination[local]))
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
        if not self.mxfp4:
            return (Piece.of(name, (experts, shape[1], shape[0]), expert, columns, rows),)
        blocks = slice(columns.start // MXFP4_BLOCK, columns.stop // MXFP4_BLOCK)
        grid = (experts, shape[0], shape[1] // MXFP4_BLOCK)
        return (
            Piece.of(name + "_blocks", (*grid, MXFP4_BLOCK // 2), expert, rows, blocks, dtype=torch.uint8),
            Piece.of(name + "_scales", grid, expert, rows, blocks, dtype=torch.uint8),
        )

    def _store(self, destination: Tensor) -> Callable[..., object]:
        if self.mxfp4:
            return lambda blocks, scales: destination.copy_(dequantize_mxfp4(blocks[0], scales[0], destination.dtype))
        return lambda matrix: destination.copy_(matrix[0].T)


class MoE(nn.Module):
    """router → dispatch → experts → combine."""

    def __init__(
        self,
        hidden: int,
        experts: Experts,
        top_k: int,
        exchange: AllToAll,
        expert_map: ExpertMap,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.router = Linear(hidden, experts.held.num_experts, dtype=dtype)
        self.experts = experts
        self.top_k = top_k
        self.exchange = exchange
        self.expert_map = expert_map

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden], complete on every rank."""
        ids, weights = topk_softmax(self.router(x), self.top_k)
        dispatched = self.exchange.dispatch(x, Routing(self.expert_map(ids), weights))
        expert_out = self.experts(dispatched.x, dispatched.counts)
        out = torch.empty_like(x)
        self.exchange.combine(expert_out, dispatched, out=out)
        return out
