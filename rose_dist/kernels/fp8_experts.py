"""The two linear layers of experts in FP8: weights e4m3 with a scale for 128 x 128 values, rows with one for 128.

On a GPU the products are DeepGEMM's, and rows are packed as it wants them: `FEW` for up to 128 tokens, `MANY` for more.
It takes no bias: the first layer's goes into the activation, the second's into combine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import checks, deep_gemm
from rose_dist.kernels.arch import device_info
from rose_dist.kernels.deep_gemm import ALIGNMENT
from rose_dist.kernels.errors import UnsupportedArchError
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.formats import E4M3_MAX, FP8, MIN_AMAX, ScaleLayout
from rose_dist.kernels.mxfp4_experts import ExpertRows
from rose_dist.kernels.quantize import dequantize, quantize
from rose_dist.kernels.swiglu import ALPHA, Gate, Rows, activate_quantized

BLOCK = 128
MANY = PackedLayout(ALIGNMENT)
"""DeepGEMM's contiguous layout: one expert's rows after the other's, each from the next multiple of 128."""
FEW = PackedLayout(ALIGNMENT, ALIGNMENT)
"""Its masked layout: 128 rows an expert, of which only the tiles with rows are worked on."""


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

    scale = the least power of two that is at least max|block| / 448, code = matrix / scale to nearest even. A power of
    two costs a float format no precision, and MXFP4's values, which have one too, become FP8 without loss wherever the
    scales of a block lie within a factor of 2^14.
    """
    outputs, inputs = matrix.shape
    high, wide = -(-outputs // BLOCK), -(-inputs // BLOCK)
    padded = matrix.new_zeros(high * BLOCK, wide * BLOCK, dtype=torch.float32)
    padded[:outputs, :inputs] = matrix
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    mantissa, power = torch.frexp(blocks.abs().amax((1, 3)).clamp(min=MIN_AMAX) / E4M3_MAX)
    scales = torch.ldexp(torch.ones_like(mantissa), power - (mantissa == 0.5).int())
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(high * BLOCK, wide * BLOCK)[:outputs, :inputs], scales


@dataclass(frozen=True)
class Fp8Rows:
    """Rows packed by expert, quantised."""

    codes: Tensor
    """float8_e4m3fn [rows, inputs]."""
    scales: Tensor
    """fp32 [rows, blocks]; on a GPU by columns: strides (1, rows), or in `FEW` [experts, 128, blocks] with strides
    (128 · blocks, 1, 128).
    """

    @classmethod
    def of(cls, x: Tensor) -> Fp8Rows:
        """Rows of a float dtype, on the CPU. On a GPU they are quantised before the dispatch, which orders scales."""
        return cls(*quantize(x, FP8))


def fp8_expert_swiglu(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor, rows: ExpertRows, *, limit: float, dtype: torch.dtype,
    alpha: float = ALPHA,
) -> Fp8Rows:  # fmt: skip
    """h[r] = clamped_swiglu(weight[e] · x[r] + bias[e]), quantised, for the expert e that row r belongs to.

    Args:
        weight: [experts, 2 · intermediate, inputs]; even rows are gates, odd ones linear.
        bias: [experts, 2 · intermediate] of `dtype`.
        rows: on a GPU with a list.
        dtype: to which the product is rounded; bf16 on a GPU.
    """
    gate_up = fp8_expert_linear(x, weight, rows, dtype)
    if not gate_up.is_cuda:
        experts = torch.repeat_interleave(torch.arange(len(rows.counts), dtype=torch.int32), rows.counts)
        codes, scales = activate_quantized(
            Gate.CLAMPED_SWIGLU, gate_up, FP8, alpha=alpha, limit=limit, bias=bias, rows=Rows(experts=experts)
        )
        return Fp8Rows(codes, scales)
    if rows.listed is None:
        raise checks.fail("rows", "need a list on a GPU: without it the padding would be worked on too")
    codes, scales = activate_quantized(
        Gate.CLAMPED_SWIGLU, gate_up, FP8, layout=ScaleLayout.COLUMNS, group_rows=rows.layout.rows_per_expert,
        alpha=alpha, limit=limit, bias=bias, rows=rows.listed,
    )  # fmt: skip
    return Fp8Rows(codes, scales)


def fp8_expert_linear(x: Fp8Rows, weight: Fp8Weight, rows: ExpertRows, dtype: torch.dtype) -> Tensor:
    """y[r] = weight[e] · x[r] for the expert e that row r belongs to; nobody's rows are any. On the CPU rows are packed
    side by side.

    Returns:
        [rows, outputs] of `dtype`, which is bf16 on a GPU.

    Raises:
        KernelArgumentError: for shapes, dtypes or packings that don't fit.
        MissingToolchainError: on a GPU without DeepGEMM.
    """
    total, layout = x.codes.shape[0], rows.layout
    checks.shape("codes", x.codes, None, weight.codes.shape[2])
    checks.dtype("codes", x.codes, torch.float8_e4m3fn)
    if not x.codes.is_cuda:
        return _reference(x, weight, rows, dtype)
    if layout not in (FEW, MANY) or total % ALIGNMENT:
        raise checks.fail("codes", f"has {total} rows in {layout}; DeepGEMM takes {FEW} or {MANY}")
    if dtype is not torch.bfloat16:
        raise checks.fail("dtype", f"is {dtype}; DeepGEMM's results are bfloat16")
    out = torch.empty(total, weight.codes.shape[1], dtype=dtype, device=x.codes.device)
    gemm, matrices = deep_gemm.load(), (weight.codes, weight.scales)
    if layout == FEW:
        groups = (weight.codes.shape[0], ALIGNMENT, -1)
        gemm.m_grouped_fp8_fp4_gemm_nt_masked(
            (x.codes.view(groups), x.scales), matrices, out.view(groups), rows.counts, min(rows.most, ALIGNMENT)
        )
    else:
        # A fixed number of expected rows: it would compile another kernel for many a length of prompt.
        gemm.m_grouped_fp8_gemm_nt_contiguous(
            (x.codes, x.scales), matrices, out, rows.ends, use_psum_layout=True, expected_m_for_psum_layout=ALIGNMENT
        )
    return out


def require(device: torch.device) -> None:
    """Raises `MissingToolchainError` or `UnsupportedArchError` where a GPU can't work on experts in FP8."""
    arch = device_info(device.index).arch
    if arch.blackwell:
        raise UnsupportedArchError(f"FP8 experts run on Hopper only, this GPU is {arch}; choose --moe-weights mxfp4")
    deep_gemm.load()


def _reference(x: Fp8Rows, weight: Fp8Weight, rows: ExpertRows, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.codes.shape[0], weight.codes.shape[1], dtype=dtype)
    wide = dequantize(x.codes, x.scales, FP8, dtype=torch.float32)
    for expert, (start, end) in enumerate(zip(rows.offsets.tolist(), rows.ends.tolist(), strict=False)):
        if end > start:
            out[start:end] = (wide[start:end] @ weight.dequantize(expert).T).to(dtype)
    return out
