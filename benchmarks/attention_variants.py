"""Changes to attention that `attention.py --variants` and `attention_prefill.py --tilings` time: other bytes of a token
a block, other tilings, and what tells waiting for memory from computing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from benchmarks.kernel_variants import holding
from rose_dist.kernels import attention_tiling, paged_prefill
from rose_dist.kernels.cute import paged_attention_prefill, whole_token_attention
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


class CopiesAlone(whole_token_attention.WholeTokenAttention):
    """Every tile comes, none is multiplied: as fast as memory gives keys and values in this order."""

    @property
    def products(self) -> Products:
        return NoProducts(self.tiles, whole_token_attention.ROWS)


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
    return {
        "us whole tokens": _whole_tokens,
        "us whole tokens, copies alone": _copies_alone,
        **{f"us {size} B rows": partial(_with_rows_of, size) for size in sizes},
    }


@contextmanager
def _whole_tokens(_: Any) -> Iterator[None]:
    """Of as few requests as there are."""
    with _from(0):
        yield


@contextmanager
def _copies_alone(case: Any) -> Iterator[None]:
    with _whole_tokens(case), holding(whole_token_attention, "WholeTokenAttention", CopiesAlone):
        yield


@contextmanager
def _with_rows_of(size: int, _: Any) -> Iterator[None]:
    rows = dict.fromkeys((1, 2), Ranges((0,), (size,)))
    with _from(1 << 30), holding(attention_tiling, "ROW_BYTES", rows):
        yield


@contextmanager
def _from(works: int) -> Iterator[None]:
    """Blocks take whole tokens from so many requests times key heads on."""
    names = ("WHOLE_TOKENS", "WHOLE_TOKENS_OF_SHORT_WINDOWS")
    with holding(attention_tiling, names[0], works), holding(attention_tiling, names[1], works):
        yield
