"""Changes to attention that `attention.py --variants` and `attention_prefill.py --tilings` time: other bytes of a token
a block, other tilings, and what tells waiting for memory from computing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_variants import holding
from rose_dist.kernels import attention_tiling, paged_prefill
from rose_dist.kernels.cute import paged_attention_decode, paged_attention_prefill
from rose_dist.kernels.cute.attention_products import Products
from rose_dist.kernels.dsl import Float32
from rose_dist.kernels.prefill_tiling import PrefillTiling
from rose_dist.kernels.variants import Ranges
from rose_dist.kernels.warpgroup_matrix import commit_products

Variant = Callable[[Any], AbstractContextManager[None]]
"""Holds for the calls that a case (`attention.Decoding`) makes inside."""


class NoProducts(Products):
    """Of nothing: results are wrong."""

    def multiply(self, *_: Any) -> None:
        pass


class CopiesAlone(paged_attention_decode.DecodeAttention):
    """Every tile comes, none is multiplied: as fast as memory gives keys and values in this order."""

    @property
    def products(self) -> Products:
        return NoProducts(self.tiles, self.rows)


class PrefillProductsAlone(paged_attention_prefill.PrefillAttention):
    """Scores are the weights: what is left of the time without maxima and powers."""

    def weigh(self, scores: Any, *_: Any) -> Any:
        return scores, [1.0] * 2


class PrefillCopiesAlone(PrefillProductsAlone):
    """Every tile comes, none is multiplied."""

    def score(self, shared: Any, stage: Any, queries: Any) -> Any:
        commit_products()
        return [Float32(0.0)] * (self.tiling.keys // 2)

    def add_values(self, *_: Any) -> None:
        commit_products()


def _prefill_tiling(*shape: Any) -> AbstractContextManager[None]:
    return holding(paged_prefill, "PREFILL_TILINGS", {64: PrefillTiling(64, *shape)})


PREFILL_VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "us 2 x 128": partial(_prefill_tiling, 2, 128, 6, (40, 232)),
    "us 2 x 160": partial(_prefill_tiling, 2, 160, 5, (40, 232)),
    "us 2 x 96": partial(_prefill_tiling, 2, 96, 8, (40, 232)),
    "us 3 x 64": partial(_prefill_tiling, 3, 64, 8, (32, 160)),
    "us products alone": lambda: holding(paged_attention_prefill, "PrefillAttention", PrefillProductsAlone),
    "us copies alone": lambda: holding(paged_attention_prefill, "PrefillAttention", PrefillCopiesAlone),
}
"""By column: warpgroups x keys a tile."""


def of(itemsize: int) -> dict[str, Variant]:
    """By column of the table. itemsize: of the cache."""
    sizes = (64, 128, 256) if itemsize == 1 else (128, 256)
    return {f"us {size} B rows": partial(_with_rows_of, size) for size in sizes} | {
        "us copies alone": _copies_alone,
        "us blocks in order": _blocks_in_order,
    }


def _with_rows_of(size: int, _: Any) -> AbstractContextManager[None]:
    return holding(attention_tiling, "ROW_BYTES", dict.fromkeys((1, 2), Ranges((0,), (size,))))


def _copies_alone(_: Any) -> AbstractContextManager[None]:
    return holding(paged_attention_decode, "DecodeAttention", CopiesAlone)


@contextmanager
def _blocks_in_order(case: Any) -> Iterator[None]:
    """As if no request had come or gone while another ran."""
    shuffled = case.tables
    case.tables = torch.arange(shuffled.numel(), device=shuffled.device, dtype=shuffled.dtype).view_as(shuffled)
    try:
        yield
    finally:
        case.tables = shuffled
