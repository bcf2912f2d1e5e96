"""Rows of an embedding table, of which each rank may hold a part of the vocabulary, and of rotary tables."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch
from rose_dist.kernels.row_tiling import ROW_SHAPES


def embed_with_angles(
    ids: Tensor, positions: Tensor, table: Tensor, cos: Tensor, sin: Tensor, *, sampled: Tensor | None = None,
    first_id: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The table's row of every id, zeros for ids that the table does not hold, so that ranks' results add up; and the
    rows of the rotary tables, in one launch.

    Args:
        ids: int64 [tokens]. −1 − r stands for `sampled[r]`.
        positions: int64 [tokens].
        table: [held ids, hidden], rows of ids `first_id` and on.
        cos, sin: fp32 [positions, n], dense; rows of a multiple of 16 bytes.
        sampled: int64 [n].

    Returns:
        [tokens, hidden] of the table's dtype, and fp32 [tokens, n] twice.
    """
    launcher = _prepare(ids, table, sampled, positions, cos, sin)
    if launcher is None:
        known = ids if sampled is None else torch.where(ids < 0, sampled[(-1 - ids).clamp_(min=0)], ids)
        return _rows(known, table, first_id), cos[positions], sin[positions]
    tokens = ids.shape[0]
    out = torch.empty(tokens, table.shape[1], dtype=table.dtype, device=table.device)
    angles = torch.empty(2, tokens, cos.shape[1], dtype=cos.dtype, device=cos.device)
    if tokens:
        launch.run(
            launcher, table, ids, table, table.stride(0), out, first_id, table.shape[0], sampled, positions, cos, sin,
            angles[0], angles[1], tokens,
        )  # fmt: skip
    return out, angles[0], angles[1]


def _rows(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    local = ids.long() - first_id
    held = (local >= 0) & (local < table.shape[0])
    rows = table[local.clamp(0, table.shape[0] - 1)]
    return torch.where(held[:, None], rows, torch.zeros((), dtype=table.dtype))


@checks.once
def _prepare(
    ids: Tensor, table: Tensor, sampled: Tensor | None, positions: Tensor, cos: Tensor, sin: Tensor
) -> jit.Launcher | None:
    """The kernel for arguments that have been checked; None on a CPU."""
    checks.shape("ids", ids, None)
    checks.dtype("ids", ids, torch.int64)
    checks.shape("table", table, None, None)
    _check_angles(ids, positions, cos, sin)
    if sampled is not None:
        checks.shape("sampled", sampled, None)
        checks.dtype("sampled", sampled, torch.int64)
    if not table.is_cuda:
        return None
    checks.dtype("table", table, torch.bfloat16, torch.float16, torch.float32)
    checks.rows("table", table)
    for name, tensor in (("ids", ids), ("sampled", sampled), ("positions", positions), ("cos", cos), ("sin", sin)):
        if tensor is not None:
            checks.same_device(name, tensor, table.device)
            checks.dense(name, tensor, 16 if name in ("cos", "sin") else 8)
    size = table.element_size()
    checks.multiple("table's hidden size", table.shape[1], 16 // size, "rows are copied 16 bytes at a time")
    device = launch.device(table)
    vector_bytes = launch.widest(device.arch, table.stride(0) * size, table.shape[1] * size, table.data_ptr())
    shape = ROW_SHAPES.select(ids.shape[0] // device.sms)
    from rose_dist.kernels.cute import embedding as cute  # noqa: PLC0415 - it loads the compiler

    return cute.launcher(device.arch, table.dtype, table.shape[1], shape, vector_bytes, cos.shape[1] * 4)


def _check_angles(ids: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    checks.shape("positions", positions, ids.shape[0])
    checks.dtype("positions", positions, torch.int64)
    checks.shape("cos", cos, None, None)
    checks.shape("sin", sin, *cos.shape)
    for name, table in (("cos", cos), ("sin", sin)):
        checks.dtype(name, table, torch.float32)
    checks.multiple("cos's row", cos.shape[1], 4, "rows are copied 16 bytes at a time")
