"""Other tilings of the row kernels: what `kernels.py` times beside those that the tables choose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from rose_dist.kernels import rms_norm, swiglu, variants
from rose_dist.kernels.row_tiling import SHORT_ROW_BYTES, RowShape
from rose_dist.kernels.variants import Ranges, RouterShape

Variant = Callable[[], AbstractContextManager[None]]
"""Holds for the calls made inside."""

FEW_ROWS = 132
"""Below, the tables choose their first shape on an H200."""
LONG_ROW_BYTES = 448 * 16
"""Rows that more than one block may share."""
BLOCKS = {
    "64 threads a block": RowShape(bytes=64, threads=64, lane_bytes=32),
    "256 threads a block": RowShape(bytes=64, threads=256, lane_bytes=32),
    "256 threads a block, in clusters of one": RowShape(bytes=64, threads=256, lane_bytes=32, clusters=True),
    "64 B a lane": RowShape(bytes=64, threads=128, lane_bytes=64),
    "64 B a lane, in clusters of one": RowShape(bytes=64, threads=128, lane_bytes=64, clusters=True),
}
"""Of many short rows with residual and quantisation."""


def norms(rows: int, hidden: int, *, quantized: bool, residual: bool) -> dict[str, Variant]:
    """`residual`: results are not written over what is read, which blocks that each read all must not do."""
    table = "QUANTIZE_SHAPES" if quantized else "ROW_SHAPES"
    if rows < FEW_ROWS:
        if hidden * 2 <= LONG_ROW_BYTES:
            return {}
        shapes = {"two vectors a thread": RowShape(bytes=32, threads=32)}
        if residual:
            shapes["two blocks that each read all"] = RowShape(bytes=16, threads=32, split_threads=448)
        return {name: _with_shape(rms_norm, table, shape) for name, shape in shapes.items()}
    if not residual or hidden * 2 > SHORT_ROW_BYTES:
        return {}
    shapes = BLOCKS if quantized else {}
    return {"a plain grid": partial(holding, rms_norm, "SHORT_ROW_BYTES", 0)} | {
        name: partial(holding, rms_norm, "_shape", partial(_this, shape)) for name, shape in shapes.items()
    }


def _this(shape: RowShape, *_: Any) -> RowShape:
    return shape


def activations(rows: int, *, quantized: bool) -> dict[str, Variant]:
    """Of few rows: two blocks a row instead of three."""
    if rows >= FEW_ROWS:
        return {}
    table = "QUANTIZED_ACTIVATION_SHAPES" if quantized else "ACTIVATION_SHAPES"
    return {"two blocks a row": _with_shape(swiglu, table, RowShape(bytes=32, threads=32, split_threads=192))}


def routers(tokens: int, *, counts: bool) -> dict[str, Variant]:
    """Two launches, or twice the blocks, instead of a cluster of 8."""
    if not counts or not 64 < tokens < 129:
        return {}
    shapes = {
        "two launches": RouterShape(warps=4, cluster=0),
        "two launches, a warp a block": RouterShape(warps=1, cluster=0),
        "16 blocks": RouterShape(warps=8, cluster=16),
    }
    return {name: _with_shape(variants, "COUNTING_ROUTERS", shape) for name, shape in shapes.items()}


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
