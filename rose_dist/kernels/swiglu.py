"""Gated activations of MoE experts and dense MLPs, with bias before and quantisation after them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rose_dist.kernels import block_scale, checks, jit, launch, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.block_scale import BlockOutput
from rose_dist.kernels.dsl import (
    TYPES, Boolean, Float32, Int32, Int64, Stream, const_expr, cute, range_constexpr,
)  # fmt: skip
from rose_dist.kernels.formats import BlockFormat, ScaleLayout
from rose_dist.kernels.quantize import quantize
from rose_dist.kernels.variants import ROW_SHAPES, RowShape, RowTiling, tile

ALPHA = 1.702
"""Slope of the gate's sigmoid, fixed by the model family (openai/gpt-oss, gpt_oss/torch/model.py)."""


class Gate(enum.Enum):
    """Which activation, and where its two inputs stand in a row."""

    CLAMPED_SWIGLU = "clamped_swiglu"
    """gate · sigmoid(alpha · gate) · (linear + 1), gate ≤ limit, |linear| ≤ limit; even columns gate, odd linear."""
    SILU = "silu"
    """gate · sigmoid(gate) · up; the first half of a row gate, the second up."""


@dataclass(frozen=True)
class Rows:
    """Which rows are live, and whose bias they take. A row that is not live is not written."""

    live: Tensor | None = None
    """int32 [1]: rows from there on are not live."""
    experts: Tensor | None = None
    """int32 [rows]: each row's expert; −1: not live."""


ALL_ROWS = Rows()


def clamped_swiglu(
    gate_up: Tensor, *, alpha: float = ALPHA, limit: float, bias: Tensor | None = None, rows: Rows = ALL_ROWS
) -> Tensor:
    """gate · sigmoid(alpha · gate) · (linear + 1), with gate ≤ limit and |linear| ≤ limit.

    Args:
        gate_up: [rows, 2 · intermediate]; even columns are gates, odd ones linear.
        limit: the checkpoint's `swiglu_limit`; the gate is clamped from above only.
        bias: [experts, 2 · intermediate], added before the activation; row r takes that of `rows.experts[r]`.

    Returns:
        [rows, intermediate] of the same dtype. On a GPU computed in fp32 and rounded once; dead rows are unwritten.
    """
    return _activate(Gate.CLAMPED_SWIGLU, gate_up, alpha, limit, bias, rows)


def silu_mul(gate_up: Tensor, *, rows: Rows = ALL_ROWS) -> Tensor:
    """gate · sigmoid(gate) · up.

    Args:
        gate_up: [rows, 2 · intermediate]; the first half of the columns are gates.

    Returns:
        [rows, intermediate] of the same dtype, as `clamped_swiglu`.
    """
    return _activate(Gate.SILU, gate_up, 1.0, math.inf, None, rows)


def activate_quantized(
    gate: Gate,
    gate_up: Tensor,
    format: BlockFormat,
    *,
    layout: ScaleLayout = ScaleLayout.ROWS,
    global_scale: Tensor | None = None,
    alpha: float = ALPHA,
    limit: float = math.inf,
    bias: Tensor | None = None,
    rows: Rows = ALL_ROWS,
) -> tuple[Tensor, Tensor]:
    """`quantize` of an activation's fp32 result; codes and scales as `quantize` gives them, dead rows unwritten."""
    if gate is Gate.SILU:
        alpha, limit = 1.0, math.inf
    checks.global_scale(format, global_scale, gate_up.device)
    columns = gate_up.shape[1] // 2
    if not gate_up.is_cuda:
        wide = _reference(gate, gate_up, alpha, limit, bias, rows)
        return quantize(wide, format, layout=layout, global_scale=global_scale)
    codes, scales = launch.empty_quantized(format, layout, gate_up.shape[0], columns, gate_up.device)
    output = BlockOutput(format, layout, columns)
    _launch(gate, gate_up, alpha, limit, bias, rows, codes, output=output, scales=scales, global_scale=global_scale)
    return codes, scales


