"""Gated activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import block_scale, jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import (
    TYPES,
    Boolean,
    Float32,
    Int32,
    Int64,
    Stream,
    const_expr,
    cute,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.formats import BlockOutput
from rose_dist.kernels.row_tiling import RowShape, RowTiling, tile
from rose_dist.kernels.swiglu import Gate


@cache
def launcher(
    arch: Arch, gate: Gate, dtype: torch.dtype, columns: int, shape: RowShape, vector_bytes: int, bias: bool,
    output: BlockOutput | None, listed: bool,
) -> jit.Launcher:  # fmt: skip
    return jit.load(activation_kernel(arch, gate, dtype, columns, shape, vector_bytes, bias, output, listed))


def activation_kernel(
    arch: Arch, gate: Gate, dtype: torch.dtype, columns: int, shape: RowShape, vector_bytes: int, bias: bool,
    output: BlockOutput | None, listed: bool = False,
) -> GatedActivation:  # fmt: skip
    side_by_side = 2 if gate is Gate.CLAMPED_SWIGLU else 1
    block = 0 if output is None else output.fmt.block
    count = shape.lane_elements(columns, side_by_side * vector_bytes, side_by_side * dtype.itemsize, block)
    group = 1 if output is None else output.lanes(count)
    tiling = tile(columns // count, 2 * count * dtype.itemsize, shape, group=group)
    return GatedActivation(arch, gate, dtype, tiling, count, vector_bytes, bias, output, listed)


@dataclass(frozen=True)
class GatedActivation(jit.Kernel):
    """A vector of results a lane, from two vectors of inputs."""

    gate: Gate
    dtype: torch.dtype
    tiling: RowTiling
    count: int
    """Results that a lane takes at a time."""
    vector_bytes: int
    bias: bool
    output: BlockOutput | None
    listed: bool = False
    """A list says which rows to work on."""

    @cute.jit
    def __call__(
        self, gate_up: Int64, stride: Int64, bias: Int64, experts: Int64, first_expert: Int32, listed: Int64,
        live_rows: Int64, out: Int64, scales: Int64, padded_rows: Int32, global_scale: Int64, rows: Int32,
        alpha: Float32, limit: Float32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: listed int32 [rows], if `self.listed`: the rows of `gate_up`, −1 for none; experts int32 [rows] or
        0, live_rows int32 [1] or 0.
        """
        blocks = (rows + (self.tiling.rows_per_block - 1)) // self.tiling.rows_per_block
        self.kernel(
            gate_up, stride, bias, experts, first_expert, listed, live_rows, out, scales, padded_rows, global_scale,
            rows, alpha, limit,
        ).launch(
            grid=[blocks * self.tiling.splits, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, gate_up: Int64, stride: Int64, bias: Int64, experts: Int64, first_expert: Int32, listed: Int64,
        live_rows: Int64, out: Int64, scales: Int64, padded_rows: Int32, global_scale: Int64, rows: Int32,
        alpha: Float32, limit: Float32,
    ) -> None:  # fmt: skip
        tiling, width, count = self.tiling, self.dtype.itemsize, self.count
        columns = tiling.row_vectors * count
        lane, place = vector.row_of_thread(tiling)
        ptx.exit_if(place >= rows)
        # What comes next waits for this launch before it reads what this or an earlier one writes.
        cute.arch.griddepcontrol_launch_dependents()
        places = [vector.place(tiling, lane, i) for i in range(tiling.vectors)]
        # Which rows, and whose bias, the launch before does not write.
        live = vector.live_rows(live_rows, rows)
        row, expert, biases = place, Int32(0), []
        if const_expr(self.listed):
            row = vector.scalar(listed + Int64(place) * 4, Int32)[0]
        if experts != 0:
            expert = vector.scalar(experts + Int64(place) * 4, Int32)[0] - first_expert
        if const_expr(self.bias):
            # Of a place without a row the expert may be another rank's, or none.
            there = Boolean(row >= 0) & (place < live)
            held = Int64(vector.select(there, vector.max_of(expert, Int32(0)), Int32(0)))
            biases = self.load_pairs(bias + held * (2 * columns * width), places, columns)
        cute.arch.griddepcontrol_wait()
        ptx.exit_if(place >= live)
        ptx.exit_if((expert < 0) | (row < 0))
        tensor_scale = block_scale.read_global_scale(self.output, global_scale)
        inputs = self.load_pairs(gate_up + Int64(row) * stride * width, places, columns)
        for i in range_constexpr(tiling.vectors):
            valid = Boolean(vector.in_row(tiling, lane, i))
            results = self.results(inputs[i], biases[i : i + 1], alpha, limit)
            if const_expr(self.output is not None):
                block_scale.store(
                    self.output, self.arch, results, out, scales, row, places[i], padded_rows, valid, tensor_scale
                )
            else:
                vector.store_scalars_if(
                    valid, out + (Int64(row) * columns + places[i] * count) * width, results, TYPES[self.dtype],
                    self.vector_bytes,
                )  # fmt: skip

    def load_pairs(self, row: Any, places: Any, columns: Any) -> Any:
        """For each place the two vectors that a vector of results comes from."""
        interleaved = self.gate is Gate.CLAMPED_SWIGLU
        dtype, count, width = TYPES[self.dtype], self.count, self.vector_bytes
        part = count * self.dtype.itemsize
        step = part * (2 if interleaved else 1)
        apart = part if interleaved else columns * self.dtype.itemsize
        return [
            [vector.load(row + place * step + i * apart, dtype, count, width) for i in range(2)] for place in places
        ]

    def results(self, inputs: Any, biases: Any, alpha: Any, limit: Any) -> Any:
        """One fp32 a pair of inputs; `biases` holds a pair of vectors or nothing."""
        wide = [part.to(Float32) for part in inputs]
        for bias in biases:
            wide = [part + b.to(Float32) for part, b in zip(wide, bias, strict=True)]
        flat = [part[i] for part in wide for i in range(self.count)]
        if self.gate is Gate.SILU:
            return [_silu(a, Float32(1.0)) * b for a, b in zip(flat[: self.count], flat[self.count :], strict=True)]
        return [clamped_swiglu_value(a, b, alpha, limit) for a, b in zip(flat[0::2], flat[1::2], strict=True)]


def clamped_swiglu_value(gate: Any, linear: Any, alpha: Any, limit: Any) -> Any:
    """`Gate.CLAMPED_SWIGLU` of one pair of fp32."""
    left = cute.arch.fmin(gate, limit, nan=True)
    right = cute.arch.fmax(cute.arch.fmin(linear, limit, nan=True), Float32(0.0) - limit, nan=True)
    share = _silu(left, alpha)
    return ptx.multiply_add(share, right, share)


def _silu(x: Any, alpha: Any) -> Any:
    """x · sigmoid(alpha · x)."""
    power = cute.math.exp2(x * (alpha * Float32(-1.0 / math.log(2.0))), fastmath=True)
    return x * cute.arch.rcp_approx(Float32(1.0) + power)
