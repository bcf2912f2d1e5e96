"""The two linear layers of MXFP4 experts over rows packed by expert; weights stay MXFP4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.expert_slots import COMPACT, PackedLayout
from rose_dist.kernels.handover import Handover
from rose_dist.kernels.jit import Launcher
from rose_dist.kernels.layer_meeting import LIMIT_NS, meeting
from rose_dist.kernels.mxfp4 import BLOCK, dequantize_mxfp4
from rose_dist.kernels.mxfp4_layout import TILE_BYTES, PackedMxfp4
from rose_dist.kernels.row_groups import GroupedRows, empty_groups, group_rows
from rose_dist.kernels.stream_tiling import EXPERT_SHAPES, StreamShape, StreamTiling, in_one_launch, stream
from rose_dist.kernels.swiglu import ALPHA, Rows, clamped_swiglu
from rose_dist.kernels.variants import EXPERT_GEMM_ROWS, gemm
from rose_dist.kernels.warpgroup_tiling import ROW_GROUP, WARPGROUP_SHAPES, WarpgroupShape, WarpgroupTiling

SHARED_BYTES = 232448
"""A block's shared memory on Hopper and Blackwell."""
GEMM_SEGMENTS = 1024
"""Most (expert, rows of x at a time) pairs of a launch with many rows."""
MAX_SEGMENTS = 64 * 64
"""Most (expert, rows of x at a time) pairs of a launch: each block has room for 64, and there are more SMs than 64."""


@dataclass(frozen=True)
class ExpertRows:
    """Whose the rows are, on the rows' device."""

    counts: Tensor
    """int32 [experts]."""
    offsets: Tensor
    """int64 [experts + 1] or [experts]: where each expert's rows start."""
    most: int
    """Rows that the largest expert is expected to have: chooses the kernel. More are computed right, but slower."""
    layout: PackedLayout = COMPACT
    """How the rows were packed."""
    listed: Rows | None = None
    """The rows that are somebody's, one by one, where the dispatch has a list of them."""
    groups: GroupedRows | None = None
    """The rows, in place of those packed, where the dispatch has them so."""
    handover: Handover | None = None
    """The row of a single token, with its experts, in place of those packed and of counts and offsets."""

    @cached_property
    def ends(self) -> Tensor:
        """int32 [experts]: where each expert's rows end."""
        ends = torch.empty(self.counts.shape, dtype=torch.int32, device=self.counts.device)
        return torch.add(self.offsets[: self.counts.shape[0]], self.counts, out=ends)


class ExpertLayer(NamedTuple):
    """Matrices [experts, outputs, columns], and biases bf16 [experts, outputs] or None."""

    weight: PackedMxfp4
    bias: Tensor | None


