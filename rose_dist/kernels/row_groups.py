"""Rows of x by expert, in the groups in which Hopper's expert GEMMs read them.

A group is 8 rows of one expert. Of each row 16 bytes are a cell; a group's first cells lie together, then its second
ones: [groups, cells, 8, 16 bytes]. So a bulk copy brings any run of a group's cells as tensor cores take them.

Cells are 8 columns of bf16, or 16 of e4m3, number c of which stands at 2 (c mod 8) + c div 8: in this order weights
come out of their decoding, and results into one thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import launch
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.warpgroup_tiling import CELL_BYTES, ROW_GROUP

GROUPS = PackedLayout(ROW_GROUP)
"""Where each expert's groups are."""


def empty_groups(total: int, experts: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for `total` rows of `columns`, bf16 or e4m3's codes: [groups, cells, 8, elements of a cell]."""
    groups, cell = GROUPS.capacity(total, experts) // ROW_GROUP, CELL_BYTES // dtype.itemsize
    return torch.empty(groups, columns // cell, ROW_GROUP, cell, dtype=dtype, device=device)


def group_rows(x: Tensor, counts: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Rows packed by expert, on a GPU, in groups.

    Args:
        x: bf16 [rows, columns]; of expert e the rows `offsets[e]` to `offsets[e] + counts[e]`.
        counts: int32 [experts].
        offsets: int64 [experts + 1].
        dtype: bf16, or uint8 for e4m3's codes.

    Returns:
        As `empty_groups`, and with codes the scale, fp32, of each row of the groups.
    """
    from rose_dist.kernels.cute import row_groups as cute  # noqa: PLC0415 - it loads the compiler

    groups = empty_groups(x.shape[0], counts.shape[0], x.shape[1], dtype, x.device)
    e4m3 = dtype is torch.uint8
    scales = torch.empty(groups.shape[0] * ROW_GROUP, dtype=torch.float32, device=x.device) if e4m3 else None
    launcher = cute.launcher(launch.device(x).arch, counts.shape[0], x.shape[1], e4m3)
    launch.run(launcher, x, x, counts, offsets, groups, scales, x.shape[0])
    return groups, scales
