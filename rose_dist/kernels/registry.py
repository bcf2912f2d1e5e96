"""Every kernel with the constants that the supported models give it: what `rose kernels` and CI compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from rose_dist.kernels import launch, probe
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.all_reduce_multicast import Multicast
from rose_dist.kernels.cute.all_reduce_one_shot import OneShot
from rose_dist.kernels.cute.all_reduce_two_shot import TwoShot
from rose_dist.kernels.cute.attention_sinks import ApplySinks
from rose_dist.kernels.cute.combine_norm import CombineNorm
from rose_dist.kernels.cute.embedding import Embed
from rose_dist.kernels.cute.exchange_combine import ExchangeCombine
from rose_dist.kernels.cute.exchange_dispatch import ExchangeDispatch
from rose_dist.kernels.cute.exchange_rows import CombineRows, DispatchRows
from rose_dist.kernels.cute.expert_map import MapExperts
from rose_dist.kernels.cute.linear_add import LinearAdd
from rose_dist.kernels.cute.linear_rotary import LinearRotary
from rose_dist.kernels.cute.moe_combine import VECTOR_BYTES, Combine
from rose_dist.kernels.cute.moe_dispatch_decode import DispatchDecode
from rose_dist.kernels.cute.moe_dispatch_prefill import AssignSlots, ScatterRows
from rose_dist.kernels.cute.mxfp4_experts import ExpertLinear
from rose_dist.kernels.cute.mxfp4_experts_prefill import ExpertGemm
from rose_dist.kernels.cute.mxfp4_experts_warpgroup import WarpgroupExpertGemm
from rose_dist.kernels.cute.network_combine import LandResultRows, LandResults
from rose_dist.kernels.cute.network_dispatch import LandRecords
from rose_dist.kernels.cute.paged_attention_decode import DecodeAttention, heads_together
from rose_dist.kernels.cute.qk_norm import QKNormRope
from rose_dist.kernels.cute.quantize import Dequantize, decoded_count, quantize_kernel
from rose_dist.kernels.cute.resident_weights import ResidentWeights
from rose_dist.kernels.cute.rms_norm import norm_kernel
from rose_dist.kernels.cute.route_rows import RouteRows
from rose_dist.kernels.cute.routing import Route
from rose_dist.kernels.cute.small_linear import COLUMNS, SmallLinear
from rose_dist.kernels.cute.swiglu import activation_kernel
from rose_dist.kernels.exchange_layout import FUSED_FORMATS, NVLINK_CHUNK, ExchangeLayout
from rose_dist.kernels.exchange_tiling import PARTS
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.formats import FORMATS, FP8, MXFP8, BlockFormat, BlockOutput, Scale, ScaleLayout
from rose_dist.kernels.fp8_experts import FEW
from rose_dist.kernels.jit import Kernel
from rose_dist.kernels.linear_shapes import resident
from rose_dist.kernels.moe_dispatch import DECODE_THREADS, SCATTER_SHAPE, SPLITS
from rose_dist.kernels.mxfp4 import BLOCK
from rose_dist.kernels.mxfp4_layout import TILE_BYTES, TILE_ROWS
from rose_dist.kernels.network_layout import NetworkLayout
from rose_dist.kernels.paged_attention import HEAD_DIMS
from rose_dist.kernels.qk_norm import Rotary
from rose_dist.kernels.routing import Score
from rose_dist.kernels.row_tiling import (
    ACTIVATION_SHAPES,
    CLUSTER_SHAPE,
    DECODE_SHAPES,
    QUANTIZE_SHAPES,
    QUANTIZED_ACTIVATION_SHAPES,
    ROW_SHAPES,
    tile,
)
from rose_dist.kernels.stream_tiling import EXPERT_SHAPES, stream
from rose_dist.kernels.swiglu import Gate
from rose_dist.kernels.variants import COUNTING_ROUTERS, LINEAR_SHAPES, ROTARY_BYTES, ROUTERS, gemm
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES

HIDDEN = (2880, 4096, 7168)
"""GPT-OSS, Qwen3-MoE 235B, DeepSeek-V3."""

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


MOE_ROWS = (
    (32, 4, 2880, torch.bfloat16, 0, True),
    (128, 4, 2880, torch.bfloat16, 0, True),
    (256, 8, 7168, torch.bfloat16, 0, False),
    (256, 8, 7168, torch.uint8, 56, False),
    (128, 4, 2880, torch.uint8, 23, True),
)
"""Experts, k, hidden, payload, fp32 scales, bias: GPT-OSS 20b and 120b, DeepSeek-V3 in bf16 and in FP8, and GPT-OSS
120b in FP8.
"""

GPT_OSS_EXCHANGE = ExchangeLayout(
    ranks=2, experts=128, top_k=4, max_tokens=128, row_bytes=5760, scale_bytes=0, result_bytes=5760
)
DEEPSEEK_EXCHANGE = ExchangeLayout(
    ranks=8,
    experts=256,
    top_k=8,
    max_tokens=4096,
    row_bytes=7168,
    scale_bytes=224,
    result_bytes=14336,
    in_flight=2,
    chunk=NVLINK_CHUNK,
)
"""Rows in bf16, decode alone; and in FP8 with results in bf16, also prefill."""

MXFP4_EXPERTS = (128, 2880, 2880)
"""Experts, hidden, intermediate: GPT-OSS 120b. The 20b's kernels differ in nothing but the number of experts."""

