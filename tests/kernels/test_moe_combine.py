"""Local MoE combine against the torch reference, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels import moe_combine
from rose_dist.kernels.moe_combine import combine

BF16, FP32 = torch.bfloat16, torch.float32


def check(
    gpu: Any, *, tokens: int = 5, top_k: int = 4, hidden: int = 64, dtype: torch.dtype = BF16,
    out_dtype: torch.dtype = BF16, bias: bool = False, accumulate: bool = False, live: int | None = None,
    kept: float = 0.7,
) -> None:  # fmt: skip
    experts, first_expert = 7, 3
    rows = torch.randn(tokens * top_k + 1, hidden).to(dtype)
    slots = torch.randperm(tokens * top_k)[: tokens * top_k].view(tokens, top_k).int() + 1
    slots[torch.rand(slots.shape) >= kept] = -1
    rows[0] = torch.nan  # no one's row: it must never come out
    weights = torch.rand(tokens, top_k)
    weights[slots < 0] = torch.nan
    ids = torch.randint(experts, slots.shape).int() + first_expert
    biases = torch.randn(experts, hidden).to(dtype) if bias else None
    before = torch.randn(tokens, hidden).to(out_dtype)
    end = tokens if live is None else live
    expected = before.clone()
    total = moe_combine.reference(rows, slots, weights, ids - first_expert, biases)[:end]
    expected[:end] = (before[:end].float() + total if accumulate else total).to(out_dtype)
    out = gpu.tensor(before)
    combine(
        gpu.tensor(rows), gpu.tensor(slots), gpu.tensor(weights), out, tokens=tokens, accumulate=accumulate,
        ids=gpu.tensor(ids) if bias else None, bias=gpu.tensor(biases) if biases is not None else None,
        first_expert=first_expert, live_rows=None if live is None else gpu.tensor(torch.tensor([live]).int()),
    )  # fmt: skip
    assert torch.equal(gpu.plain(out).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("top_k", [1, 2, 3, 6, 8, 9, 10, 16, 22, 32])
def test_any_top_k(gpu: Any, top_k: int) -> None:
    check(gpu, top_k=top_k)


@pytest.mark.parametrize("hidden", [16, 2880, 16384])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_any_hidden(gpu: Any, hidden: int, dtype: torch.dtype) -> None:
    check(gpu, hidden=hidden, dtype=dtype, out_dtype=dtype, tokens=3)


@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_bias_and_accumulate(gpu: Any, bias: bool, accumulate: bool, out_dtype: torch.dtype) -> None:
    check(gpu, bias=bias, accumulate=accumulate, out_dtype=out_dtype, live=3)


def test_fp16(gpu: Any) -> None:
    check(gpu, dtype=torch.float16, out_dtype=torch.float16)


@pytest.mark.parametrize(("tokens", "live"), [(0, None), (4, 0), (1, None), (129, None)])
def test_token_counts(gpu: Any, tokens: int, live: int | None) -> None:
    check(gpu, tokens=tokens, live=live, top_k=2)


def test_a_token_without_experts_gives_positive_zeros(gpu: Any) -> None:
    check(gpu, kept=0.0)


def test_products_are_rounded_before_they_are_added(gpu: Any) -> None:
    """A fused multiply-add would keep the product's low bits: 1/3 · 3 − 1 is 0 in two roundings."""
    third = torch.tensor(1 / 3)
    rows = torch.tensor([-1.0, 3.0, 0.0])[:, None].expand(3, 16).contiguous()
    slots, weights = torch.tensor([[0, 1]]).int(), torch.stack([torch.tensor(1.0), third])[None]
    out = gpu.tensor(torch.empty(1, 16))
    combine(gpu.tensor(rows), gpu.tensor(slots), gpu.tensor(weights), out, tokens=1)
    assert torch.equal(gpu.plain(out), torch.zeros(1, 16))
