"""Combine, residual and norm in one launch, against the three one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels import moe_combine
from rose_dist.kernels.combine_norm import combine_norm, takes
from rose_dist.kernels.errors import KernelArgumentError

EPS = 1e-5


def example(tokens: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """rows, slots, weights, residual, norm weight."""
    slots = torch.randperm(tokens * 3)[: tokens * 2].view(tokens, 2).int()
    slots[0, 1] = -1
    shape = (tokens, hidden)
    return [
        torch.randn(tokens * 3, hidden).to(dtype), slots, torch.rand(tokens, 2), (torch.randn(shape) * 8).to(dtype),
        (torch.rand(hidden) + 0.5).to(dtype),
    ]  # fmt: skip


def wanted(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor,
           norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    total = residual + moe_combine.reference(rows, slots, weights).to(rows.dtype)
    wide = total.double()
    return wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * norm.double(), total


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    ("hidden", "dtype"), [(2880, torch.bfloat16), (64, torch.bfloat16), (264, torch.float32)], ids=str
)
def test_matches_the_three(gpu: Any, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    given = example(tokens, hidden, dtype)
    normed, total = wanted(*given)
    held = [gpu.tensor(t) for t in given]
    got = combine_norm(*held, EPS)
    if gpu.real:
        assert torch.allclose(gpu.plain(held[3]).float(), total.float(), rtol=2**-8)
    else:
        assert torch.equal(gpu.plain(held[3]), total)
    relative = 1.01 * 2**-8 if dtype is torch.bfloat16 else 1e-5
    assert ((gpu.plain(got).double() - normed).abs() <= normed.abs() * relative + 1e-6).all()


def test_tokens_beyond_the_live_ones_stay_as_they_are(gpu: Any) -> None:
    given = example(5, 64, torch.bfloat16)
    normed, total = wanted(*given)
    total[3:] = given[3][3:]
    given[1][3:] = 1 << 30
    held = [gpu.tensor(t) for t in given]
    got = combine_norm(*held, EPS, gpu.tensor(torch.tensor([3], dtype=torch.int32)))
    assert torch.allclose(gpu.plain(held[3]).float(), total.float(), rtol=2**-8)
    assert torch.allclose(gpu.plain(got)[:3].double(), normed[:3], rtol=1.01 * 2**-8, atol=1e-6)


def test_the_cpu_gives_the_same() -> None:
    given = example(3, 64, torch.bfloat16)
    normed, total = wanted(*given)
    got = combine_norm(*given, EPS)
    assert torch.equal(given[3], total)
    assert torch.allclose(got.double(), normed, rtol=2**-7)


@pytest.mark.parametrize(
    ("at", "replaced", "message"),
    [
        (0, torch.zeros(6, 60).bfloat16(), "rows: "),
        (1, torch.zeros(2, 2), "slots: dtype"),
        (2, torch.zeros(2, 3), "weights: shape"),
        (3, torch.zeros(2, 64), "residual: dtype"),
        (4, torch.zeros(32).bfloat16(), "norm_weight: shape"),
    ],
)
def test_bad_arguments(gpu: Any, at: int, replaced: torch.Tensor, message: str) -> None:
    given = example(2, 64, torch.bfloat16)
    given[at] = replaced
    with pytest.raises(KernelArgumentError, match=message):
        combine_norm(*[gpu.tensor(t) for t in given], EPS)


def test_takes() -> None:
    assert takes(2880, torch.bfloat16)
    assert not takes(16384, torch.bfloat16)
    assert not takes(60, torch.bfloat16)
