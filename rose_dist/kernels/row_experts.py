"""Whose each packed row is, for kernels that go by rows; the inverse of what a dispatch says of its experts."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch


def row_experts(counts: Tensor, offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Each row's expert, and where each expert's rows end.

    Args:
        counts: int32 [experts].
        offsets: int64 [experts + 1], ascending: expert e has the rows `offsets[e]` to `offsets[e] + counts[e]`, and
            those up to `offsets[e + 1]` are nobody's, like those behind the last.

    Returns:
        int32 [rows], −1 for nobody's rows; int32 [experts], `offsets + counts`.
    """
    experts = counts.shape[0]
    checks.shape("counts", counts, None)
    checks.dtype("counts", counts, torch.int32)
    checks.dense("counts", counts, 4)
    checks.shape("offsets", offsets, experts + 1)
    checks.dtype("offsets", offsets, torch.int64)
    checks.same_device("offsets", offsets, counts.device)
    checks.dense("offsets", offsets, 8)
    of_row = torch.empty(rows, dtype=torch.int32, device=counts.device)
    ends = torch.empty(experts, dtype=torch.int32, device=counts.device)
    if not counts.is_cuda:
        torch.add(offsets[:-1], counts, out=ends)
        of_row.fill_(-1)
        for expert, (start, end) in enumerate(zip(offsets.tolist(), ends.tolist(), strict=False)):
            of_row[start:end] = expert
        return of_row, ends
    from rose_dist.kernels.cute import row_experts as cute  # noqa: PLC0415 - it loads the compiler

    launcher = cute.launcher(launch.device(counts).arch, experts)
    launch.run(launcher, counts, counts, offsets, of_row, ends, rows)
    return of_row, ends
