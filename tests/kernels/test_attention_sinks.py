"""Sinks put in afterwards are those of a softmax that has them as a further column."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rose_dist.kernels.attention_sinks import apply_sinks
from rose_dist.kernels.errors import KernelArgumentError


def shares(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """[tokens, heads]: the keys' part of a softmax over all keys, as one, and the sink."""
    both = torch.stack([lse.t().double(), sinks.double().expand(lse.shape[1], -1)], -1)
    return both.softmax(-1)[..., 0]


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 64, 64), (9, 6, 64), (17, 3, 128), (3, 2, 256)])
def test_is_a_softmax_with_a_further_column(gpu: Any, tokens: int, heads: int, head_dim: int) -> None:
    attended = torch.randn(tokens, heads, head_dim).bfloat16()
    lse, sinks = torch.randn(heads, tokens) * 4, torch.randn(heads) * 4
    lse[0, 0], sinks[-1] = -200.0, 100.0  # a share of nearly nothing
    out = gpu.tensor(torch.full_like(attended, math.nan))
    apply_sinks(gpu.tensor(attended), gpu.tensor(lse), gpu.tensor(sinks), out, 0.5)
    wanted = attended.double() * shares(lse, sinks)[..., None] * 0.5
    error = (gpu.plain(out).double() - wanted).abs()
    assert (error <= wanted.abs() * 2**-8 + 1e-30).all(), error.max()
    on_cpu = torch.empty_like(attended)
    apply_sinks(attended, lse, sinks, on_cpu, 0.5)
    assert ((on_cpu.double() - wanted).abs() <= wanted.abs() * 2**-7 + 1e-30).all()


def test_in_place_with_log_sums_of_more_tokens(gpu: Any) -> None:
    """Rows of the log-sum-exps may be further apart; the result may take the place of the input."""
    attended, sinks = torch.randn(5, 4, 64).half(), torch.randn(4)
    wide = torch.randn(4, 12)
    moved, lse = gpu.tensor(attended), gpu.tensor(wide)[:, 3:8]
    apply_sinks(moved, lse, gpu.tensor(sinks), moved)
    wanted = attended.double() * shares(wide[:, 3:8], sinks)[..., None]
    assert ((gpu.plain(moved).double() - wanted).abs() <= wanted.abs() * 2**-10 + 1e-6).all()


def test_no_tokens(gpu: Any) -> None:
    nothing = gpu.tensor(torch.zeros(0, 4, 64).bfloat16())
    apply_sinks(nothing, gpu.tensor(torch.zeros(4, 0)), gpu.tensor(torch.zeros(4)), nothing)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attended": torch.zeros(3, 4, 48).bfloat16(), "out": torch.zeros(3, 4, 48).bfloat16()}, "head_dim is 48"),
        ({"attended": torch.zeros(3, 4, 64), "out": torch.zeros(3, 4, 64)}, "attended: dtype"),
        ({"lse": torch.zeros(3, 4)}, "lse: shape"),
        ({"lse": torch.zeros(4, 3).double()}, "lse: dtype"),
        ({"sinks": torch.zeros(3)}, "sinks: shape"),
        ({"out": torch.zeros(3, 4, 128).bfloat16()[..., ::2]}, "out: is not contiguous"),
    ],
)
def test_bad_arguments(gpu: Any, change: dict[str, torch.Tensor], message: str) -> None:
    bf16 = torch.zeros(3, 4, 64).bfloat16()
    given = {"attended": bf16, "lse": torch.zeros(4, 3), "sinks": torch.zeros(4), "out": bf16.clone()} | change
    strided = given.pop("out")
    out = gpu.tensor(strided) if strided.is_contiguous() else gpu.tensor(torch.zeros(3, 4, 128).bfloat16())[..., ::2]
    with pytest.raises(KernelArgumentError, match=message):
        apply_sinks(*(gpu.tensor(given[name]) for name in ("attended", "lse", "sinks")), out)
