"""The one door to CuTeDSL: kernel files take its names from here.

CuTeDSL belongs to the `cuda` extra. Where it is not installed the names below are stand-ins that let a kernel file be
imported for its torch reference; compiling then raises `MissingToolchainError`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from rose_dist.kernels.errors import MissingToolchainError

INSTALLED = importlib.util.find_spec("cutlass") is not None


class _StandIn:
    """Takes any attribute and decorates by returning the function."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, function: Any = None, *_: Any, **__: Any) -> Any:
        return function


if INSTALLED:
    import cutlass
    from cuda.bindings.driver import CUstream as Stream
    from cutlass import BFloat16, Boolean, Float16, Float32, Int16, Int32, Int64, Uint8, Uint16, Uint32, Uint64, cute
    from cutlass._mlir import ir
    from cutlass._mlir.dialects import llvm
    from cutlass.cutlass_dsl import T, dsl_user_op

    const_expr, range_constexpr = cutlass.const_expr, cutlass.range_constexpr
    TYPES: dict[torch.dtype, Any] = {
        torch.bfloat16: BFloat16,
        torch.float16: Float16,
        torch.float32: Float32,
        torch.int32: Int32,
        torch.int64: Int64,
        torch.uint8: Uint8,
    }
    """The CuTeDSL type of a torch dtype that kernels load or store as is."""
else:
    cutlass = cute = ir = llvm = T = dsl_user_op = const_expr = range_constexpr = _StandIn()
    Boolean = Stream = BFloat16 = Float16 = Float32 = Int16 = Int32 = Int64 = Uint8 = Uint16 = Uint32 = Uint64 = object
    TYPES = {}


def require() -> None:
    """Raise `MissingToolchainError` unless CuTeDSL can be imported."""
    if not INSTALLED:
        raise MissingToolchainError(
            "GPU kernels need CuTeDSL, which is not installed: pip install 'rose-dist[cuda]' (CPU tensors need none)"
        )


__all__ = [
    "INSTALLED", "TYPES", "BFloat16", "Boolean", "Float16", "Float32", "Int16", "Int32", "Int64", "Stream", "T", "Uint8", "Uint16",
    "Uint32", "Uint64", "const_expr", "cute", "cutlass", "dsl_user_op", "ir", "llvm", "range_constexpr", "require",
]  # fmt: skip
