"""Each packed row's expert, by counts and offsets of every packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.expert_slots import COMPACT, PackedLayout
from rose_dist.kernels.row_experts import row_experts


def by_hand(counts: list[int], starts: list[int], rows: int) -> list[int]:
    found = [-1] * rows
    for expert, count in enumerate(counts):
        for row in range(starts[expert], starts[expert] + count):
            found[row] = expert
    return found


@pytest.mark.parametrize("layout", [COMPACT, PackedLayout(16), PackedLayout(8, 160)], ids=str)
@pytest.mark.parametrize("counts", [[3], [0, 5, 0, 150, 1], [0, 0], [16, 32]], ids=str)
@pytest.mark.parametrize("behind", [0, 200])
def test_experts_and_ends(gpu: Any, layout: PackedLayout, counts: list[int], behind: int) -> None:
    given = torch.tensor(counts, dtype=torch.int32)
    starts = layout.starts(given)
    rows = int(starts[-1]) + behind
    expected = by_hand(counts, starts.tolist(), rows)
    for tensor, plain in ((gpu.tensor, gpu.plain), (torch.clone, torch.clone)):
        of_row, ends = row_experts(tensor(given), tensor(starts), rows)
        assert plain(of_row).tolist() == expected
        assert plain(ends).tolist() == (starts[:-1] + given).tolist()


def test_bad_arguments() -> None:
    with pytest.raises(KernelArgumentError, match=r"offsets: shape is \(2,\); needs \(3\)"):
        row_experts(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), 4)
    with pytest.raises(KernelArgumentError, match="counts: dtype"):
        row_experts(torch.zeros(2), torch.zeros(3, dtype=torch.int64), 4)
