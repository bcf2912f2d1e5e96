"""Other tilings of the row kernels: what `kernels.py` times beside those that the tables choose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from rose_dist.kernels import rms_norm, variants
from rose_dist.kernels.cute import rms_norm as cute_norm
from rose_dist.kernels.row_tiling import LONG_ROW_BYTES, SHORT_ROW_BYTES, RowShape
from rose_dist.kernels.variants import Ranges, RouterShape

Variant = Callable[[], AbstractContextManager[None]]
"""Holds for the calls made inside."""

FEW_ROWS = 132
"""Below, the tables choose their first shape on an H200."""


def norms(rows: int, hidden: int, *, quantized: bool, residual: bool) -> dict[str, Variant]:
    """Of few long rows: more threads; the next launch begun before the wait. Of many short ones: more registers."""
    if rows < FEW_ROWS and hidden * 2 > LONG_ROW_BYTES:
        return {
            "one vector a thread": partial(holding, rms_norm, "row_shape", lambda *_: RowShape(bytes=16, threads=32)),
            "the next launch early": partial(holding, rms_norm, "LONG_ROW_BYTES", 1 << 20),
        }
    if rows >= FEW_ROWS and hidden * 2 <= SHORT_ROW_BYTES and residual and quantized:
        return {"more registers": partial(holding, cute_norm, "CROWDED", ())}
    return {}


def routers(tokens: int, *, counts: bool) -> dict[str, Variant]:
    """One launch or two where the other is chosen; fewer, larger blocks of many tokens."""
    if not counts or tokens < 32:
        return {}
    name, shape = "two launches", RouterShape(warps=4, cluster=0)
    if tokens == 64:
        name, shape = "one launch", RouterShape(warps=8, cluster=8)
    if tokens > 64:
        name, shape = "16 warps a block", RouterShape(warps=16, cluster=0)
    return {name: _with_shape(variants, "COUNTING_ROUTERS", shape)}


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
