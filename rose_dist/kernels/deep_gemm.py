"""The door to DeepGEMM, which multiplies rows packed by expert in FP8 on Hopper.

It is the package `sgl-deep-gemm` (PyPI's `deep-gemm` is an empty shell). It compiles a kernel with nvcc when it first
meets a shape, and keeps it beside this package's own kernels.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

from torch import Tensor

from rose_dist.kernels import jit
from rose_dist.kernels.errors import MissingToolchainError

PACKAGE = "sgl-deep-gemm==0.1.5.post1"
ALIGNMENT = 128
"""Rows of a tile; a tile belongs to one expert."""

Scaled = tuple[Tensor, Tensor]
"""Codes and scales."""


class GroupedGemm(Protocol):
    """What is used of DeepGEMM: d = a · bᵀ by expert, fp32 sums over blocks of 128 inputs, rounded to bf16.

    a: codes float8_e4m3fn and scales fp32, one for 128 values of a row, whose rows lie side by side. b: codes
    float8_e4m3fn [experts, outputs, inputs] and scales fp32 [experts, outputs / 128, inputs / 128], rounded up.
    Neither inputs nor outputs need be multiples of 128.
    """

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Scaled, b: Scaled, d: Tensor, grouped_layout: Tensor, *, use_psum_layout: bool = False,
        expected_m_for_psum_layout: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            a: [rows, inputs] and [rows, blocks] with strides (1, rows).
            d: bf16 [rows, outputs]; a tile's rows behind its expert's last are overwritten too.
            grouped_layout: with `use_psum_layout` int32 [experts], where each expert's rows end: the first one's start
                at 0, any other's at the next multiple of 128. Without it int32 [rows], each tile's expert in its first
                row and in its middle one, −1 for none; such tiles are read, and zeros written for them.
            expected_m_for_psum_layout: rows of an expert, by which the kernel's shape is chosen.
        """
        ...

    def m_grouped_fp8_fp4_gemm_nt_masked(
        self, a: Scaled, b: Scaled, d: Tensor, masked_m: Tensor, expected_m: int
    ) -> None:
        """
        Args:
            a: [experts, rows, inputs] and [experts, rows, blocks] with strides (rows · blocks, 1, rows); rows a
                multiple of 128.
            d: bf16 [experts, rows, outputs], overwritten up to the end of the last row's tile.
            masked_m: int32 [experts], each one's rows.
            expected_m: as `expected_m_for_psum_layout`.
        """
        ...


@cache
def load() -> GroupedGemm:
    """Raises `MissingToolchainError` without the package, or without nvcc for it to compile with."""
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(jit.cache_folder() / "deep_gemm"))
    try:
        module: Any = import_module("deep_gemm")
        module.set_mk_alignment_for_contiguous_layout(ALIGNMENT)
    except ImportError as error:
        raise MissingToolchainError(
            f"FP8 experts need DeepGEMM ({error}): pip install '{PACKAGE}', or choose --moe-weights mxfp4"
        ) from error
    except (OSError, AssertionError, AttributeError, RuntimeError) as error:
        raise MissingToolchainError(
            f"DeepGEMM can't be used ({type(error).__name__}: {error}): it must be {PACKAGE}, and CUDA_HOME must name "
            "a CUDA toolkit of 12.9 or later with bin/nvcc; or choose --moe-weights mxfp4"
        ) from error
    return cast("GroupedGemm", module)
