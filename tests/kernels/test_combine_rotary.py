"""Combine, norm, projection and rotary of one token in one launch, against the two launches that it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.combine_norm import combine_norm
from rose_dist.kernels.combine_rotary import Unsummed, combine_rotary
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.linear_rotary import linear_rotary
from rose_dist.kernels.qk_norm import PagedCache

EPS, HEAD_DIM, PLACES = 1e-5, 32, 5


def example(hidden: int, k: int) -> list[torch.Tensor]:
    """The fields of `Unsummed`; then weight, bias, cos, sin, and two caches and slots: 2 query heads, 1 key head."""
    slots = torch.randperm(3 * k)[:k].view(1, k).int()
    if k > 1:
        slots[0, 1] = -1
    return [
        torch.randn(3 * k, hidden).bfloat16(), slots, torch.rand(1, k), torch.randn(1, hidden).bfloat16() * 8,
        (torch.rand(hidden) + 0.5).bfloat16(), (torch.randn(4 * HEAD_DIM, hidden) / 16).bfloat16(),
        torch.randn(4 * HEAD_DIM).bfloat16(), torch.rand(1, HEAD_DIM // 2), torch.rand(1, HEAD_DIM // 2),
        *(torch.zeros(PLACES, 1, HEAD_DIM).bfloat16() for _ in range(2)), torch.tensor([3]),
    ]  # fmt: skip


def together(given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Queries, the new residual, keys and values."""
    cache = PagedCache(*given[9:])
    return [*combine_rotary(Unsummed(*given[:5], EPS), *given[5:7], 1, *given[7:9], cache), cache.keys, cache.values]


def apart(given: list[torch.Tensor]) -> list[torch.Tensor]:
    cache = PagedCache(*given[9:])
    normed = combine_norm(*given[:5], EPS)
    return [linear_rotary(normed, *given[5:7], 1, *given[7:9], cache), given[3], cache.keys, cache.values]


@pytest.mark.parametrize(("hidden", "k"), [(2880, 4), (2880, 1), (64, 4), (2048, 8)])
def test_has_the_bits_of_the_two(gpu: Any, hidden: int, k: int) -> None:
    given = example(hidden, k)
    got, wanted = (call([gpu.tensor(t) for t in given]) for call in (together, apart))
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(gpu.plain(one), gpu.plain(other))
    assert gpu.plain(got[2])[3].abs().sum() > 0


def test_the_cpu_gives_the_same() -> None:
    given = example(64, 4)
    for one, other in zip(together([t.clone() for t in given]), apart([t.clone() for t in given]), strict=True):
        assert torch.equal(one, other)


def test_one_token(gpu: Any) -> None:
    given = [gpu.tensor(t) for t in example(64, 4)]
    given[1:4] = [gpu.tensor(t.repeat(2, 1)) for t in example(64, 4)[1:4]]
    with pytest.raises(KernelArgumentError, match="residual: shape"):
        together(given)