def _activate(gate: Gate, gate_up: Tensor, alpha: float, limit: float, bias: Tensor | None, rows: Rows) -> Tensor:
    if not gate_up.is_cuda:
        if gate is Gate.CLAMPED_SWIGLU and bias is None:
            left = gate_up[..., 0::2].clamp(max=limit)
            right = gate_up[..., 1::2].clamp(min=-limit, max=limit)
            return torch.sigmoid(left * alpha).mul_(left).mul_(right + 1)
        return _reference(gate, gate_up, alpha, limit, bias, rows).to(gate_up.dtype)
    checks.shape("gate_up", gate_up, None, None)
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate, gate_up, alpha, limit, bias, rows, out)
    return out


def _reference(gate: Gate, gate_up: Tensor, alpha: float, limit: float, bias: Tensor | None, rows: Rows) -> Tensor:
    wide = gate_up.float()
    if bias is not None:
        assert rows.experts is not None
        wide = wide + bias.float()[rows.experts.clamp(min=0).long()]
    left, right = (wide[:, 0::2], wide[:, 1::2]) if gate is Gate.CLAMPED_SWIGLU else wide.chunk(2, -1)
    if gate is Gate.CLAMPED_SWIGLU:
        left, right = left.clamp(max=limit), right.clamp(min=-limit, max=limit) + 1
    return left * torch.sigmoid(left * alpha) * right


