"""Rows of x by expert, in the groups in which Hopper's expert GEMMs read them.

A group is 8 rows of one expert. Of each row 16 bytes are a cell; a group's first cells lie together, then its second
ones: [groups, cells, 8, 16 bytes]. So a bulk copy brings any run of a group's cells as tensor cores take them.

Cells are 8 columns of bf16, or 16 of e4m3, number c of which stands at 2 (c mod 8) + c div 8: in this order weights
come out of their decoding, and results into one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import launch
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.warpgroup_tiling import CELL_BYTES, ROW_GROUP

GROUPS = PackedLayout(ROW_GROUP)
"""Where each expert's groups are."""


@dataclass(frozen=True)
class GroupedRows:
    cells: Tensor
    """bf16, or e4m3's codes as uint8: [groups, cells, 8, elements of a cell]."""
    scales: Tensor | None
    """Of codes: fp32 [groups · 8], one a row."""

    @classmethod
    def within(cls, x: Tensor, dtype: torch.dtype) -> GroupedRows:
        """In the memory of bf16 [rows, columns]; codes take half of it, and have their scales behind them."""
        rows, columns = x.shape
        cell = CELL_BYTES // dtype.itemsize
        memory = x.view(dtype).flatten()
        cells = memory[: rows * columns].view(rows // ROW_GROUP, columns // cell, ROW_GROUP, cell)
        scales = memory[rows * columns :][: 4 * rows].view(torch.float32) if dtype is torch.uint8 else None
        return cls(cells, scales)


def empty_groups(groups: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for so many groups of bf16, or of e4m3's codes as uint8: [groups, cells, 8, elements of a cell]."""
    cell = CELL_BYTES // dtype.itemsize
    return torch.empty(groups, columns // cell, ROW_GROUP, cell, dtype=dtype, device=device)


def group_rows(x: Tensor, counts: Tensor, offsets: Tensor, dtype: torch.dtype) -> GroupedRows:
    """Rows packed by expert, on a Hopper GPU, in groups.

    Args:
        x: bf16 [rows, columns]; of expert e the rows `offsets[e]` to `offsets[e] + counts[e]`.
        counts: int32 [experts].
        offsets: int64 [experts + 1].
        dtype: bf16, or uint8 for e4m3's codes.
    """
    from rose_dist.kernels.cute import row_groups as cute  # noqa: PLC0415 - it loads the compiler

    e4m3, experts = dtype is torch.uint8, counts.shape[0]
    groups = empty_groups(GROUPS.capacity(x.shape[0], experts) // ROW_GROUP, x.shape[1], dtype, x.device)
    scales = torch.empty(groups.shape[0] * ROW_GROUP, dtype=torch.float32, device=x.device) if e4m3 else None
    launcher = cute.launcher(launch.device(x).arch, experts, x.shape[1], e4m3)
    launch.run(launcher, x, x, counts, offsets, groups, scales, x.shape[0])
    return GroupedRows(groups, scales)
