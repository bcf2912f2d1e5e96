"""Every kernel compiles for Hopper and Blackwell, and the compiler made of it what was meant."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, jit, probe, registry
from rose_dist.kernels.arch import ARCHS, Arch
from rose_dist.kernels.cute.attention_sinks import ApplySinks
from rose_dist.kernels.cute.embedding import Embed
from rose_dist.kernels.cute.paged_attention_decode import DecodeAttention
from rose_dist.kernels.cute.qk_norm import QKNormRope
from rose_dist.kernels.cute.quantize import Dequantize, Quantize
from rose_dist.kernels.cute.rms_norm import SM_THREADS, RMSNorm
from rose_dist.kernels.cute.routing import Route
from rose_dist.kernels.cute.swiglu import GatedActivation
from rose_dist.kernels.cute.whole_token_attention import WholeTokenAttention
from rose_dist.kernels.jit import Binary
from tests.kernels.binaries import Binaries

STREAMING = (RMSNorm, QKNormRope, GatedActivation, Quantize, Dequantize, Embed, ApplySinks)


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def arch(request: pytest.FixtureRequest) -> Arch:
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def binaries(arch: Arch, compiled_once: Binaries) -> list[Binary]:
    return [compiled_once.of(kernel) for kernel in registry.kernels(arch)]


def test_nothing_spills_and_accesses_are_as_wide_as_they_go(arch: Arch, binaries: list[Binary]) -> None:
    for compiled in binaries:
        kernel, facts = compiled.kernel, binary.facts(compiled)
        assert facts.stack_bytes == 0, kernel.label
        assert 8 <= facts.registers <= (255 if isinstance(kernel, DecodeAttention | WholeTokenAttention) else 168), (
            kernel.label
        )
        if isinstance(kernel, RMSNorm) and kernel.crowded:
            assert facts.registers * SM_THREADS <= 1 << 16, kernel.label
        assert ".local" not in compiled.ptx, kernel.label
        if isinstance(kernel, STREAMING):
            widest = max(facts.widest_load, facts.widest_store)
            assert widest == arch.vector_bytes * 8, kernel.label
        if isinstance(kernel, RMSNorm | QKNormRope | Embed):
            assert facts.widest_load == arch.vector_bytes * 8, kernel.label


def test_dependent_launch_waits_before_it_reads_what_others_write(binaries: list[Binary]) -> None:
    """Only weights, which are constant, and which of them, may be read before griddepcontrol.wait; nothing may be
    written.
    """
    for compiled in binaries:
        if isinstance(compiled.kernel, STREAMING):
            before, after = compiled.ptx.split("griddepcontrol.wait;")
            assert "st.global" not in before
            kernel = compiled.kernel
            # What follows those may read what was written before them, not weights alone.
            last = isinstance(kernel, QKNormRope | Embed | ApplySinks) or getattr(kernel, "ends_chain", False)
            assert "griddepcontrol.launch_dependents;" in (after if last else before), kernel.label
            weighted = isinstance(kernel, RMSNorm | GatedActivation) or (isinstance(kernel, QKNormRope) and kernel.norm)
            assert weighted or "ld.global" not in before, kernel.label


def test_every_ordered_access_has_its_scope(arch: Arch) -> None:
    text = jit.compile_binary(probe.Primitives(arch, multicast=True)).ptx
    for scope in ("gpu", "sys"):
        for instruction in (
            f"ld.acquire.{scope}.global.u32", f"ld.acquire.{scope}.global.u64", f"ld.relaxed.{scope}.global.u32",
            f"st.release.{scope}.global.u32", f"st.release.{scope}.global.u64", f"st.relaxed.{scope}.global.u32",
            f"red.release.{scope}.global.add.u32", f"red.relaxed.{scope}.global.add.u32", f"fence.acq_rel.{scope};",
            f"atom.acq_rel.{scope}.global.add.u32", f"atom.acq_rel.{scope}.global.cas.b32",
        ):  # fmt: skip
            assert instruction in text, instruction
    for instruction in (
        "ld.global.nc.L1::no_allocate.L2::256B.v4.b32", "st.global.L1::no_allocate.v4.b32",
        "ld.global.L1::no_allocate.v4.b32", "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
        "multimem.st.relaxed.sys.global.v4.f32", "multimem.red.release.sys.global.add.u32",
    ):  # fmt: skip
        assert instruction in text, instruction
    assert ("cvt.rn.satfinite.e2m1x2.f32" in text) == arch.blackwell


def test_grid_barrier_is_one_release_and_acquires(arch: Arch) -> None:
    """bar, red.release, ld.acquire until reached, bar: no fence of its own, and no plain access to the counter."""
    text = jit.compile_binary(probe.GridBarriers(arch, repeats=100)).ptx
    body = re.sub(r"\s+", " ", text)
    assert re.search(
        r"bar\.sync 0;.*red\.release\.gpu\.global\.add\.u32.*ld\.acquire\.gpu\.global\.u32.*bar\.sync 0;", body
    )
    assert "fence" not in text
    assert "%globaltimer" in text


def test_counting_routers_use_one_launch_for_decode(binaries: list[Binary]) -> None:
    for compiled in binaries:
        kernel = compiled.kernel
        if isinstance(kernel, Route):
            launches = compiled.ptx.count(".visible .entry")
            assert launches == (2 if kernel.counts and not kernel.shape.cluster else 1), kernel.label
            if kernel.shape.cluster > 1:
                assert "red.relaxed.cluster.shared::cluster.add.u32" in compiled.ptx


def test_registry_lists_each_kernel_once(arch: Arch) -> None:
    kernels = registry.kernels(arch)
    assert len(set(kernels)) == len(kernels)
    assert all(kernel.arch is arch for kernel in kernels)


def test_facts_see_spills() -> None:
    """A cubin whose stack is not empty, from the same fields: guards the reader itself."""
    compiled = jit.compile_binary(probe.Primitives(ARCHS["sm_90a"]))
    facts = binary.facts(compiled)
    assert facts.stack_bytes == 0
    section = binary._section(compiled.cubin, b".nv.info")
    at = compiled.cubin.index(section)
    patched = bytearray(compiled.cubin)
    for position in range(0, len(section) - 12, 4):
        if section[position : position + 4] == b"\x04\x11\x08\x00":
            patched[at + position + 8] = 48
    damaged = Binary(compiled.kernel, compiled.ptx, bytes(patched), 0.0)
    assert binary.facts(damaged).stack_bytes == 48
