"""Expert layers in FP8: weights in e4m3 with a scale for 128 x 128 values, grouped GEMMs by DeepGEMM on a GPU.

Rows are packed by expert with every expert's first row at a multiple of `ALIGNMENT` (`PackedLayout(ALIGNMENT)`), and
quantised with a scale for 128 values of a row. DeepGEMM takes no bias: the first layer's goes into the activation
(`swiglu.activate_quantized`), the second's into combine. Sizes need not be multiples of 128: the last block is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rose_dist.kernels import checks
from rose_dist.kernels.errors import MissingToolchainError
from rose_dist.kernels.formats import E4M3_MAX, FP8, MIN_AMAX, ScaleLayout
from rose_dist.kernels.quantize import dequantize

BLOCK = 128
ALIGNMENT = 128
"""Rows at whose multiples an expert starts: a tile of the GEMM belongs to one expert."""


@dataclass(frozen=True)
class Fp8Weight:
    """One matrix an expert."""

    codes: Tensor
    """float8_e4m3fn [experts, outputs, inputs]."""
    scales: Tensor
    """fp32 [experts, outputs / 128, inputs / 128], rounded up: value = code · scale."""

    @classmethod
    def empty(cls, experts: int, outputs: int, inputs: int, device: torch.device | str = "cpu") -> Fp8Weight:
        """Room for so many matrices, to be filled by `store`. Raises `KernelArgumentError`."""
        checks.multiple("inputs", inputs, 16, "rows of codes start at multiples of 16 bytes")
        checks.multiple("outputs", outputs, 8, "rows of results start at multiples of 16 bytes")
        codes = torch.empty(experts, outputs, inputs, dtype=torch.float8_e4m3fn, device=device)
        return cls(codes, torch.empty(experts, -(-outputs // BLOCK), -(-inputs // BLOCK), device=device))

    def store(self, expert: int, matrix: Tensor) -> None:
        """Quantise one expert's matrix [outputs, inputs] of any float dtype, on the device that it is on."""
        checks.shape("matrix", matrix, *self.codes.shape[1:])
        codes, scales = quantize_blocks(matrix)
        self.codes[expert].copy_(codes)
        self.scales[expert].copy_(scales)

    def dequantize(self, expert: int) -> Tensor:
        """fp32 [outputs, inputs]."""
        outputs, inputs = self.codes.shape[1:]
        scales = self.scales[expert].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return self.codes[expert].float() * scales[:outputs, :inputs]


def quantize_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [outputs, inputs] and scales fp32 [outputs / 128, inputs / 128], rounded up.

    scale = max|block| / 448, code = matrix / scale to nearest even.
    """
    outputs, inputs = matrix.shape
    high, wide = -(-outputs // BLOCK), -(-inputs // BLOCK)
    padded = matrix.new_zeros(high * BLOCK, wide * BLOCK, dtype=torch.float32)
    padded[:outputs, :inputs] = matrix
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=MIN_AMAX) / E4M3_MAX
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(high * BLOCK, wide * BLOCK)[:outputs, :inputs], scales


def fp8_expert_linear(codes: Tensor, scales: Tensor, weight: Fp8Weight, experts: Tensor) -> Tensor:
    """y[r] = weight[experts[r]] · x[r], x given by its codes and scales.

    Args:
        codes: float8_e4m3fn [rows, inputs].
        scales: fp32 [rows, inputs / 128] in `ScaleLayout.COLUMNS`, as `quantize(x, FP8, layout=…)` gives them.
        experts: int32 [rows]; −1: no row. Constant over every `ALIGNMENT` rows but for −1 behind an expert's last.

    Returns:
        bf16 [rows, outputs]; rows of no expert are any.

    Raises:
        KernelArgumentError: for shapes or dtypes that don't fit.
        MissingToolchainError: on a GPU without DeepGEMM.
    """
    rows = codes.shape[0]
    checks.shape("codes", codes, None, weight.codes.shape[2])
    checks.dtype("codes", codes, torch.float8_e4m3fn)
    checks.scales(scales, FP8, ScaleLayout.COLUMNS, rows, codes.shape[1])
    checks.shape("experts", experts, rows)
    checks.dtype("experts", experts, torch.int32)
    if rows % ALIGNMENT:
        raise checks.fail("codes", f"has {rows} rows; must be a multiple of {ALIGNMENT}")
    out = torch.empty(rows, weight.codes.shape[1], dtype=torch.bfloat16, device=codes.device)
    if not codes.is_cuda:
        return _reference(codes, scales, weight, experts, out)
    if rows:
        _deep_gemm().m_grouped_fp8_gemm_nt_contiguous((codes, scales), (weight.codes, weight.scales), out, experts)
    return out


def _reference(codes: Tensor, scales: Tensor, weight: Fp8Weight, experts: Tensor, out: Tensor) -> Tensor:
    x = dequantize(codes, scales, FP8, layout=ScaleLayout.COLUMNS, dtype=torch.float32)
    for expert in sorted(set(experts.tolist()) - {-1}):
        mine = experts == expert
        out[mine] = (x[mine] @ weight.dequantize(expert).T).to(out.dtype)
    return out


def _deep_gemm() -> Any:
    try:
        import deep_gemm  # noqa: PLC0415 - optional, and it compiles at run time
    except ImportError as error:
        raise MissingToolchainError(
            "FP8 experts need DeepGEMM: pip install 'rose-dist[cuda]' (sgl-deep-gemm, not deep-gemm)"
        ) from error
    return deep_gemm
