"""Every kernel with the constants that the supported models give it: what `rose kernels` and CI compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from rose_dist.kernels import launch, probe
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.attention_tiling import heads_together
from rose_dist.kernels.cute.all_reduce_multicast import Multicast
from rose_dist.kernels.cute.all_reduce_norm import CombineReduceNorm
from rose_dist.kernels.cute.all_reduce_one_shot import OneShot
from rose_dist.kernels.cute.all_reduce_two_shot import TwoShot
from rose_dist.kernels.cute.attention_sinks import ApplySinks
from rose_dist.kernels.cute.combine_norm import CombineNorm
from rose_dist.kernels.cute.draw import DrawRows
from rose_dist.kernels.cute.exchange_combine import ExchangeCombine
from rose_dist.kernels.cute.exchange_dispatch import ExchangeDispatch
from rose_dist.kernels.cute.exchange_rows import CombineRows, DispatchRows
from rose_dist.kernels.cute.expert_map import MapExperts
from rose_dist.kernels.cute.gather_columns import GatherColumns
from rose_dist.kernels.cute.handed_experts import HandedExperts
from rose_dist.kernels.cute.host_copy import CopyWords
from rose_dist.kernels.cute.linear_add import LinearAdd
from rose_dist.kernels.cute.linear_reduce import LinearReduce
from rose_dist.kernels.cute.linear_rotary import LinearRotary
from rose_dist.kernels.cute.moe_combine import VECTOR_BYTES, Combine
from rose_dist.kernels.cute.moe_dispatch_decode import DispatchDecode
from rose_dist.kernels.cute.moe_dispatch_prefill import AssignSlots, ScatterRows
from rose_dist.kernels.cute.mxfp4_experts import ExpertLinear
from rose_dist.kernels.cute.mxfp4_experts_e4m3 import E4m3ExpertGemm
from rose_dist.kernels.cute.mxfp4_experts_prefill import ExpertGemm
from rose_dist.kernels.cute.mxfp4_experts_warpgroup import WarpgroupExpertGemm
from rose_dist.kernels.cute.network_combine import LandResultRows, LandResults
from rose_dist.kernels.cute.network_dispatch import LandRecords
from rose_dist.kernels.cute.paged_attention_decode import DecodeAttention
from rose_dist.kernels.cute.paged_attention_prefill import PrefillAttention
from rose_dist.kernels.cute.resident_weights import ResidentWeights
from rose_dist.kernels.cute.route_rows import RouteRows
from rose_dist.kernels.cute.row_groups import GatherGroups, GroupRows, QuantizeRows, RowCells
from rose_dist.kernels.cute.small_linear import COLUMNS, SmallLinear
from rose_dist.kernels.cute.whole_token_attention import WholeTokenAttention
from rose_dist.kernels.draw import RowSplit
from rose_dist.kernels.e4m3_tiling import E4M3_SHAPES
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import FUSED_FORMATS, NVLINK_CHUNKS
from rose_dist.kernels.exchange_tiling import PARTS
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.jit import Kernel
from rose_dist.kernels.linear_shapes import resident
from rose_dist.kernels.moe_dispatch import ASSIGN_WARPS, DECODE_THREADS, SCATTER_SHAPE, SPLITS
from rose_dist.kernels.mxfp4 import BLOCK
from rose_dist.kernels.mxfp4_layout import TILE_BYTES, TILE_ROWS
from rose_dist.kernels.network_layout import NetworkLayout
from rose_dist.kernels.paged_attention import HEAD_DIMS
from rose_dist.kernels.prefill_tiling import PREFILL_TILINGS
from rose_dist.kernels.row_groups import GROUPS
from rose_dist.kernels.row_registry import HIDDEN, ROUTES, row_kernels
from rose_dist.kernels.row_tiling import (
    tile,
)
from rose_dist.kernels.stream_tiling import EXPERT_SHAPES, stream
from rose_dist.kernels.variants import LINEAR_SHAPES, gemm
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES

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
    chunk=NVLINK_CHUNKS.select(14336),
)
"""Rows in bf16, decode alone; and in FP8 with results in bf16, also prefill."""

MXFP4_EXPERTS = (128, 2880, 2880)
"""Experts, hidden, intermediate: GPT-OSS 120b. The 20b's kernels differ in nothing but the number of experts."""

