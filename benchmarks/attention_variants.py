"""Changes to decode attention that `attention.py --variants` times: other bytes of a token a block, and what tells
waiting for memory from computing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_variants import holding
from rose_dist.kernels import attention_tiling
from rose_dist.kernels.cute import paged_attention_decode
from rose_dist.kernels.cute.attention_products import Products
from rose_dist.kernels.variants import Ranges

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
