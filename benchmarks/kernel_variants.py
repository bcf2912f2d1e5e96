"""Other tilings of the row kernels: what `kernels.py` times beside those that the tables choose."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from benchmarks.graphs import Call
from rose_dist.kernels import quantize, rms_norm, swiglu, variants
from rose_dist.kernels.row_tiling import CLUSTER_SHAPE, RowShape
from rose_dist.kernels.variants import Ranges, RouterShape

FEW_ROWS = 132
"""Below, the tables choose their first shape on an H200."""

WIDE = RowShape(bytes=32, threads=32, lane_bytes=32)


def quantisers(rows: int, call: Call) -> dict[str, Call]:
    """The tiling that every quantiser had before, and a wider one; of few rows a wider one only."""
    if rows < FEW_ROWS:
        return {"32 B a lane": _holding(quantize, "QUANTIZE_SHAPES", WIDE, call)}
    return {f"{size} B a lane": _holding(quantize, "QUANTIZE_SHAPES", _streaming(64, size), call) for size in (16, 64)}


def quantized_norms(rows: int, hidden: int, call: Call) -> dict[str, Call]:
    if rows < FEW_ROWS:
        wide = {"32 B a lane": _holding(rms_norm, "QUANTIZE_SHAPES", WIDE, call)}
        return wide | _clusters("QUANTIZE_SHAPES", hidden, call)
    return {f"{size} B a lane": _holding(rms_norm, "QUANTIZE_SHAPES", _streaming(64, size), call) for size in (16, 64)}


def norms(rows: int, hidden: int, call: Call) -> dict[str, Call]:
    return _clusters("ROW_SHAPES", hidden, call) if rows < FEW_ROWS else {}


def activations(rows: int, *, quantized: bool, call: Call) -> dict[str, Call]:
    """Few rows: a row in one block, as before. Many: the tiling of before, and a wider one."""
    name = "QUANTIZED_ACTIVATION_SHAPES" if quantized else "ACTIVATION_SHAPES"
    if rows < FEW_ROWS:
        return {"a block a row": _holding(swiglu, name, RowShape(bytes=32, threads=32), call)}
    sizes = (16, 64) if quantized else ()
    return {f"{size} B a lane": _holding(swiglu, name, _streaming(128, size), call) for size in sizes}


def rotary(tokens: int, call: Call) -> dict[str, Call]:
    """Fewer and more neighbouring heads a lane."""
    if tokens < FEW_ROWS:
        return {}
    return {f"{size} B of heads a lane": _holding(variants, "ROTARY_BYTES", size, call) for size in (64, 256)}


def routers(tokens: int, *, counts: bool, call: Call) -> dict[str, Call]:
    """Two launches instead of one cluster."""
    if not counts or not 64 < tokens < 129:
        return {}
    return {"two launches": _holding(variants, "COUNTING_ROUTERS", RouterShape(warps=4, cluster=0), call)}


def _clusters(name: str, hidden: int, call: Call) -> dict[str, Call]:
    long = hidden * 2 > CLUSTER_SHAPE.split_threads * CLUSTER_SHAPE.bytes
    return {"a cluster a row": _holding(rms_norm, name, CLUSTER_SHAPE, call)} if long else {}


def _streaming(size: int, lane: int) -> RowShape:
    return RowShape(bytes=size, threads=128, lane_bytes=lane)


def _holding(module: ModuleType, name: str, variant: Any, call: Call) -> Call:
    """The call while the module's table holds that variant alone."""

    def other() -> Any:
        table = getattr(module, name)
        setattr(module, name, Ranges((0,), (variant,)))
        _forget()
        try:
            return call()
        finally:
            setattr(module, name, table)
            _forget()

    return other


def _forget() -> None:
    """Choices that public functions remember; loaded kernels stay."""
    for name, module in list(sys.modules.items()):
        if name.startswith("rose_dist.kernels.") and not name.startswith("rose_dist.kernels.cute"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
