"""Rows of an embedding table, of which each rank may hold a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.row_tiling import ROW_SHAPES


def embed(ids: Tensor, table: Tensor, *, first_id: int = 0) -> Tensor:
    """The table's row of every id; zeros for ids that the table does not hold, so that ranks' results add up.

    Args:
        ids: int64 or int32 [tokens].
        table: [held ids, hidden], rows of ids `first_id` and on.

    Returns:
        [tokens, hidden] of the table's dtype.
    """
    checks.shape("ids", ids, None)
    checks.dtype("ids", ids, torch.int64, torch.int32)
    checks.shape("table", table, None, None)
    if not table.is_cuda:
        local = ids.long() - first_id
        held = (local >= 0) & (local < table.shape[0])
        rows = table[local.clamp(0, table.shape[0] - 1)]
        return torch.where(held[:, None], rows, torch.zeros((), dtype=table.dtype))
    checks.dtype("table", table, torch.bfloat16, torch.float16, torch.float32)
    checks.rows("table", table)
    checks.same_device("ids", ids, table.device)
    checks.dense("ids", ids, ids.element_size())
    held_ids, hidden = table.shape
    checks.multiple("table's hidden size", hidden, 16 // table.element_size(), "rows are copied 16 bytes at a time")
    out = torch.empty(ids.shape[0], hidden, dtype=table.dtype, device=table.device)
    if ids.shape[0]:
        device = launch.device(table)
        size = table.element_size()
        vector_bytes = launch.widest(device.arch, table.stride(0) * size, hidden * size, table.data_ptr())
        shape = ROW_SHAPES.select(ids.shape[0] // device.sms)
        from rose_dist.kernels.cute import embedding as cute  # noqa: PLC0415 - it loads the compiler

        launcher = cute.launcher(device.arch, table.dtype, ids.dtype, hidden, shape, vector_bytes)
        launch.run(launcher, table, ids, table, table.stride(0), out, first_id, held_ids, ids.shape[0])
    return out
