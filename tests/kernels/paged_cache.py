"""Paged caches for tests of attention, and its definition in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels.paged_attention import DecodeWorkspace, decode

NAN = math.nan
BLOCK = 16


@dataclass(frozen=True)
class Cache:
    """A cache full of NaN but for the tokens of some requests, which sit in shuffled blocks."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    window: int | None
    block_size: int = BLOCK

    @classmethod
    def filled(
        cls, lengths: list[int], key_heads: int, head_dim: int, *, window: int | None = None, block_size: int = BLOCK,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Cache:  # fmt: skip
        """With a window, a request's table starts at the first block that its query sees."""
        firsts = [0 if window is None else max(0, length - window) // block_size for length in lengths]
        counts = [-(-length // block_size) - first for length, first in zip(lengths, firsts, strict=True)]
        blocks = sum(counts) + 3
        order = torch.randperm(blocks).tolist()
        shape = (blocks * block_size, key_heads, head_dim)
        keys, values = (torch.full(shape, NAN).bfloat16() for _ in range(2))
        # Entries that no query may follow point far outside.
        tables = torch.full((len(lengths), max([*counts, 1])), 1 << 20, dtype=torch.int32)
        for row, (length, first, count) in enumerate(zip(lengths, firsts, counts, strict=True)):
            own, order = order[:count], order[count:]
            tables[row, :count] = torch.tensor(own, dtype=torch.int32)
            low = 0 if window is None else max(0, length - window)
            for position in range(low, length):
                slot = own[position // block_size - first] * block_size + position % block_size
                keys[slot], values[slot] = torch.randn(2, key_heads, head_dim).bfloat16()
        return cls(
            keys.to(dtype), values.to(dtype), tables, torch.tensor(firsts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32), window, block_size,
        )  # fmt: skip

    def visible(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the request's query sees, in float64."""
        length = int(self.lengths[row])
        low = 0 if self.window is None else max(0, length - self.window)
        slots = [
            int(self.tables[row, p // self.block_size - int(self.first[row])]) * self.block_size + p % self.block_size
            for p in range(low, length)
        ]
        return self.keys.double()[slots], self.values.double()[slots]


def exact(q: torch.Tensor, cache: Cache, row: int, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """The definition, head by head."""
    keys, values = cache.visible(row)
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros(q.shape[1:], dtype=torch.float64)
    for head in range(q.shape[1]):
        scores = keys[:, head // group] @ q[row, head].double() * scale
        terms = scores.tolist() + ([] if sinks is None else [float(sinks[head])])
        if scores.numel():
            top = max(terms)
            total = sum(math.exp(term - top) for term in terms)
            out[head] = (scores - top).exp() / total @ values[:, head // group]
    return out


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Weights are rounded to bf16 before they meet the values, and the result is."""
    assert (got.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max() + 1e-6


def attend(
    gpu: Any, q: torch.Tensor, cache: Cache, *, sinks: torch.Tensor | None = None, context: int = 1 << 20,
    rows: int | None = None, scale: float = 0.2, workspace: DecodeWorkspace | None = None, **options: float,
) -> torch.Tensor:  # fmt: skip
    moved = gpu.tensor(q)
    if workspace is None:
        workspace = DecodeWorkspace.allocate(
            requests=q.shape[0], query_heads=q.shape[1], key_heads=cache.keys.shape[1], head_dim=q.shape[2],
            context=context, device=moved.device,
        )  # fmt: skip
    out = decode(
        moved, gpu.tensor(cache.keys), gpu.tensor(cache.values), gpu.tensor(cache.tables),
        None if cache.window is None else gpu.tensor(cache.first), gpu.tensor(cache.lengths),
        None if sinks is None else gpu.tensor(sinks), window=cache.window, block_size=cache.block_size, scale=scale,
        rows=None if rows is None else gpu.tensor(torch.tensor([rows], dtype=torch.int32)), workspace=workspace,
        **options,
    )  # fmt: skip
    assert not gpu.plain(workspace.counters).any()
    return gpu.plain(out)


def check(gpu: Any, lengths: list[int], heads: tuple[int, int, int], window: int | None = None, **options: Any) -> None:
    query_heads, key_heads, head_dim = heads
    cache = Cache.filled(lengths, key_heads, head_dim, window=window)
    q = torch.randn(len(lengths), query_heads, head_dim).bfloat16()
    sinks = torch.randn(query_heads)
    out = attend(gpu, q, cache, sinks=sinks, **options)
    for row in range(len(lengths)):
        assert_close(out[row], exact(q, cache, row, 0.2, sinks))
