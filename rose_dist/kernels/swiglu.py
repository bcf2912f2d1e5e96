"""Gated activations of MoE experts and dense MLPs, with bias before and quantisation after them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.formats import BlockFormat, BlockOutput, ScaleLayout
from rose_dist.kernels.quantize import quantize
from rose_dist.kernels.row_tiling import ACTIVATION_SHAPES, QUANTIZED_ACTIVATION_SHAPES

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
    """Which rows are live, and whose bias they take. A row that is not live is not written.

    A GPU reads all of this while the launch before still runs, so that one must not write it, nor the one before that
    if its dependents may begin before it has waited (as those of norms, quantisers and routers).
    """

    live: Tensor | None = None
    """int32 [1]: rows from there on are not live."""
    experts: Tensor | None = None
    """int32 [rows]: each row's expert; −1: not live."""
    places: Tensor | None = None
    """int32 [places]: the rows to work on, −1 for none, so that dead ones cost nothing. `experts` is then by place."""
    first_expert: int = 0
    """`experts` count from there."""


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
    fmt: BlockFormat,
    *,
    layout: ScaleLayout = ScaleLayout.ROWS,
    group_rows: int = 0,
    global_scale: Tensor | None = None,
    alpha: float = ALPHA,
    limit: float = math.inf,
    bias: Tensor | None = None,
    rows: Rows = ALL_ROWS,
) -> tuple[Tensor, Tensor]:
    """`quantize` of an activation's fp32 result; codes and scales as `quantize` gives them, dead rows unwritten.

    With `group_rows`, a multiple of 4 that divides the rows and needs COLUMNS, each group of rows has its scales to
    itself: [groups, group_rows, blocks] with strides (blocks · group_rows, 1, group_rows). On a GPU only.
    """
    if group_rows and (layout is not ScaleLayout.COLUMNS or group_rows % 4 or gate_up.shape[0] % group_rows):
        given = f"{gate_up.shape[0]} rows in layout {layout}"
        raise checks.fail("group_rows", f"is {group_rows}, which {given} can't have")
    if gate is Gate.SILU:
        alpha, limit = 1.0, math.inf
    checks.global_scale(fmt, global_scale, gate_up.device)
    columns = gate_up.shape[1] // 2
    if not gate_up.is_cuda:
        wide = _reference(gate, gate_up, alpha, limit, bias, rows)
        return quantize(wide, fmt, layout=layout, global_scale=global_scale)
    codes, scales = launch.empty_quantized(fmt, layout, gate_up.shape[0], columns, gate_up.device, group_rows)
    output = BlockOutput(fmt, layout, columns, group_rows)
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
    assert rows.places is None, "rows are listed on a GPU only"
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
    places = count if rows.places is None else rows.places.shape[0]
    if count == 0 or places == 0:
        return
    device = launch.device(gate_up)
    size = gate_up.element_size()
    pointers = [t.data_ptr() for t in (gate_up, out, bias) if t is not None]
    vector_bytes = launch.widest(device.arch, gate_up.stride(0) * size, columns * size, *pointers)
    shape = (ACTIVATION_SHAPES if output is None else QUANTIZED_ACTIVATION_SHAPES).select(places // device.sms)
    from rose_dist.kernels.cute import swiglu as cute  # noqa: PLC0415 - it loads the compiler

    launcher = cute.launcher(
        device.arch, gate, gate_up.dtype, columns, shape, vector_bytes, bias is not None, output,
        rows.places is not None,
    )  # fmt: skip
    padded_rows = 0 if output is None else output.layout.padded_rows(count)
    launch.run(
        launcher, gate_up, gate_up, gate_up.stride(0), bias, rows.experts, rows.first_expert, rows.places, rows.live,
        out, scales, padded_rows, global_scale, places, alpha, limit,
    )  # fmt: skip


@checks.once
def _check(gate_up: Tensor, bias: Tensor | None, rows: Rows) -> None:
    checks.shape("gate_up", gate_up, None, None)
    checks.dtype("gate_up", gate_up, torch.bfloat16, torch.float16)
    checks.rows("gate_up", gate_up)
    checks.multiple("gate_up's columns", gate_up.shape[1], 32, "16 results are written at a time")
    checks.live_rows(rows.live, gate_up.device)
    places = gate_up.shape[0]
    if rows.places is not None:
        checks.shape("rows.places", rows.places, None)
        checks.dtype("rows.places", rows.places, torch.int32)
        checks.same_device("rows.places", rows.places, gate_up.device)
        checks.dense("rows.places", rows.places, 4)
        places = rows.places.shape[0]
    if rows.experts is not None:
        checks.shape("rows.experts", rows.experts, places)
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