LINEAR_INPUTS = (2880, 4096)
"""GPT-OSS's hidden size, and the width of its attention's output."""

MOE_LAYOUTS = (PackedLayout(), PackedLayout(128), PackedLayout(128, 128))
"""For own kernels, and DeepGEMM's contiguous and masked layouts."""


def kernels(arch: Arch) -> list[Kernel]:
    """All kernels of the registry for one arch, each once."""
    return list(dict.fromkeys(_all(arch)))


def _all(arch: Arch) -> Iterator[Kernel]:
    yield from _norms(arch)
    yield from _qk_norms(arch)
    yield from _activations(arch)
    yield from _quantizers(arch)
    yield from _routers(arch)
    yield from _embeddings(arch)
    yield from _moe(arch)
    yield from _attention(arch)
    yield from _sinks(arch)
    yield from _mxfp4_experts(arch)
    yield from _small_linears(arch)
    yield from _few_rows(arch)
    yield from _all_reduces(arch)
    yield from _exchanges(arch)
    yield from _across_nodes(arch)
    yield probe.GridBarriers(arch, repeats=100)
    yield probe.Primitives(arch, multicast=True)


def scale_layouts(fmt: BlockFormat, arch: Arch) -> list[ScaleLayout]:
    """The layouts that GEMM libraries read on this arch, the plain one first."""
    if fmt.scale is Scale.FP32:
        return [ScaleLayout.ROWS, ScaleLayout.COLUMNS]
    if not arch.blackwell:
        return [ScaleLayout.ROWS]
    return [ScaleLayout.ROWS, ScaleLayout.PACKED_COLUMNS if fmt.block == FP8.block else ScaleLayout.TILES]


def _norms(arch: Arch) -> Iterator[Kernel]:
    dtype, width = torch.bfloat16, arch.vector_bytes
    for hidden in (64, 128, *HIDDEN, 16384):
        for shape in ROW_SHAPES.variants:
            for residual in (False, True):
                yield norm_kernel(arch, dtype, dtype, hidden, shape, width, 0.0, residual, None)
    for residual in (False, True):
        yield norm_kernel(arch, dtype, dtype, HIDDEN[-1], CLUSTER_SHAPE, width, 0.0, residual, None)
    for hidden in HIDDEN:
        for fmt in (FP8, MXFP8):
            for shape in QUANTIZE_SHAPES.variants:
                output = BlockOutput(fmt, scale_layouts(fmt, arch)[-1], hidden)
                yield norm_kernel(arch, dtype, dtype, hidden, shape, width, 0.0, True, output)


def _qk_norms(arch: Arch) -> Iterator[Kernel]:
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


def _activations(arch: Arch) -> Iterator[Kernel]:
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


