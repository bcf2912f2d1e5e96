"""Other tilings of the row kernels: what `kernels.py` times beside those that the tables choose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from rose_dist.kernels import rms_norm, swiglu, variants
from rose_dist.kernels.cute import rms_norm as cute_norm
from rose_dist.kernels.row_tiling import QUANTIZE_SHAPES, SHORT_ROW_BYTES, RowShape
from rose_dist.kernels.variants import Ranges, RouterShape

Variant = Callable[[], AbstractContextManager[None]]
"""Holds for the calls made inside."""

FEW_ROWS = 132
"""Below, the tables choose their first shape on an H200."""
LONG_ROW_BYTES = 448 * 16
"""Rows that more than one block may share."""
LONG_ROWS = {
    "a cluster a row": RowShape(bytes=16, threads=32, split_threads=448),
    "two blocks that each read all": RowShape(bytes=16, threads=32, split_threads=448, apart=True),
    "two vectors a thread": RowShape(bytes=32, threads=32),
}


class ClustersOfOne(cute_norm.RMSNorm):
    """As every norm was launched before."""

    @property
    def cluster(self) -> list[int]:
        return [1, 1, 1]


def norms(rows: int, hidden: int, *, quantized: bool, residual: bool) -> dict[str, Variant]:
    """`residual`: results are not written over what is read, which blocks that each read all must not do."""
    table = "QUANTIZE_SHAPES" if quantized else "ROW_SHAPES"
    if rows < FEW_ROWS:
        long = LONG_ROWS if hidden * 2 > LONG_ROW_BYTES and residual else {}
        return {name: _with_shape(rms_norm, table, shape) for name, shape in long.items()}
    found: dict[str, Variant] = {
        "clusters of one block": partial(holding, cute_norm, "RMSNorm", ClustersOfOne),
        "weights first": partial(holding, RowShape, "streams", False),
    }
    if quantized and not residual and hidden * 2 <= SHORT_ROW_BYTES:
        found["32 B a lane"] = partial(holding, rms_norm, "SHORT_QUANTIZE_SHAPES", QUANTIZE_SHAPES)
    return found


def activations(rows: int) -> dict[str, Variant]:
    """Of quantised ones of few rows: how many blocks a row has."""
    if rows >= FEW_ROWS:
        return {}
    shapes = {
        "a block a row": RowShape(bytes=32, threads=32),
        "two blocks a row": RowShape(bytes=32, threads=32, split_threads=192),
        "a warp a block": RowShape(bytes=32, threads=32, split_threads=32),
    }
    return {name: _with_shape(swiglu, "QUANTIZED_ACTIVATION_SHAPES", shape) for name, shape in shapes.items()}


def routers(tokens: int, *, counts: bool) -> dict[str, Variant]:
    """Two launches instead of one cluster."""
    if not counts or not 64 < tokens < 129:
        return {}
    return {"two launches": _with_shape(variants, "COUNTING_ROUTERS", RouterShape(warps=4, cluster=0))}


def _with_shape(module: Any, table: str, shape: Any) -> Variant:
    return partial(holding, module, table, Ranges((0,), (shape,)))


@contextmanager
def holding(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute replaced, and what was chosen by it forgotten."""
    held = vars(owner)[name]
    setattr(owner, name, value)
    forget()
    try:
        yield
    finally:
        setattr(owner, name, held)
        forget()


def forget() -> None:
    """Choices that public functions remember; loaded kernels stay."""
    for name, module in list(sys.modules.items()):
        if name.startswith("rose_dist.kernels."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
