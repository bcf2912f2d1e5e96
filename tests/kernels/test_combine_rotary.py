"""Combine, norm and the projection of a single token in one launch, against the two that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.combine_norm import combine_norm
from rose_dist.kernels.combine_rotary import Unsummed, combine_rotary, takes
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.linear_rotary import linear_rotary
from rose_dist.kernels.qk_norm import PagedCache

EPS, KEY_HEADS, QUERY_HEADS, HEAD_DIM, CACHED = 1e-5, 1, 2, 32, 5


class Example:
    """A token, its experts' results, and the next layer's projection."""

    def __init__(self, hidden: int, top_k: int, tokens: int = 1) -> None:
        heads = QUERY_HEADS + 2 * KEY_HEADS
        slots = torch.randperm(8)[: tokens * top_k].view(tokens, top_k).int()
        slots[0, -1] = -1
        self.token = {
            "rows": torch.randn(8, hidden).bfloat16(), "slots": slots, "weights": torch.rand(tokens, top_k),
            "residual": (torch.randn(tokens, hidden) * 4).bfloat16(),
            "norm_weight": (torch.rand(hidden) + 0.5).bfloat16(),
        }  # fmt: skip
        self.weight = (torch.randn(heads * HEAD_DIM, hidden) / 16).bfloat16()
        self.bias = torch.randn(heads * HEAD_DIM).bfloat16()
        self.turns = [torch.rand(tokens, HEAD_DIM // 2) for _ in range(2)]
        self.kept = [torch.full((CACHED, KEY_HEADS, HEAD_DIM), 7.0).bfloat16() for _ in range(2)]
        self.slots = torch.arange(tokens) + 3

    def results(self, gpu: Any, together: bool) -> list[torch.Tensor]:
        """Queries, the sum, and the cache."""
        place = gpu.tensor
        token = Unsummed(**{name: place(t) for name, t in self.token.items()}, eps=EPS)
        cache = PagedCache(*(place(t) for t in self.kept), place(self.slots))
        turns = [place(t) for t in self.turns]
        arguments = (place(self.weight), place(self.bias), KEY_HEADS, *turns, cache)
        if together:
            q, total = combine_rotary(token, *arguments)
            assert torch.equal(gpu.plain(token.residual), self.token["residual"])
        else:
            total = token.residual
            normed = combine_norm(token.rows, token.slots, token.weights, total, token.norm_weight, EPS)
            q = linear_rotary(normed, *arguments)
        return [gpu.plain(t).flatten() for t in (q, total, cache.keys, cache.values)]


@pytest.mark.parametrize(("hidden", "top_k"), [(2880, 4), (96, 4), (64, 1), (1440, 2)], ids=str)
def test_has_the_bits_of_the_two(gpu: Any, hidden: int, top_k: int) -> None:
    example = Example(hidden, top_k)
    for got, wanted in zip(example.results(gpu, True), example.results(gpu, False), strict=True):
        assert torch.equal(got, wanted)


def test_the_cpu_gives_about_the_same(gpu: Any) -> None:
    example = Example(96, 4)
    for got, wanted in zip(example.results(gpu, True), example.results(Plain(), True), strict=True):
        assert torch.allclose(got.float(), wanted.float(), rtol=2**-6, atol=2**-6)


class Plain:
    """Tensors as they are."""

    tensor = plain = staticmethod(torch.clone)


def test_bad_arguments(gpu: Any) -> None:
    with pytest.raises(KernelArgumentError, match="x: has 2 tokens of 64 elements"):
        Example(64, 4, tokens=2).results(gpu, True)


def test_takes() -> None:
    assert takes(1, torch.empty(96, 2880), 4)
    assert not takes(2, torch.empty(96, 2880), 4)
    assert not takes(1, torch.empty(96, 5120), 4)
