"""Attention of chunks against float64, and against decoding the same tokens one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rose_dist.kernels import paged_prefill
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.paged_attention import decode
from rose_dist.kernels.paged_prefill import prefill

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]
HEADS = [(8, 1, 64), (8, 2, 64), (4, 4, 64), (16, 2, 128)]


class Chunks:
    """Chunks of sequences, (tokens before, tokens) each, in a cache whose other slots are NaN."""

    def __init__(self, sizes: list[tuple[int, int]], heads: tuple[int, int, int], window: int | None) -> None:
        query_heads, key_heads, head_dim = heads
        self.sizes, self.window, self.scale = sizes, window, 0.2
        self.first = [0 if window is None else max(0, before - window + 1) for before, _ in sizes]
        held = [before + tokens - first for (before, tokens), first in zip(sizes, self.first, strict=True)]
        total = sum(held)
        self.keys, self.values = (torch.full((total + 9, key_heads, head_dim), math.nan).bfloat16() for _ in range(2))
        self.slots: torch.Tensor | None = torch.randperm(total + 9)[:total]
        self.keys[self.slots], self.values[self.slots] = torch.randn(2, total, key_heads, head_dim).bfloat16()
        self.q = torch.randn(sum(tokens for _, tokens in sizes), query_heads, head_dim).bfloat16()
        self.sinks = torch.randn(query_heads) * 2
        self.query_starts, self.key_starts = (
            torch.tensor([0, *counts]).cumsum(0).int() for counts in ([tokens for _, tokens in sizes], held)
        )

    def attend(self, device: str, sinks: bool = True, **options: float) -> torch.Tensor:
        given = (self.q, self.keys, self.values, self.slots, self.query_starts, self.key_starts)
        moved = (None if x is None else x.to(device) for x in given)
        return prefill(
            *moved, self.sinks.to(device) if sinks else None,
            most_queries=max(tokens for _, tokens in self.sizes), most_keys=max(map(sum, self.sizes)),
            window=self.window, **{"scale": self.scale} | options,
        ).cpu()  # fmt: skip

    def exact(self, sinks: bool = True) -> torch.Tensor:
        """The definition, query by query and head by head."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        group = self.q.shape[1] // self.keys.shape[1]
        rows = [(sequence, before + i) for sequence, (before, tokens) in enumerate(self.sizes) for i in range(tokens)]
        for row, (sequence, position) in enumerate(rows):
            low = 0 if self.window is None else max(0, position - self.window + 1)
            start = int(self.key_starts[sequence]) - self.first[sequence]
            slots = self.slots[start + low : start + position + 1]
            for head in range(self.q.shape[1]):
                scores = self.keys[slots, head // group].double() @ self.q[row, head].double() * self.scale
                total = scores.exp().sum() + (self.sinks[head].double().exp() if sinks else 0.0)
                out[row, head] = scores.exp() / total @ self.values[slots, head // group].double()
        return out


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """bf16 weights, and two roundings of the result."""
    assert (got.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_with_and_without_a_prefix(device: str, heads: tuple[int, int, int], window: int | None) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    chunks = Chunks([(0, 40), (33, 17), (50, 1), (3, 2)], heads, window)
    assert_close(chunks.attend(device), chunks.exact())
    assert_close(chunks.attend(device, sinks=False), chunks.exact(sinks=False))


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_cache(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    chunks = Chunks([(0, 40), (33, 17)], (8, 2, 64), 20)
    chunks.keys, chunks.values = (x.to(torch.float8_e4m3fn) for x in (chunks.keys, chunks.values))
    attended = chunks.attend(device, scale=0.05, key_scale=4.0, value_scale=0.5)
    without = chunks.attend(device, sinks=False, scale=0.05, key_scale=4.0, value_scale=0.5)
    chunks.keys, chunks.values = chunks.keys.float(), chunks.values.float()
    assert_close(attended, chunks.exact() * 0.5)
    assert_close(without, chunks.exact(sinks=False) * 0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_single_queries(device: str) -> None:
    """Flash attention treats steps of one query a sequence in another way."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    chunks = Chunks([(0, 1), (40, 1), (7, 1)], (8, 2, 64), None)
    assert_close(chunks.attend(device), chunks.exact())


@pytest.mark.parametrize("window", [None, 20])
def test_agrees_with_decoding_one_by_one(gpu: Any, window: int | None) -> None:
    """The two ways differ by bf16 roundings of weights and results only."""
    chunks = Chunks([(0, 20)], (8, 1, 64), window)
    attended = chunks.attend("cuda" if gpu.real else "cpu")
    keys, values = torch.zeros(2, 32, 1, 64).bfloat16()
    keys[:20], values[:20] = chunks.keys[chunks.slots], chunks.values[chunks.slots]
    out = decode(
        gpu.tensor(chunks.q), gpu.tensor(keys), gpu.tensor(values), gpu.tensor(torch.tensor([[0, 1]] * 20).int()), None,
        gpu.tensor(torch.arange(1, 21).int()), gpu.tensor(chunks.sinks), window=window, block_size=16, scale=0.2,
    )  # fmt: skip
    assert_close(gpu.plain(out), attended.double())


def test_the_gpu_operator_takes_what_it_is_given() -> None:
    """Its schema and the order of its log-sum-exp, on tensors without storage."""
    q, k = torch.empty(5, 8, 64, device="meta").bfloat16(), torch.empty(9, 2, 64, device="meta").bfloat16()
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    attended, lse = paged_prefill._flash(q, k, k, starts, starts, 1, 9, 128, 0.1)
    assert attended.shape == q.shape
    assert (lse.shape, lse.dtype) == ((8, 5), torch.float32)


def test_no_tokens_and_a_given_result() -> None:
    chunks = Chunks([(4, 3)], (8, 1, 64), None)
    out = torch.full_like(chunks.q, math.nan)
    arguments = (chunks.keys, chunks.values, chunks.slots, chunks.query_starts, chunks.key_starts, chunks.sinks)
    options: dict[str, Any] = {"most_queries": 3, "most_keys": 7, "window": None, "scale": 0.2}
    assert prefill(chunks.q, *arguments, **options, out=out) is out
    assert_close(out, chunks.exact())
    assert prefill(chunks.q[:0], *arguments, **options).shape == (0, 8, 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 16])
def test_keys_that_follow_one_another_are_read_where_they_are(window: int | None, device: str) -> None:
    chunks = Chunks([(0, 7), (40, 30)], (8, 2, 64), window)
    gathered = chunks.attend(device)
    chunks.keys, chunks.values = (
        torch.cat([cache[:2], cache[chunks.slots], cache[:2]])[2:-2] for cache in (chunks.keys, chunks.values)
    )
    chunks.slots = None
    assert torch.equal(chunks.attend(device), gathered)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 8, 64).double()}, "q: dtype"),
        ({"q": torch.zeros(3, 9, 64).bfloat16()}, "q: 9 query heads for 2 key heads"),
        ({"slots": torch.zeros(7, dtype=torch.int32)}, "slots: dtype"),
        ({"query_starts": torch.zeros(2)}, "query_starts: dtype"),
        ({"query_starts": torch.zeros(1).int(), "key_starts": torch.zeros(1).int()}, "query_starts: names no sequence"),
        ({"key_starts": torch.zeros(3).int()}, "key_starts: shape"),
        ({"most_queries": 0}, "most_queries: is 0"),
        ({"window": 0}, "window: is 0"),
        ({"sinks": torch.zeros(4)}, "sinks: shape"),
        ({"out": torch.zeros(3, 8, 32).bfloat16()}, "out: shape"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    cache = torch.zeros(32, 2, 64).bfloat16()
    arguments: dict[str, Any] = {
        "q": torch.zeros(3, 8, 64).bfloat16(), "keys": cache, "values": cache, "slots": torch.arange(7),
        "query_starts": torch.tensor([0, 3]).int(), "key_starts": torch.tensor([0, 7]).int(), "sinks": None,
        "most_queries": 3, "most_keys": 7, "window": None, "scale": 1.0,
    }  # fmt: skip
    with pytest.raises(KernelArgumentError, match=message):
        prefill(**arguments | change)
