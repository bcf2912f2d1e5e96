"""The kernels that work row by row, with the constants that the supported models give them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.embedding import Embed
from rose_dist.kernels.cute.qk_norm import QKNormRope
from rose_dist.kernels.cute.quantize import Dequantize, decoded_count, quantize_kernel
from rose_dist.kernels.cute.rms_norm import norm_kernel
from rose_dist.kernels.cute.routing import Route
from rose_dist.kernels.cute.swiglu import activation_kernel
from rose_dist.kernels.formats import FORMATS, FP8, MXFP8, BlockFormat, BlockOutput, Scale, ScaleLayout
from rose_dist.kernels.fp8_experts import FEW
from rose_dist.kernels.jit import Kernel
from rose_dist.kernels.qk_norm import Rotary
from rose_dist.kernels.rms_norm import row_shape
from rose_dist.kernels.routing import Score
from rose_dist.kernels.row_tiling import (
    ACTIVATION_SHAPES,
    DECODE_SHAPES,
    LONG_ROW_BYTES,
    QUANTIZE_SHAPES,
    QUANTIZED_ACTIVATION_SHAPES,
    ROW_SHAPES,
    SHORT_QUANTIZE_SHAPES,
    tile,
)
from rose_dist.kernels.swiglu import Gate
from rose_dist.kernels.variants import COUNTING_ROUTERS, ROTARY_BYTES, ROUTERS

HIDDEN = (2880, 4096, 7168)
"""GPT-OSS, Qwen3-MoE 235B, DeepSeek-V3."""
ANGLE_BYTES = 128
"""cos or sin of one position, for a head_dim of 64: GPT-OSS."""
QUANTIZED_COLUMNS = 2880
"""Not a multiple of 128: FP8's last block is half one."""
QK_HEADS = ((64, 8, 64, False), (64, 4, 128, True), (16, 8, 256, True))
"""Query heads, key heads, head_dim, norm: GPT-OSS, Qwen3-MoE 235B, and a model with large heads."""
ROUTES = (
    (32, 4, Score.SOFTMAX_OF_CHOSEN, 1),
    (128, 4, Score.SOFTMAX_OF_CHOSEN, 1),
    (128, 8, Score.SOFTMAX_OF_CHOSEN, 1),
    (256, 8, Score.SIGMOID, 8),
    (1024, 32, Score.SOFTMAX, 1),
)
"""Experts, k, rule, groups: GPT-OSS 20b and 120b, Qwen3-MoE, DeepSeek-V3, and the largest that is promised."""


def row_kernels(arch: Arch) -> Iterator[Kernel]:
    """All of them, some twice."""
    for kernels in (norms, qk_norms, activations, quantizers, routers, embeddings):
        yield from kernels(arch)


def scale_layouts(fmt: BlockFormat, arch: Arch) -> list[ScaleLayout]:
    """The layouts that GEMM libraries read on this arch, the plain one first."""
    if fmt.scale is Scale.FP32:
        return [ScaleLayout.ROWS, ScaleLayout.COLUMNS]
    if not arch.blackwell:
        return [ScaleLayout.ROWS]
    return [ScaleLayout.ROWS, ScaleLayout.PACKED_COLUMNS if fmt.block == FP8.block else ScaleLayout.TILES]


def norms(arch: Arch) -> Iterator[Kernel]:
    dtype, width = torch.bfloat16, arch.vector_bytes
    for hidden in (64, 128, *HIDDEN, 16384):
        for rows_for_each_sm in ROW_SHAPES.starts:
            for residual in (False, True):
                shape = row_shape(hidden * 2, rows_for_each_sm, residual, False)
                yield norm_kernel(
                    arch, dtype, dtype, hidden, shape, width, 0.0, residual, None, hidden * 2 > LONG_ROW_BYTES
                )
    yield norm_kernel(arch, dtype, dtype, 2880, ROW_SHAPES.variants[0], width, 0.0, False, None, ends_chain=True)
    output = BlockOutput(FP8, ScaleLayout.ROWS, 128)
    yield norm_kernel(arch, dtype, dtype, 128, SHORT_QUANTIZE_SHAPES.variants[-1], width, 0.0, False, output)
    for hidden in HIDDEN:
        for fmt in (FP8, MXFP8):
            for rows_for_each_sm in QUANTIZE_SHAPES.starts:
                shape = row_shape(hidden * 2, rows_for_each_sm, True, True)
                output = BlockOutput(fmt, scale_layouts(fmt, arch)[-1], hidden)
                yield norm_kernel(
                    arch, dtype, dtype, hidden, shape, width, 0.0, True, output, hidden * 2 > LONG_ROW_BYTES
                )
    for fmt in (FP8, MXFP8):
        output = BlockOutput(fmt, ScaleLayout.ROWS, 128)
        yield norm_kernel(arch, dtype, dtype, 128, row_shape(256, 8, True, True), width, 0.0, True, output)


