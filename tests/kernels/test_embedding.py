"""Embedding rows, copied exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.embedding import embed_with_angles
from rose_dist.kernels.errors import KernelArgumentError

ANGLES = torch.zeros(1, 32)


def embed(ids: torch.Tensor, table: torch.Tensor, move: Any, first: int = 0) -> torch.Tensor:
    """The table's rows alone."""
    angles = move(ANGLES)
    return embed_with_angles(move(ids), move(torch.zeros_like(ids)), move(table), angles, angles, first_id=first)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [64, 2880])
def test_parts_of_the_vocabulary_add_up(gpu: Any, dtype: torch.dtype, hidden: int) -> None:
    table = torch.randn(50, hidden).to(dtype)
    ids = torch.tensor([0, 49, 24, 25, 13, 13])
    parts = [gpu.plain(embed(ids, table[first : first + 25], gpu.tensor, first)) for first in (0, 25)]
    assert torch.equal(parts[0] + parts[1], table[ids])
    assert not parts[0][[1, 3]].any()
    cpu = [embed(ids, table[first : first + 25], lambda x: x, first) for first in (0, 25)]
    assert all(torch.equal(a, b) for a, b in zip(parts, cpu, strict=True))


def test_many_tokens(gpu: Any) -> None:
    table = torch.randn(30, 128).bfloat16()
    ids = torch.randint(30, (9 * gpu.info.sms + 5,))
    assert torch.equal(gpu.plain(embed(ids, table, gpu.tensor)), table[ids])


@pytest.mark.parametrize(("hidden", "half"), [(64, 32), (2880, 32), (64, 320)])
@pytest.mark.parametrize("first", [0, 20])
def test_angles_come_along_and_sampled_tokens_are_known(gpu: Any, hidden: int, half: int, first: int) -> None:
    table, sampled = torch.randn(50, hidden).bfloat16(), torch.tensor([49, 7, 0, 21])
    ids, known = torch.tensor([3, -4, 49, -1, 20, -2]), torch.tensor([3, 21, 49, 49, 20, 7])
    positions, angles = torch.tensor([0, 8, 3, 3, 1, 5]), torch.randn(2, 9, half)
    given = [gpu.tensor(x) for x in (ids, positions, table[first:], *angles)]
    found = embed_with_angles(*given, sampled=gpu.tensor(sampled), first_id=first)
    rows = torch.where((known >= first)[:, None], table[known], 0)
    for one, other in zip(found, (rows, *(angle[positions] for angle in angles)), strict=True):
        assert torch.equal(gpu.plain(one), other)
    cpu = embed_with_angles(ids, positions, table[first:], *angles, sampled=sampled, first_id=first)
    assert all(torch.equal(gpu.plain(one), other) for one, other in zip(found, cpu, strict=True))


def test_no_tokens(gpu: Any) -> None:
    assert embed(torch.zeros(0, dtype=torch.int64), torch.randn(4, 64), gpu.tensor).shape == (0, 64)


@pytest.mark.parametrize(
    ("ids", "table", "message"),
    [
        (torch.zeros(2), torch.zeros(4, 64), "ids: dtype"),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(4, 64), "ids: dtype"),
        (torch.zeros(2, 1, dtype=torch.int64), torch.zeros(4, 64), "ids: shape"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(4, 66), "table: has a stride of 264 bytes"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int32), "table: dtype"),
    ],
)
def test_bad_arguments(gpu: Any, ids: torch.Tensor, table: torch.Tensor, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        embed(ids, table, gpu.tensor)
