"""What the compiler made of the MoE kernels. Spills and registers of all kernels: test_registry."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, registry
from rose_dist.kernels.arch import ARCHS, Arch
from rose_dist.kernels.cute.moe_combine import Combine
from rose_dist.kernels.cute.moe_dispatch_decode import DispatchDecode
from rose_dist.kernels.cute.moe_dispatch_prefill import AssignSlots, ScatterRows
from rose_dist.kernels.jit import Binary
from tests.kernels.binaries import Binaries


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def arch(request: pytest.FixtureRequest) -> Arch:
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def binaries(arch: Arch, compiled_once: Binaries) -> dict[type, list[Binary]]:
    """A few of each kind."""
    found: dict[type, list[Binary]] = {}
    for kernel in registry._moe(arch):
        some = found.setdefault(type(kernel), [])
        if len(some) < 4:
            some.append(compiled_once.of(kernel))
    return found


def test_decode_orders_nothing_across_blocks(binaries: dict[type, list[Binary]]) -> None:
    """No flag, no counter, no atomic in global memory: blocks don't wait for one another."""
    for compiled in binaries[DispatchDecode]:
        assert not re.search(
            r"(ld|st)\.(acquire|release|relaxed)|fence|(red|atom)\.\S*global|%globaltimer", compiled.ptx
        )
        assert "red.relaxed.cta.shared::cta.add.u32" in compiled.ptx


def test_rows_are_copied_as_wide_as_they_go(arch: Arch, binaries: dict[type, list[Binary]]) -> None:
    for compiled in binaries[DispatchDecode] + binaries[ScatterRows]:
        facts = binary.facts(compiled)
        assert (facts.widest_load, facts.widest_store) == (arch.vector_bytes * 8, arch.vector_bytes * 8)
    for compiled in binaries[Combine]:
        facts = binary.facts(compiled)
        assert (facts.widest_load, facts.widest_store) == (128, 128)


def test_dependent_launch_waits_before_it_touches_memory(binaries: dict[type, list[Binary]]) -> None:
    for kind in (DispatchDecode, Combine):
        for compiled in binaries[kind]:
            before, after = compiled.ptx.split("griddepcontrol.wait;")
            assert not re.search(r"(ld|st|red|atom)\.\S*global", before)
            assert "griddepcontrol.launch_dependents;" in after


def test_scattering_loads_rows_before_slots_are_known_and_writes_after(binaries: dict[type, list[Binary]]) -> None:
    for compiled in binaries[ScatterRows]:
        before, after = compiled.ptx.split("griddepcontrol.wait;")
        assert re.search(r"ld\.global\S*\.v\d", before)
        assert not re.search(r"(st|red|atom)\.\S*global", before)
        assert "griddepcontrol.launch_dependents;" in after


def test_rows_are_asked_for_after_the_ids(binaries: dict[type, list[Binary]]) -> None:
    for compiled in binaries[AssignSlots]:
        before, waited = compiled.ptx.split("griddepcontrol.wait;")
        assert not re.search(r"(ld|st|red|atom)\.\S*global", before)
        counting, after = waited.split("griddepcontrol.launch_dependents;")
        assert "match.any.sync.b32" in counting
        assert "red.release" in after


def test_one_grid_barrier_assigns_slots(binaries: dict[type, list[Binary]]) -> None:
    for compiled in binaries[AssignSlots]:
        assert compiled.ptx.count("red.release.gpu.global.add.u32") == 1
        assert compiled.ptx.count("ld.acquire.gpu.global.u32") == 2, "the first look, and the loop's"
        assert "fence" not in compiled.ptx
        assert "match.any.sync.b32" in compiled.ptx


def test_combine_rounds_products_and_loads_all_rows_before_it_adds(binaries: dict[type, list[Binary]]) -> None:
    for compiled in binaries[Combine]:
        kernel = compiled.kernel
        assert isinstance(kernel, Combine)
        assert compiled.ptx.count("mul.rn.f32") == kernel.top_k * kernel.count
        assert "fma" not in compiled.ptx
        before, _ = compiled.ptx.split("mul.rn.f32", 1)
        assert before.count("ld.global.v4.b32") >= min(kernel.top_k, 8)
        in_flight = 4 * min(kernel.top_k, 8)
        assert binary.facts(compiled).registers >= in_flight + kernel.count + 8, (
            "the assembler keeps the loads together"
        )
