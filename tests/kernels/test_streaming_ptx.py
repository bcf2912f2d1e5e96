"""What the compiler made of the kernels that stream weights, in true shape. Spills of all kernels: test_registry."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, jit, registry
from rose_dist.kernels.arch import ARCHS, HOPPER, Arch
from rose_dist.kernels.cute.mxfp4_experts import ExpertLinear
from rose_dist.kernels.cute.mxfp4_experts_e4m3 import E4m3ExpertGemm
from rose_dist.kernels.cute.mxfp4_experts_prefill import ExpertGemm
from rose_dist.kernels.cute.mxfp4_experts_warpgroup import WarpgroupExpertGemm
from rose_dist.kernels.cute.small_linear import SmallLinear
from rose_dist.kernels.e4m3_tiling import E4M3_SHAPES
from rose_dist.kernels.jit import Binary
from rose_dist.kernels.mxfp4_experts import GEMM_SEGMENTS, SHARED_BYTES
from rose_dist.kernels.mxfp4_layout import TILE_BYTES
from rose_dist.kernels.variants import gemm
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES
from tests.kernels.binaries import Binaries

REGISTERS = 65536
"""Of an SM."""
WARPGROUP_DEPBAR = 0x00008000000079C5
"""The instruction's first half: a wait for products."""
SM_SHARED_BYTES, RESERVED_BYTES = 228 * 1024, 1024
"""Shared memory of an SM, and what the system takes of it for each block (CUDA programming guide, compute capability 9
and 10)."""


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def arch(request: pytest.FixtureRequest) -> Arch:
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def binaries(arch: Arch, compiled_once: Binaries) -> list[tuple[ExpertLinear, Binary]]:
    """Those of few and of more rows; of both layers, of one that is gated and of one that is not, and of slices."""
    kernels = [k for k in registry._mxfp4_experts(arch) if type(k) is ExpertLinear]
    return [(kernel, compiled_once.of(kernel)) for kernel in (*kernels[:2], *kernels[-2:])]


def test_every_weight_is_decoded_and_multiplied_once(binaries: list[tuple[ExpertLinear, Binary]]) -> None:
    for kernel, compiled in binaries:
        tiling = kernel.tiling
        blocks = sum(tiling.columns) // tiling.warps
        assert compiled.ptx.count("mma.sync.aligned.m16n8k16") == 4 * blocks
        assert compiled.ptx.count("mul.rn.bf16x2") == 16 * blocks
        loads = compiled.ptx.count("ld.shared.v4.b32")
        assert loads >= blocks
        assert compiled.ptx.count("ldmatrix.sync.aligned.m8n8.x4") == blocks
        assert compiled.ptx.count("ld.shared.v4.f32") + loads >= blocks + tiling.warps


def test_weights_and_rows_come_by_bulk_copies_only(binaries: list[tuple[ExpertLinear, Binary]]) -> None:
    for _, compiled in binaries:
        copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        assert copy + ".L2::cache_hint [" in compiled.ptx  # weights, which leave L2 first
        assert copy + " [" in compiled.ptx  # rows
        assert not re.search(r"ld\.global\S*\.v\d", compiled.ptx)


def test_one_block_fits_an_sm_and_no_second(binaries: list[tuple[ExpertLinear, Binary]]) -> None:
    """Or some SMs would get two blocks, where launches before leave them room first, and others none."""
    for kernel, compiled in binaries:
        facts = binary.facts(compiled)
        assert facts.stack_bytes == 0
        assert kernel.tiling.threads * facts.registers <= REGISTERS
        declared = sum(map(int, re.findall(r"__static_shmem__\d+\[(\d+)\]", compiled.ptx)))
        shared_bytes = kernel.tiling.shared_bytes + declared + 128 + RESERVED_BYTES  # the dynamic part is aligned
        assert SM_SHARED_BYTES / 2 < shared_bytes <= SM_SHARED_BYTES


def test_the_next_launch_begins_behind_the_wait(binaries: list[tuple[ExpertLinear, Binary]]) -> None:
    """So that what was complete for this launch is for the next. Nothing but factors is read before."""
    for _, compiled in binaries:
        before, after = compiled.ptx.split("griddepcontrol.wait;")
        assert "griddepcontrol.launch_dependents" in after
        for access in ("st.global", "ld.relaxed", "cp.async.bulk", "griddepcontrol"):
            assert access not in before