LINEAR_INPUTS = (2880, 4096)
"""GPT-OSS's hidden size, and the width of its attention's output."""

VOCABULARIES = (201_088, 129_280, 151_936)
"""GPT-OSS, DeepSeek-V3, Qwen3-MoE."""

MOE_LAYOUTS = (PackedLayout(), PackedLayout(128), PackedLayout(128, 128))
"""For own kernels, and DeepGEMM's contiguous and masked layouts."""


def kernels(arch: Arch) -> list[Kernel]:
    """All kernels of the registry for one arch, each once."""
    return list(dict.fromkeys(_all(arch)))


def _all(arch: Arch) -> Iterator[Kernel]:
    yield from row_kernels(arch)
    yield from _moe(arch)
    yield from _attention(arch)
    yield from _prefill_attention(arch)
    yield from _sinks(arch)
    yield from _mxfp4_experts(arch)
    yield from _small_linears(arch)
    yield from _few_rows(arch)
    yield from (DrawRows(arch, RowSplit.of(columns)) for columns in VOCABULARIES)
    yield from (CopyWords(arch, indirect) for indirect in (False, True))
    yield from _all_reduces(arch)
    yield from _exchanges(arch)
    yield from _across_nodes(arch)
    yield probe.GridBarriers(arch, repeats=100)
    yield probe.Primitives(arch, multicast=True)


def _moe(arch: Arch) -> Iterator[Kernel]:
    width = arch.vector_bytes
    for experts, k, hidden, dtype, scales, bias in MOE_ROWS:
        row_bytes, scale_bytes = hidden * dtype.itemsize, 4 * scales
        copied = (width, scale_bytes, launch.widest(arch, scale_bytes))
        for layout in MOE_LAYOUTS:
            for splits in SPLITS.variants:
                for columns in {False, scales > 0}:
                    yield DispatchDecode(arch, experts, k, row_bytes, *copied, columns, layout, splits, DECODE_THREADS)
            yield AssignSlots(arch, experts, k, layout, ASSIGN_WARPS)
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
                for requests in (1, 8, 128):
                    heads = heads_together(requests, 8, head_dim, cache.itemsize, wide_group=wide)
                    yield DecodeAttention(arch, dtype, cache, head_dim, heads, wide, block_tiles=1, early=True)
    yield DecodeAttention(arch, dtype, dtype, 64, heads=2, wide_group=False, block_tiles=1, early=False)
    yield DecodeAttention(arch, dtype, dtype, 64, 1, wide_group=False, block_tiles=1, early=True, gives_way=True)
    for cache in (torch.bfloat16, torch.float8_e4m3fn):
        for head_dim, heads in ((64, 8), (64, 4), (64, 2), (128, 4)):
            yield WholeTokenAttention(arch, dtype, cache, head_dim, heads, block_tiles=1, early=True)
    yield WholeTokenAttention(arch, dtype, dtype, 64, heads=8, block_tiles=1, early=False)


def _prefill_attention(arch: Arch) -> Iterator[Kernel]:
    for tiling in PREFILL_TILINGS.values() if arch.hopper else ():
        yield PrefillAttention(arch, group=8, tiling=tiling)


def _sinks(arch: Arch) -> Iterator[Kernel]:
    for query_heads, head_dim in ((64, 64), (8, 64), (16, 128)):
        yield ApplySinks(arch, torch.bfloat16, query_heads, head_dim, arch.vector_bytes)


