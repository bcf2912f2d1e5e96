"""What the compiler made of the all-reduces. Spills and registers of all kernels: test_registry."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, registry
from rose_dist.kernels.all_reduce import Sizes
from rose_dist.kernels.all_reduce_kernels import combine_kernels, combine_norm, combined, one_shot
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.cute.all_reduce_norm import CombineReduceNorm
from rose_dist.kernels.cute.all_reduce_one_shot import OneShot
from rose_dist.kernels.cute.all_reduce_two_shot import TwoShot
from rose_dist.kernels.jit import Binary
from rose_dist.kernels.peer_regions import LINE_BYTES, PACKET_BYTES
from tests.kernels.binaries import Binaries


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def binaries(request: pytest.FixtureRequest, compiled_once: Binaries) -> list[Binary]:
    return [compiled_once.of(kernel) for kernel in registry._all_reduces(ARCHS[request.param])]


def test_packets_need_no_fence_and_no_flag(binaries: list[Binary]) -> None:
    for compiled in binaries:
        kernel = compiled.kernel
        if isinstance(kernel, OneShot | CombineReduceNorm):
            shot = kernel.shot if isinstance(kernel, CombineReduceNorm) else kernel
            stores, loads = (compiled.ptx.count(f"{what}.relaxed.sys.global.v4.b32") for what in ("st", "ld"))
            packets = shot.turns * (shot.ranks - 1)
            assert stores == packets, kernel.label
            assert loads == 2 * packets, kernel.label  # the first look, and the loop's
            # A cluster's blocks meet, which is no fence between GPUs.
            for absent in ("fence.", "acquire.gpu", "st.release.gpu", "red.release", "ld.acquire"):
                assert absent not in compiled.ptx, kernel.label
            assert compiled.ptx.count("red.relaxed.gpu.global.add.u64") == 1, "the epoch, once a block"


def test_two_shots_release_and_acquire_each_peer_twice_at_system_scope(binaries: list[Binary]) -> None:
    for compiled in binaries:
        kernel = compiled.kernel
        if isinstance(kernel, TwoShot):
            assert compiled.ptx.count("st.release.sys.global.u32") >= 2 * kernel.ranks, kernel.label
            assert compiled.ptx.count("ld.acquire.sys.global.u32") >= 2 * kernel.ranks, kernel.label
            assert "fence" not in compiled.ptx, "a release needs none"
            assert ".gpu.global.u32" not in compiled.ptx
            assert "ld.global.L1::no_allocate.v4.b32" in compiled.ptx
            assert "st.global.L1::no_allocate.v4.b32" in compiled.ptx


def test_dependent_launch_waits_before_it_touches_memory(binaries: list[Binary]) -> None:
    for compiled in binaries:
        before, _ = compiled.ptx.split("griddepcontrol.wait;")
        # What the experts' launch, the only one that may still run, does not write is read before.
        kinds = "st|red|atom" if isinstance(compiled.kernel, CombineReduceNorm) else "ld|st|red|atom"
        assert not re.search(rf"\b({kinds})\.\S*global", before), compiled.kernel.label


def test_nothing_spills(binaries: list[Binary]) -> None:
    for compiled in binaries:
        assert binary.facts(compiled).stack_bytes == 0, compiled.kernel.label
        assert ".local" not in compiled.ptx, compiled.kernel.label


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("hidden", "top_k"), [(2880, 4), (7168, 8)])
def test_ends_of_layers_fit_into_inboxes_and_are_loaded_beforehand(ranks: int, hidden: int, top_k: int) -> None:
    arch, dtype = ARCHS["sm_90a"], torch.bfloat16
    sizes = Sizes(ranks, hidden, dtype, 8192, 132)
    loaded = combine_kernels(arch, sizes, dtype, top_k, dtype)
    served = 0
    for tokens in range(1, 140):
        kernel = combine_norm(arch, sizes, dtype, top_k, tokens)
        if kernel is not None:
            served += 1
            assert tokens * kernel.blocks * kernel.shot.part_stride * PACKET_BYTES <= sizes.source_bytes
            assert kernel in loaded
    assert served >= min(8, sizes.combine_rows)


@pytest.mark.parametrize("hidden", [64, 2880, 7168])
def test_parts_of_rows_begin_on_lines_and_fit_into_inboxes(hidden: int) -> None:
    """Of 7168 columns they once began anywhere: a warp's 512 bytes of packets met five lines instead of four."""
    arch, dtype = ARCHS["sm_90a"], torch.bfloat16
    sizes = Sizes(2, hidden, dtype, 8192, 132)
    kernels = [(rows, one_shot(arch, sizes, sizes.parts(rows, dtype))) for rows in range(1, sizes.one_shot_rows + 1)]
    for tokens in range(1, sizes.combine_rows + 1):
        kernels.append((tokens, combined(arch, sizes, dtype, 4, dtype, sizes.parts(tokens, torch.float32))))
    for rows, kernel in kernels:
        assert kernel.part_stride * PACKET_BYTES % LINE_BYTES == 0
        assert kernel.part_packets <= kernel.part_stride
        assert rows * kernel.parts * kernel.part_stride * PACKET_BYTES <= sizes.source_bytes