def expert_swiglu(
    x: Tensor, weight: PackedMxfp4, bias: Tensor | None, rows: ExpertRows, *, limit: float, alpha: float = ALPHA
) -> Tensor:
    """h[r] = clamped_swiglu(weight[e] · x[r] + bias[e]) for the expert e that row r belongs to.

    Args:
        x: bf16 [rows, columns]; of expert e the rows `offsets[e]` to `offsets[e] + counts[e]`.
        weight: [experts, 2 · intermediate, columns]; even rows are gates, odd ones linear.
        bias: bf16 [experts, 2 · intermediate] or None.

    Returns:
        bf16 [rows, intermediate]. Sums and the activation are fp32, rounded once. Rows of no expert are unwritten. A
        row's result does not depend on the others'.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit.
    """
    _check(x, weight, bias, rows)
    if not x.is_cuda:
        return _reference(x, weight, bias, rows, lambda y: clamped_swiglu(y, alpha=alpha, limit=limit))
    out = torch.empty(x.shape[0], weight.rows // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, rows, out, gated=True, alpha=alpha, limit=limit)
    return out


def expert_linear(x: Tensor, weight: PackedMxfp4, bias: Tensor | None, rows: ExpertRows) -> Tensor:
    """y[r] = weight[e] · x[r] + bias[e], as `expert_swiglu` without its activation."""
    _check(x, weight, bias, rows)
    if not x.is_cuda:
        return _reference(x, weight, bias, rows, lambda y: y)
    out = torch.empty(x.shape[0], weight.rows, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, rows, out, gated=False, alpha=0.0, limit=0.0)
    return out


def expert_mlp(
    x: Tensor, gate_up: ExpertLayer, down: ExpertLayer, rows: ExpertRows, *, limit: float, alpha: float = ALPHA,
    ahead: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`expert_linear` of what `expert_swiglu` gives, to the bit. For few rows both go in one launch, where the layers'
    columns are shared out alike; it brings `ahead`, dense weights that a later launch reads, into L2.
    """
    shape = _few_rows_shape(x, gate_up.weight, rows)
    many = rows.groups is not None or shape is None
    # Not taken, it would be taken in its old state the next time.
    if rows.handover is not None and (many or rows.most != 1 or gate_up.weight.columns != down.weight.columns):
        raise checks.fail("rows.handover", "is for few rows, one an expert, and layers of the same columns")
    if x.is_cuda and x.shape[0] > 0 and many and launch.device(x).arch.hopper:
        return _mlp_of_groups(x, gate_up, down, rows, alpha=alpha, limit=limit)
    if shape is None or many or not x.is_cuda or x.shape[0] == 0 or not _in_one_launch(shape, gate_up, down):
        return expert_linear(expert_swiglu(x, *gate_up, rows, limit=limit, alpha=alpha), *down, rows)
    _check(x, *gate_up, rows)
    h = torch.empty(x.shape[0], gate_up.weight.rows // 2, dtype=x.dtype, device=x.device)
    _check(h, *down, rows)
    out = torch.empty(x.shape[0], down.weight.rows, dtype=x.dtype, device=x.device)
    both = tiling(shape, gate_up.weight, down.weight)
    launch_both(x, gate_up, h, down, out, rows, both, alpha=alpha, limit=limit, ahead=ahead)
    return out


def _in_one_launch(shape: StreamShape, *layers: ExpertLayer) -> bool:
    return in_one_launch(shape, tuple(layer.weight.columns // BLOCK for layer in layers))


def _mlp_of_groups(
    x: Tensor, gate_up: ExpertLayer, down: ExpertLayer, rows: ExpertRows, *, alpha: float, limit: float
) -> Tensor:
    """`expert_mlp` by products of warpgroups, Hopper's."""
    _check(x, *gate_up, rows)
    out = torch.empty(x.shape[0], down.weight.rows, dtype=x.dtype, device=x.device)
    if down.weight.columns * 2 != gate_up.weight.rows:
        raise checks.fail("down.weight", f"has {down.weight.columns} columns; needs {gate_up.weight.rows // 2}")
    check_layer(*down, x, rows)
    shape = WARPGROUP_SHAPES.select(max(rows.most, least_rows(x, gate_up.weight)))
    groups = rows.groups or group_rows(x, rows.counts, rows.offsets, x.dtype)
    h = empty_groups(groups.cells.shape[0], gate_up.weight.rows // 2, x.dtype, x.device)
    launch_warpgroup_gemm(groups.cells, gate_up, rows, h, shape, gated=True, alpha=alpha, limit=limit)
    launch_warpgroup_gemm(h, down, rows, out, shape, gated=False, alpha=0.0, limit=0.0)
    return out


def tiling(shape: StreamShape, *weights: PackedMxfp4) -> StreamTiling:
    """`shape` for the columns of a launch's layers. Raises `KernelArgumentError` where a block's shared memory can't
    hold it.
    """
    experts, columns = weights[0].experts, tuple(weight.columns for weight in weights)
    result = stream(shape, tuple(one // BLOCK for one in columns), TILE_BYTES)
    needed = result.shared_bytes + 2560 + 12 * experts
    if needed > SHARED_BYTES:
        raise checks.fail(
            "weight", f"has {experts} experts and {max(columns)} columns, which take {needed} bytes of shared "
            f"memory; there are {SHARED_BYTES}"
        )  # fmt: skip
    return result


def _reference(x: Tensor, weight: PackedMxfp4, bias: Tensor | None, rows: ExpertRows, activation: object) -> Tensor:
    assert callable(activation)
    out: Tensor | None = None
    for expert, (start, count) in enumerate(zip(rows.offsets.tolist(), rows.counts.tolist(), strict=False)):
        if not count:
            continue
        part = slice(start, start + count)
        y = x[part].float() @ dequantize_mxfp4(*weight.load(expert), torch.float32).T
        y = activation(y if bias is None else y + bias[expert].float())
        if out is None:
            out = x.new_zeros(x.shape[0], y.shape[1])
        out[part] = y.to(x.dtype)
    return activation(x.new_zeros(x.shape[0], weight.rows)) if out is None else out


def _launch(
    x: Tensor, weight: PackedMxfp4, bias: Tensor | None, rows: ExpertRows, out: Tensor, *, gated: bool, alpha: float,
    limit: float,
) -> None:  # fmt: skip
    if x.shape[0] == 0:
        return
    shape = _few_rows_shape(x, weight, rows)
    if shape is None:
        launch_warp_gemm(x, weight, bias, rows, out, gated=gated, alpha=alpha, limit=limit)
        return
    launch_one(x, weight, bias, rows, out, tiling(shape, weight), gated=gated, alpha=alpha, limit=limit)


def _few_rows_shape(x: Tensor, weight: PackedMxfp4, rows: ExpertRows) -> StreamShape | None:
    """The narrowest shape for `rows.most` whose segments can be listed for all rows that `x` has room for; None: they
    are many. After an exchange there is room for all that peers may send.
    """
    if rows.most >= EXPERT_GEMM_ROWS:
        return None
    shapes = EXPERT_SHAPES.variants[EXPERT_SHAPES.variants.index(EXPERT_SHAPES.select(rows.most)) :]
    return next((shape for shape in shapes if weight.experts + x.shape[0] // shape.rows <= MAX_SEGMENTS), None)


def least_rows(x: Tensor, weight: PackedMxfp4) -> int:
    """That a segment must have for those of all rows of `x` in groups to be listed."""
    return -(-(x.shape[0] + weight.experts * ROW_GROUP) // max(GEMM_SEGMENTS - weight.experts, 1))


def launch_one(
    x: Tensor, weight: PackedMxfp4, bias: Tensor | None, rows: ExpertRows, out: Tensor, tiling: StreamTiling, *,
    gated: bool, alpha: float, limit: float,
) -> None:  # fmt: skip
    """The kernel of few rows with a tiling of the caller's choice; arguments are checked before."""
    from rose_dist.kernels.cute import mxfp4_experts as cute  # noqa: PLC0415 - it loads the compiler

    device = launch.device(x)
    launcher = cute.launcher(device.arch, weight.experts, (weight.data.shape[1],), tiling, gated)
    launch.run(
        launcher, x, weight.data, weight.rescale, bias, x, rows.counts, rows.offsets, out, None, None, None, None, None,
        0, 0, None, 0, alpha, limit, device.sms,
    )  # fmt: skip


def launch_both(
    x: Tensor, gate_up: ExpertLayer, h: Tensor, down: ExpertLayer, out: Tensor, rows: ExpertRows, tiling: StreamTiling,
    *, alpha: float, limit: float, ahead: Tensor | None = None,
) -> None:  # fmt: skip
    """The same for both layers at once; `h` is what comes between them."""
    from rose_dist.kernels.cute import handed_experts, mxfp4_experts  # noqa: PLC0415 - they load the compiler

    device, place = launch.device(x), meeting(x.device)
    tiles = (gate_up.weight.data.shape[1], down.weight.data.shape[1])
    constants = (device.arch, gate_up.weight.experts, tiles, tiling)
    if rows.handover is None:
        launcher, given = mxfp4_experts.launcher(*constants, gated=True), x
    else:
        launcher, given = handed_experts.launcher(*constants), rows.handover.memory
    launch.run(
        launcher, x, gate_up.weight.data, gate_up.weight.rescale, gate_up.bias, given, rows.counts, rows.offsets, h,
        down.weight.data, down.weight.rescale, down.bias, out, place.counter, place.report.address, LIMIT_NS, ahead,
        0 if ahead is None else ahead.nbytes, alpha, limit, device.sms,
    )  # fmt: skip


def launch_warp_gemm(
    x: Tensor, weight: PackedMxfp4, bias: Tensor | None, rows: ExpertRows, out: Tensor, *, gated: bool, alpha: float,
    limit: float,
) -> None:  # fmt: skip
    """With products of a warp: any GPU."""
    from rose_dist.kernels.cute import mxfp4_experts_prefill as cute  # noqa: PLC0415 - it loads the compiler

    tiling, device = gemm(weight.columns // BLOCK, TILE_BYTES), launch.device(x)
    _check_segments(x.shape[0], weight, tiling.rows)
    launcher = cute.launcher(device.arch, weight.experts, weight.data.shape[1], tiling, gated)
    launch.run(
        launcher, x, weight.data, weight.rescale, bias, x, rows.counts, rows.offsets, out, alpha, limit, device.sms
    )


def launch_warpgroup_gemm(
    x: Tensor, layer: ExpertLayer, rows: ExpertRows, out: Tensor, shape: WarpgroupShape, *, gated: bool, alpha: float,
    limit: float,
) -> None:  # fmt: skip
    """With products of a warpgroup, for `x` in groups: Hopper. out: with a gate in groups too, else rows."""
    from rose_dist.kernels.cute import mxfp4_experts_warpgroup as cute  # noqa: PLC0415 - it loads the compiler

    tiling = shape.tiling(layer.weight.columns // BLOCK, TILE_BYTES)
    launch_grouped(cute.launcher, x, None, layer, rows, out, tiling, gated, alpha, limit)


def launch_grouped(
    launcher: Callable[..., Launcher], x: Tensor, scales: Tensor | None, layer: ExpertLayer, rows: ExpertRows,
    out: Tensor, tiling: WarpgroupTiling, gated: bool, alpha: float, limit: float,
) -> None:  # fmt: skip
    """The kernel of `launcher`, of a `GroupedExpertGemm`, for `x` in groups and codes' `scales`."""
    weight, device, total = layer.weight, launch.device(x), x.shape[0] * ROW_GROUP
    _check_segments(total, weight, tiling.rows)
    needed = tiling.shared_bytes + 16640 + 28 * weight.experts
    if needed > SHARED_BYTES:
        raise checks.fail(
            "weight", f"has {weight.experts} experts, with whose lists a block takes {needed} bytes of shared memory; "
            f"there are {SHARED_BYTES}"
        )  # fmt: skip
    launch.run(
        launcher(device.arch, weight.experts, weight.data.shape[1], tiling, gated), x, weight.data, weight.rescale,
        weight.tops, layer.bias, x, scales, rows.counts, rows.offsets, out, alpha, limit, device.sms,
    )  # fmt: skip


def _check_segments(total: int, weight: PackedMxfp4, rows: int) -> None:
    if weight.experts + total // rows > GEMM_SEGMENTS:
        raise checks.fail("x", f"has {total} rows; at most {(GEMM_SEGMENTS - weight.experts) * rows} fit")


@checks.once
def _check(x: Tensor, weight: PackedMxfp4, bias: Tensor | None, rows: ExpertRows) -> None:
    checks.shape("x", x, None, weight.columns)
    checks.dtype("x", x, torch.bfloat16, *(() if x.is_cuda else (torch.float32,)))
    checks.dense("x", x)
    check_layer(weight, bias, x, rows)


def check_layer(weight: PackedMxfp4, bias: Tensor | None, x: Tensor, rows: ExpertRows) -> None:
    """A layer, and whose the rows are, fit rows of x. Raises `KernelArgumentError`."""
    experts = weight.experts
    for name, tensor in (("data", weight.data), ("rescale", weight.rescale), ("tops", weight.tops)):
        checks.same_device(f"weight.{name}", tensor, x.device)
    checks.dense("weight.data", weight.data)
    checks.shape("rows.counts", rows.counts, experts)
    checks.dtype("rows.counts", rows.counts, torch.int32)
    checks.same_device("rows.counts", rows.counts, x.device)
    checks.dense("rows.counts", rows.counts, 4)
    if rows.offsets.dim() != 1 or rows.offsets.shape[0] not in (experts, experts + 1):
        raise checks.fail("rows.offsets", f"shape is {tuple(rows.offsets.shape)}; needs ({experts + 1},)")
    checks.dtype("rows.offsets", rows.offsets, torch.int64)
    checks.same_device("rows.offsets", rows.offsets, x.device)
    checks.dense("rows.offsets", rows.offsets, 8)
    if bias is not None:
        checks.shape("bias", bias, experts, weight.rows)
        checks.dtype("bias", bias, x.dtype)
        checks.same_device("bias", bias, x.device)
        checks.dense("bias", bias)