def _mxfp4_experts(arch: Arch) -> Iterator[Kernel]:
    experts, hidden, intermediate = MXFP4_EXPERTS
    tiles = (2 * intermediate // TILE_ROWS, hidden // TILE_ROWS)
    for shape in EXPERT_SHAPES.variants:
        both = (hidden // BLOCK, intermediate // BLOCK)
        yield ExpertLinear(arch, experts, tiles, stream(shape, both, TILE_BYTES), gated=True)
        if shape.rows == 1:
            yield HandedExperts(arch, experts, tiles, stream(shape, both, TILE_BYTES), gated=True)
        yield ExpertLinear(arch, experts, tiles[:1], stream(shape, both[:1], TILE_BYTES), gated=True)
        yield ExpertLinear(arch, experts, tiles[1:], stream(shape, both[1:], TILE_BYTES), gated=False)
        # Two ranks' halves of each expert.
        halves = (both[0], both[1] // 2)
        yield ExpertLinear(arch, experts, (tiles[0] // 2, tiles[1]), stream(shape, halves, TILE_BYTES), gated=True)
    for count, columns, gated in ((tiles[0], hidden // BLOCK, True), (tiles[1], intermediate // BLOCK, False)):
        if not arch.hopper:
            yield ExpertGemm(arch, experts, count, gemm(columns, TILE_BYTES), gated)
            continue
        for wide in WARPGROUP_SHAPES.variants:
            yield WarpgroupExpertGemm(arch, experts, count, wide.tiling(columns, TILE_BYTES), gated)
        for fp8 in E4M3_SHAPES.variants:
            yield E4m3ExpertGemm(arch, experts, count, fp8.tiling(columns, TILE_BYTES), gated)
    if arch.hopper:
        for e4m3 in (False, True):
            yield GroupRows(arch, experts, RowCells(hidden, e4m3))
            yield GatherGroups(arch, experts, RowCells(hidden, e4m3))
        yield QuantizeRows(arch, RowCells(hidden, e4m3=True))
        yield AssignSlots(arch, experts, 4, GROUPS, ASSIGN_WARPS)


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
    yield LinearAdd(arch, ResidentWeights(hidden, resident(hidden)), groups=True)
    for experts, k, score, _ in ROUTES[:2]:
        for width in (0, 2):
            for hands_over in (False, True):
                yield RouteRows.of(arch, hidden, experts, k, score, width, hands_over=hands_over)
    combine = Combine(arch, 4, hidden, torch.bfloat16, torch.bfloat16, None, False, VECTOR_BYTES)
    yield from (CombineNorm(arch, combine, bounded) for bounded in (False, True))


def _all_reduces(arch: Arch) -> Iterator[Kernel]:
    bf16 = torch.bfloat16
    for hidden, k, ranks in ((2880, 4, 2), (2880, 4, 8), (7168, 8, 2), (7168, 8, 8)):
        source = Combine(arch, k, hidden, bf16, bf16, None, False, VECTOR_BYTES)
        for parts in (1, 4, 8):
            yield OneShot(arch, ranks, hidden, bf16, parts=parts)
            for accumulate in (False, True):
                yield OneShot(arch, ranks, hidden, bf16, source, accumulate, parts)
        yield CombineReduceNorm(arch, OneShot(arch, ranks, hidden, bf16, source, accumulate=True, parts=8))
    for ranks in (2, 4, 8):
        yield LinearReduce.of(arch, ranks, LINEAR_INPUTS[1] // ranks)
        yield GatherColumns(arch, ranks)
        for dtype in (bf16, torch.float32):
            yield TwoShot.of(arch, ranks, dtype)
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
    layout = replace(layout, partial_sums=True)
    yield ExchangeDispatch(arch, layout, PackedLayout(128), launch.widest(arch, layout.row_bytes), few, *whole)
    for most in (few, many):
        yield ExchangeCombine(arch, layout, bf16, bf16, False, most, *whole)
    yield DispatchRows(arch, layout, PackedLayout(), launch.widest(arch, layout.row_bytes), True)
    for by_token in (False, True):
        yield CombineRows(arch, layout, bf16, bf16, False, by_token, True)


def _across_nodes(arch: Arch) -> Iterator[Kernel]:
    """Those that need no NVSHMEM; its device functions keep a stack."""
    for experts, k, hidden, dtype, scales, _ in MOE_ROWS:
        layout = NetworkLayout(
            ExchangeLayout(
                ranks=16, experts=experts, top_k=k, max_tokens=4096, row_bytes=hidden * dtype.itemsize,
                scale_bytes=4 * scales, result_bytes=hidden * 2, most_result_packet_bytes=1 << 62,
            )
        )  # fmt: skip
        summed = NetworkLayout(replace(layout.exchange, node_ranks=8), members=8)
        for one in (layout, summed):
            yield LandRecords(arch, one)
            yield LandResults(arch, one)
            yield LandResultRows(arch, one)
        for most in PARTS.variants:
            yield ExchangeCombine(arch, summed.exchange, torch.bfloat16, torch.bfloat16, False, most, False, True)
        yield CombineRows(arch, summed.exchange, torch.bfloat16, torch.bfloat16, False, False, False)
