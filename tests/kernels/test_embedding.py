"""Embedding rows, copied exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.embedding import embed
from rose_dist.kernels.errors import KernelArgumentError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("hidden", [64, 2880])
def test_parts_of_the_vocabulary_add_up(gpu: Any, dtype: torch.dtype, id_dtype: torch.dtype, hidden: int) -> None:
    table = torch.randn(50, hidden).to(dtype)
    ids = torch.tensor([0, 49, 24, 25, 13, 13], dtype=id_dtype)
    moved_ids = gpu.tensor(ids)
    parts = [gpu.plain(embed(moved_ids, gpu.tensor(table[first : first + 25]), first_id=first)) for first in (0, 25)]
    assert torch.equal(parts[0] + parts[1], table[ids.long()])
    assert not parts[0][[1, 3]].any()
    cpu = [embed(ids, table[first : first + 25], first_id=first) for first in (0, 25)]
    assert all(torch.equal(a, b) for a, b in zip(parts, cpu, strict=True))


def test_many_tokens(gpu: Any) -> None:
    table = torch.randn(30, 128).bfloat16()
    ids = torch.randint(30, (9 * gpu.info.sms + 5,))
    assert torch.equal(gpu.plain(embed(gpu.tensor(ids), gpu.tensor(table))), table[ids])


def test_no_tokens(gpu: Any) -> None:
    assert embed(gpu.tensor(torch.zeros(0, dtype=torch.int64)), gpu.tensor(torch.randn(4, 64))).shape == (0, 64)


@pytest.mark.parametrize(
    ("ids", "table", "message"),
    [
        (torch.zeros(2), torch.zeros(4, 64), "ids: dtype"),
        (torch.zeros(2, 1, dtype=torch.int64), torch.zeros(4, 64), "ids: shape"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(4, 66), "table: has a stride of 264 bytes"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int32), "table: dtype"),
    ],
)
def test_bad_arguments(gpu: Any, ids: torch.Tensor, table: torch.Tensor, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        embed(gpu.tensor(ids), gpu.tensor(table))