def _routers(arch: Arch) -> Iterator[Kernel]:
    for experts, k, score, groups in ROUTES:
        bias = score is Score.SIGMOID
        for counts, shapes in ((False, ROUTERS), (True, COUNTING_ROUTERS)):
            for shape in shapes.variants:
                dtype = torch.float32 if bias else torch.bfloat16
                yield Route(arch, dtype, experts, k, score, groups, max(groups // 2, 1), bias, counts, shape, 16)


def _moe(arch: Arch) -> Iterator[Kernel]:
    width = arch.vector_bytes
    for experts, k, hidden, dtype, scales, bias in MOE_ROWS:
        row_bytes, scale_bytes = hidden * dtype.itemsize, 4 * scales
        copied = (width, scale_bytes, launch.widest(arch, scale_bytes))
        for layout in MOE_LAYOUTS:
            for splits in SPLITS.variants:
                for columns in {False, scales > 0}:
                    yield DispatchDecode(arch, experts, k, row_bytes, *copied, columns, layout, splits, DECODE_THREADS)
            yield AssignSlots(arch, experts, k, layout, warps=8)
        for columns in {False, scales > 0}:
            yield ScatterRows(arch, k, tile(row_bytes // width, width, SCATTER_SHAPE), *copied, columns)
        for table_width in (0, 3):
            yield MapExperts(arch, experts, k, table_width)
        bf16 = torch.bfloat16
        for accumulate in (False, True):
            yield Combine(arch, k, hidden, bf16, bf16, bf16 if bias else None, accumulate, VECTOR_BYTES)


def _attention(arch: Arch) -> Iterator[Kernel]:
    dtype = torch.bfloat16
    for head_dim in HEAD_DIMS:
        for wide in (False, True):
            for cache in (torch.bfloat16, torch.float8_e4m3fn):
                heads = heads_together(8, head_dim, cache, wide)
                yield DecodeAttention(arch, dtype, cache, head_dim, heads, wide, block_tiles=1, early=True)
    yield DecodeAttention(arch, dtype, dtype, 64, heads=1, wide_group=False, block_tiles=1, early=True)
    yield DecodeAttention(arch, dtype, dtype, 64, heads=2, wide_group=False, block_tiles=1, early=False)


def _sinks(arch: Arch) -> Iterator[Kernel]:
    for query_heads, head_dim in ((64, 64), (8, 64), (16, 128)):
        yield ApplySinks(arch, torch.bfloat16, query_heads, head_dim, arch.vector_bytes)


def _mxfp4_experts(arch: Arch) -> Iterator[Kernel]:
    experts, hidden, intermediate = MXFP4_EXPERTS
    tiles = (2 * intermediate // TILE_ROWS, hidden // TILE_ROWS)
    for shape in EXPERT_SHAPES.variants:
        first, second = (stream(shape, columns // BLOCK, TILE_BYTES) for columns in (hidden, intermediate))
        yield ExpertLinear(arch, experts, tiles, first, gated=True)
        yield ExpertLinear(arch, experts, tiles[:1], first, gated=True)
        yield ExpertLinear(arch, experts, tiles[1:], second, gated=False)
    for count, columns, gated in ((tiles[0], hidden // BLOCK, True), (tiles[1], intermediate // BLOCK, False)):
        if not arch.hopper:
            yield ExpertGemm(arch, experts, count, gemm(columns, TILE_BYTES), gated)
            continue
        for wide in WARPGROUP_SHAPES.variants:
            yield WarpgroupExpertGemm(arch, experts, count, wide.tiling(columns, TILE_BYTES), gated)


def _small_linears(arch: Arch) -> Iterator[Kernel]:
    for inputs in LINEAR_INPUTS:
        for tiles, shape in enumerate(LINEAR_SHAPES.variants, 1):
            warps = shape.warps_for(inputs // COLUMNS)
            for wide in (False, True):
                yield SmallLinear(arch, inputs, warps, shape.ahead, shape.per_sm, tiles, wide)


def _few_rows(arch: Arch) -> Iterator[Kernel]:
    """GPT-OSS's, whose layers have them instead of the single steps."""
    hidden = HIDDEN[0]
    yield LinearRotary(arch, ResidentWeights(hidden, resident(hidden)), head_dim=64)
    attended = LINEAR_INPUTS[1]
    yield LinearAdd(arch, ResidentWeights(attended, resident(attended)))
    for experts, k, score, _ in ROUTES[:2]:
        yield RouteRows.of(arch, hidden, experts, k, score)
    yield CombineNorm(arch, Combine(arch, 4, hidden, torch.bfloat16, torch.bfloat16, None, False, VECTOR_BYTES))


def _all_reduces(arch: Arch) -> Iterator[Kernel]:
    bf16 = torch.bfloat16
    for hidden, k, ranks in ((2880, 4, 2), (2880, 4, 8), (7168, 8, 2), (7168, 8, 8)):
        source = Combine(arch, k, hidden, bf16, bf16, None, False, VECTOR_BYTES)
        yield OneShot(arch, ranks, hidden, bf16, norm=True)
        for parts in (1, 4, 8):
            yield OneShot(arch, ranks, hidden, bf16, parts=parts)
            for accumulate in (False, True):
                yield OneShot(arch, ranks, hidden, bf16, source, False, accumulate, parts)
    for ranks in (2, 4, 8):
        for dtype in (bf16, torch.float32):
            yield TwoShot(arch, ranks, dtype)
        yield Multicast(arch, ranks)


def _exchanges(arch: Arch) -> Iterator[Kernel]:
    bf16, few, many = torch.bfloat16, PARTS.variants[0], PARTS.variants[-1]
    whole, halves = (True, True), ((True, False), (False, True))
    cases = [(GPT_OSS_EXCHANGE, PackedLayout(), few, half) for half in (whole, *halves)]
    cases += [(DEEPSEEK_EXCHANGE, PackedLayout(128), most, whole) for most in (few, many)]
    for layout, packed, most, half in cases:
        yield ExchangeDispatch(arch, layout, packed, launch.widest(arch, layout.row_bytes), most, *half)
        yield ExchangeCombine(arch, layout, bf16, bf16, False, most, *half)
    for fmt in FUSED_FORMATS:
        scale_bytes = fmt.blocks(DEEPSEEK_EXCHANGE.row_bytes) * fmt.scale.bytes
        layout = replace(DEEPSEEK_EXCHANGE, max_tokens=128, quantized=fmt, scale_bytes=scale_bytes)
        for most in (few, many):
            width = launch.widest(arch, layout.row_bytes)
            yield ExchangeDispatch(arch, layout, PackedLayout(128), width, most, *whole)
    layout = DEEPSEEK_EXCHANGE
    yield AssignSlots(arch, layout.experts, layout.top_k, PackedLayout(), warps=8)
    for receive in (False, True):
        yield DispatchRows(arch, layout, PackedLayout(), launch.widest(arch, layout.row_bytes), receive)
    for by_token, send in ((True, True), (False, True), (False, False)):
        yield CombineRows(arch, layout, bf16, bf16, False, by_token, send)
    yield CombineRows(arch, layout, bf16, bf16, True, False, True)


def _across_nodes(arch: Arch) -> Iterator[Kernel]:
    """Those that need no NVSHMEM; its device functions keep a stack."""
    for experts, k, hidden, dtype, scales, _ in MOE_ROWS:
        layout = NetworkLayout(
            ExchangeLayout(
                ranks=16, experts=experts, top_k=k, max_tokens=4096, row_bytes=hidden * dtype.itemsize,
                scale_bytes=4 * scales, result_bytes=hidden * 2, most_result_packet_bytes=1 << 62,
            )
        )  # fmt: skip
        yield LandRecords(arch, layout)
        yield LandResults(arch, layout)
        yield LandResultRows(arch, layout)


def _embeddings(arch: Arch) -> Iterator[Kernel]:
    width = arch.vector_bytes
    for hidden in HIDDEN:
        for shape in ROW_SHAPES.variants:
            tiling = tile(hidden * 2 // width, width, shape)
            yield Embed(arch, torch.bfloat16, torch.int64, tiling, width)


def _quantizers(arch: Arch) -> Iterator[Kernel]:
    dtype, width = torch.bfloat16, arch.vector_bytes
    for fmt in FORMATS.values():
        for layout in scale_layouts(fmt, arch):
            output = BlockOutput(fmt, layout, QUANTIZED_COLUMNS)
            for shape in QUANTIZE_SHAPES.variants:
                yield quantize_kernel(arch, dtype, shape, width, output)
            for shape in DECODE_SHAPES.variants:
                tiling = tile(QUANTIZED_COLUMNS // decoded_count(arch, dtype), width, shape)
                yield Dequantize(arch, dtype, tiling, width, output)