def test_small_linear_has_its_first_weights_under_way_before_it_waits(arch: Arch) -> None:
    for kernel in registry._small_linears(arch):
        assert isinstance(kernel, SmallLinear)
        compiled = jit.compile_binary(kernel)
        before, after = compiled.ptx.split("griddepcontrol.wait;")
        weights = "ld.global.L1::no_allocate.L2::cache_hint.L2::256B.v4.b32"
        share = kernel.inputs // 32 // kernel.warps
        assert before.count(weights) == 2 * kernel.ahead
        assert after.count(weights) == 2 * (share - kernel.ahead)
        assert after.count("mma.sync.aligned.m16n8k16") == 2 * share * kernel.row_tiles
        assert "st.global" not in before
        assert binary.facts(compiled).stack_bytes == 0
        assert kernel.per_sm * kernel.warps * 32 * binary.facts(compiled).registers <= REGISTERS


def test_the_prefill_kernel_decodes_once_for_all_rows(arch: Arch) -> None:
    tiling = gemm(90, TILE_BYTES)
    compiled = jit.compile_binary(ExpertGemm(arch, 128, 180, tiling, gated=True))
    both = tiling.row_tiles + tiling.row_tiles // 2  # whole and half segments
    assert compiled.ptx.count("mul.rn.bf16x2") == 2 * 16 * tiling.step_columns
    assert compiled.ptx.count("mma.sync.aligned.m16n8k16") == 4 * tiling.step_columns * both
    assert compiled.ptx.count("ld.shared.v4.b32") == 2 * tiling.step_columns
    assert compiled.ptx.count("ldmatrix.sync.aligned.m8n8.x4") == tiling.step_columns * both
    assert not re.search(r"ld\.global\S*\.v\d", compiled.ptx)
    assert binary.facts(compiled).stack_bytes == 0


def test_products_of_a_warpgroup_overlap_its_decoding() -> None:
    """The assembler may have each product wait for the one before, and says so only in a remark (C7512, C7513)."""
    for shape in WARPGROUP_SHAPES.variants:
        tiling = shape.tiling(90, TILE_BYTES)
        compiled = jit.compile_binary(WarpgroupExpertGemm(HOPPER, 128, 180, tiling, gated=True))
        parts, widths = tiling.parts * tiling.step_columns, len(tiling.widths)
        assert compiled.ptx.count("wgmma.mma_async") == 4 * tiling.step_columns * widths
        assert compiled.ptx.count("mul.rn.bf16x2") == 16 // tiling.parts * (parts + 1) * widths
        waits = compiled.ptx.count("wgmma.wait_group")
        assert waits == (parts + 1) * widths
        words = np.frombuffer(compiled.cubin[: len(compiled.cubin) // 8 * 8], np.uint64)
        assert np.count_nonzero(words == WARPGROUP_DEPBAR) == waits
        assert binary.facts(compiled).stack_bytes == 0
        assert tiling.shared_bytes + 4 * 4 * GEMM_SEGMENTS + 4096 <= SHARED_BYTES


def test_products_in_e4m3_overlap_their_decoding() -> None:
    """As above. A word's eight codes take two look-ups and two gatherings of bits; a row's magnitudes one access."""
    for shape in E4M3_SHAPES.variants:
        tiling = shape.tiling(90)
        compiled = jit.compile_binary(E4m3ExpertGemm(HOPPER, 128, 180, tiling, gated=True))
        parts, widths = tiling.parts * tiling.step_columns, len(tiling.widths)
        assert compiled.ptx.count("wgmma.mma_async") == 2 * tiling.step_columns * widths
        assert compiled.ptx.count("prmt.b32") == 16 // tiling.parts * (parts + 1) * widths
        waits = compiled.ptx.count("wgmma.wait_group")
        assert waits == (parts + 1) * widths
        words = np.frombuffer(compiled.cubin[: len(compiled.cubin) // 8 * 8], np.uint64)
        assert np.count_nonzero(words == WARPGROUP_DEPBAR) == waits
        assert binary.facts(compiled).stack_bytes == 0
        assert (
            tiling.shared_bytes + 4 * 4 * GEMM_SEGMENTS + 256 + 28 * 128 <= SHARED_BYTES
        )  # as `launch_grouped` counts


def test_what_a_warpgroup_asks_for_is_there() -> None:
    tiling = WARPGROUP_SHAPES.variants[-1].tiling(90, TILE_BYTES)
    assert tiling.launch_registers == 168
    with pytest.raises(AssertionError):
        replace(tiling, registers=(96, 208))
