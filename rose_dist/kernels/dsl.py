"""The one door to CuTeDSL: device code takes its names from here, and only device code imports this.

Raises `MissingToolchainError` where CuTeDSL, which belongs to the `cuda` extra, is not installed.
"""

from __future__ import annotations

from typing import Any

import torch

from rose_dist.kernels.errors import MissingToolchainError

try:
    import cutlass
    from cuda.bindings.driver import CUstream as Stream
    from cutlass import BFloat16, Boolean, Float16, Float32, Int16, Int32, Int64, Uint8, Uint16, Uint32, Uint64, cute
    from cutlass._mlir import ir
    from cutlass._mlir.dialects import llvm
    from cutlass.cutlass_dsl import T, dsl_user_op
except ModuleNotFoundError as error:
    raise MissingToolchainError(
        f"GPU kernels need CuTeDSL ({error.name} is missing): pip install 'rose-dist[cuda]'; CPU tensors need none"
    ) from error

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

__all__ = [
    "TYPES", "BFloat16", "Boolean", "Float16", "Float32", "Int16", "Int32", "Int64", "Stream", "T", "Uint8", "Uint16",
    "Uint32", "Uint64", "const_expr", "cute", "cutlass", "dsl_user_op", "ir", "llvm", "range_constexpr",
]  # fmt: skip