def qk_norms(arch: Arch) -> Iterator[Kernel]:
    dtype, fp32, width = torch.bfloat16, torch.float32, arch.vector_bytes
    for query_heads, key_heads, head_dim, norm in QK_HEADS:
        heads = (query_heads, key_heads, head_dim)
        counts = [max(size // (2 * width), 1) for size in ROTARY_BYTES.variants]
        for each in counts:
            yield QKNormRope(arch, dtype, fp32, *heads, width, norm, Rotary.NEOX, head_dim, dtype, each)
            yield QKNormRope(arch, dtype, fp32, *heads, width, norm, Rotary.NEOX, head_dim, torch.float8_e4m3fn, each)
        yield QKNormRope(arch, dtype, fp32, *heads, width, norm, Rotary.INTERLEAVED, head_dim, dtype, counts[-1])
        yield QKNormRope(arch, dtype, dtype, *heads, width, False, Rotary.NEOX, head_dim, None, counts[-1])
        if head_dim == 128:
            yield QKNormRope(arch, dtype, fp32, *heads, width, norm, Rotary.NEOX, head_dim // 2, dtype, counts[-1])
        if norm:
            yield QKNormRope(arch, dtype, fp32, *heads, width, True, Rotary.NONE, head_dim, None, 1)


def activations(arch: Arch) -> Iterator[Kernel]:
    dtype, width = torch.bfloat16, arch.vector_bytes
    for gate, columns, bias in ((Gate.CLAMPED_SWIGLU, 2880, True), (Gate.SILU, 2048, False), (Gate.SILU, 1536, False)):
        for fmt in (None, FP8, MXFP8):
            output = None if fmt is None else BlockOutput(fmt, scale_layouts(fmt, arch)[-1], columns)
            shapes = ACTIVATION_SHAPES if fmt is None else QUANTIZED_ACTIVATION_SHAPES
            for shape in shapes.variants:
                yield activation_kernel(arch, gate, dtype, columns, shape, width, bias, output)
                if bias and fmt is FP8:
                    grouped = BlockOutput(fmt, ScaleLayout.COLUMNS, columns, FEW.rows_per_expert)
                    yield activation_kernel(arch, gate, dtype, columns, shape, width, bias, grouped, listed=True)


def routers(arch: Arch) -> Iterator[Kernel]:
    for experts, k, score, groups in ROUTES:
        bias = score is Score.SIGMOID
        for counts, shapes in ((False, ROUTERS), (True, COUNTING_ROUTERS)):
            for shape in shapes.variants:
                dtype = torch.float32 if bias else torch.bfloat16
                rule = (dtype, experts, k, score, groups, max(groups // 2, 1), bias)
                for load in {False, not counts}:
                    yield Route(arch, *rule, counts, shape, 16, load)


def embeddings(arch: Arch) -> Iterator[Kernel]:
    width = arch.vector_bytes
    for hidden in HIDDEN:
        for shape in ROW_SHAPES.variants:
            tiling = tile(hidden * 2 // width, width, shape)
            yield Embed(arch, torch.bfloat16, tiling, width, ANGLE_BYTES)


def quantizers(arch: Arch) -> Iterator[Kernel]:
    dtype, width = torch.bfloat16, arch.vector_bytes
    for fmt in FORMATS.values():
        for layout in scale_layouts(fmt, arch):
            output = BlockOutput(fmt, layout, QUANTIZED_COLUMNS)
            for shape in QUANTIZE_SHAPES.variants:
                yield quantize_kernel(arch, dtype, shape, width, output)
            for shape in DECODE_SHAPES.variants:
                tiling = tile(QUANTIZED_COLUMNS // decoded_count(arch, dtype), width, shape)
                yield Dequantize(arch, dtype, tiling, width, output)