def _launch(
    gate: Gate, gate_up: Tensor, alpha: float, limit: float, bias: Tensor | None, rows: Rows, out: Tensor,
    *, output: BlockOutput | None = None, scales: Tensor | None = None, global_scale: Tensor | None = None,
) -> None:  # fmt: skip
    _check(gate_up, bias, rows)
    count, columns = gate_up.shape[0], gate_up.shape[1] // 2
    if count == 0:
        return
    device = launch.device(gate_up)
    size = gate_up.element_size()
    pointers = [t.data_ptr() for t in (gate_up, out, bias) if t is not None]
    vector_bytes = vector.widest(device.arch, gate_up.stride(0) * size, columns * size, *pointers)
    shape = ROW_SHAPES.select(count // device.sms)
    launcher = _launcher(device.arch, gate, gate_up.dtype, columns, shape, vector_bytes, bias is not None, output)
    padded_rows = 0 if output is None else output.layout.padded_rows(count)
    launch.run(
        launcher, gate_up, gate_up, gate_up.stride(0), bias, rows.experts, rows.live, out, scales, padded_rows,
        global_scale, count, alpha, limit,
    )  # fmt: skip


def _check(gate_up: Tensor, bias: Tensor | None, rows: Rows) -> None:
    checks.shape("gate_up", gate_up, None, None)
    checks.dtype("gate_up", gate_up, torch.bfloat16, torch.float16)
    checks.rows("gate_up", gate_up)
    checks.multiple("gate_up's columns", gate_up.shape[1], 32, "16 results are written at a time")
    checks.live_rows(rows.live, gate_up.device)
    if rows.experts is not None:
        checks.shape("rows.experts", rows.experts, gate_up.shape[0])
        checks.dtype("rows.experts", rows.experts, torch.int32)
        checks.same_device("rows.experts", rows.experts, gate_up.device)
        checks.dense("rows.experts", rows.experts, 4)
    if bias is not None:
        if rows.experts is None:
            raise checks.fail("rows.experts", "is needed to choose each row's bias")
        checks.shape("bias", bias, None, gate_up.shape[1])
        checks.dtype("bias", bias, gate_up.dtype)
        checks.same_device("bias", bias, gate_up.device)
        checks.dense("bias", bias)


@cache
def _launcher(
    arch: Arch, gate: Gate, dtype: torch.dtype, columns: int, shape: RowShape, vector_bytes: int, bias: bool,
    output: BlockOutput | None,
) -> jit.Launcher:  # fmt: skip
    count = vector_bytes // dtype.itemsize
    tiling = tile(columns // count, 2 * vector_bytes, shape, group=1 if output is None else output.lanes(count))
    return jit.load(GatedActivation(arch, gate, dtype, tiling, vector_bytes, bias, output))


@dataclass(frozen=True)
class GatedActivation(jit.Kernel):
    """A vector of results a lane, from two vectors of inputs."""

    gate: Gate
    dtype: torch.dtype
    tiling: RowTiling
    vector_bytes: int
    bias: bool
    output: BlockOutput | None

    @property
    def count(self) -> int:
        """Elements of a vector."""
        return self.vector_bytes // self.dtype.itemsize

    @cute.jit
    def __call__(
        self, gate_up: Int64, stride: Int64, bias: Int64, experts: Int64, live_rows: Int64, out: Int64, scales: Int64,
        padded_rows: Int32, global_scale: Int64, rows: Int32, alpha: Float32, limit: Float32, stream: Stream,
    ):  # fmt: skip
        blocks = (rows + (self.tiling.rows_per_block - 1)) // self.tiling.rows_per_block
        self.kernel(
            gate_up, stride, bias, experts, live_rows, out, scales, padded_rows, global_scale, rows, alpha, limit
        ).launch(grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self, gate_up: Int64, stride: Int64, bias: Int64, experts: Int64, live_rows: Int64, out: Int64, scales: Int64,
        padded_rows: Int32, global_scale: Int64, rows: Int32, alpha: Float32, limit: Float32,
    ):  # fmt: skip
        tiling, width, count = self.tiling, self.dtype.itemsize, self.count
        columns = tiling.row_vectors * count
        lane, row = vector.row_of_thread(tiling)
        ptx.exit_if(row >= rows)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        source = gate_up + Int64(row) * stride * width
        places = [vector.place(tiling, lane, i) for i in range(tiling.vectors)]
        # With few rows the wait for what says that a row is live costs more than reading a dead one.
        eager = tiling.vectors == 1
        inputs = [self.load_pair(source, place, columns) for place in places] if eager else None
        live = vector.live_rows(live_rows, rows)
        expert = Int32(0)
        if experts != 0:
            expert = vector.scalar(experts + Int64(row) * 4, Int32)[0]
        ptx.exit_if(row >= live)
        ptx.exit_if(expert < 0)
        tensor_scale = block_scale.read_global_scale(self.output, global_scale)
        if const_expr(not eager):
            inputs = [self.load_pair(source, place, columns) for place in places]
        biases = None
        if const_expr(self.bias):
            bias_source = bias + Int64(expert) * (2 * columns * width)
            biases = [self.load_pair(bias_source, place, columns) for place in places]
        for i in range_constexpr(tiling.vectors):
            valid = Boolean(vector.in_row(tiling, lane, i))
            results = self.results(inputs[i], biases[i] if self.bias else None, alpha, limit)
            if const_expr(self.output is not None):
                block_scale.store(
                    self.output, self.arch, results, out, scales, row, places[i], padded_rows, valid, tensor_scale
                )
            else:
                vector.store_scalars_if(
                    valid, out + (Int64(row) * columns + places[i] * count) * width, results, TYPES[self.dtype],
                    self.vector_bytes,
                )  # fmt: skip

    def load_pair(self, row, index, columns):  # type: ignore[no-untyped-def]
        """The two vectors that a vector of results comes from."""
        first = index * (2 * self.vector_bytes) if self.gate is Gate.CLAMPED_SWIGLU else index * self.vector_bytes
        apart = self.vector_bytes if self.gate is Gate.CLAMPED_SWIGLU else columns * self.dtype.itemsize
        return [
            vector.load(row + first + i * apart, TYPES[self.dtype], self.count, self.vector_bytes) for i in range(2)
        ]

    def results(self, inputs, biases, alpha, limit):  # type: ignore[no-untyped-def]
        """One fp32 a pair of inputs."""
        wide = [part.to(Float32) for part in inputs]
        if biases is not None:
            wide = [part + b.to(Float32) for part, b in zip(wide, biases, strict=True)]
        flat = [part[i] for part in wide for i in range(self.count)]
        if self.gate is Gate.SILU:
            return [_silu(a, Float32(1.0)) * b for a, b in zip(flat[: self.count], flat[self.count :], strict=True)]
        results = []
        for gate, linear in zip(flat[0::2], flat[1::2], strict=True):
            left = cute.arch.fmin(gate, limit, nan=True)
            right = cute.arch.fmax(cute.arch.fmin(linear, limit, nan=True), Float32(0.0) - limit, nan=True)
            results.append(_silu(left, alpha) * (right + Float32(1.0)))
        return results


def _silu(x, alpha):  # type: ignore[no-untyped-def]
    """x · sigmoid(alpha · x)."""
    power = cute.math.exp2(x * (alpha * Float32(-1.0 / math.log(2.0))), fastmath=True)
    return x * cute.arch.rcp_approx(Float32(1.0) + power)
