"""What the compiler made of the exchange between GPUs. Spills and registers of all kernels: test_registry."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, jit, registry
from rose_dist.kernels.arch import ARCHS, HOPPER, Arch
from rose_dist.kernels.cute.exchange_combine import ExchangeCombine
from rose_dist.kernels.cute.exchange_dispatch import ExchangeDispatch
from rose_dist.kernels.cute.exchange_rows import CombineRows, DispatchRows
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_tiling import PARTS
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.jit import Binary
from tests.kernels.binaries import Binaries

PACKET_STORE, PACKET_LOAD = "st.relaxed.sys.global.v4.b32", "ld.relaxed.sys.global.v4.b32"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
FLAG_STORE, FLAG_LOAD = "st.release.sys.global.u32", "ld.acquire.sys.global.u32"
REPORTS = 1
"""Releases of a wait's report, in every kernel that waits."""


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def arch(request: pytest.FixtureRequest) -> Arch:
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def binaries(arch: Arch, compiled_once: Binaries) -> list[Binary]:
    """Both halves in one launch, and the kernels of plain rows."""
    few, kinds = PARTS.variants[0], (ExchangeDispatch, ExchangeCombine, DispatchRows, CombineRows)
    return [
        compiled_once.of(kernel)
        for kernel in registry._exchanges(arch)
        if isinstance(kernel, kinds)
        and getattr(kernel, "most", few) == few
        and getattr(kernel, "send", True) == getattr(kernel, "receive", True)
    ]


def of(binaries: list[Binary], kind: type, *, rows: bool) -> list[Binary]:
    return [one for one in binaries if isinstance(one.kernel, kind) and one.kernel.layout.has_rows == rows]  # type: ignore[attr-defined]


def test_packets_alone_need_no_flag_and_no_fence(binaries: list[Binary]) -> None:
    for kind in (ExchangeDispatch, ExchangeCombine):
        for compiled in of(binaries, kind, rows=False):
            assert PACKET_STORE in compiled.ptx
            assert PACKET_LOAD in compiled.ptx
            assert "ld.acquire" not in compiled.ptx
            assert "fence" not in compiled.ptx
            waits = len(re.findall(r"atom\.\S*\.cas", compiled.ptx))
            assert compiled.ptx.count("st.release") == waits, "reports only"


def waits(compiled: Binary) -> int:
    """Which all have a report, with a release of its own."""
    return len(re.findall(r"atom\.\S*\.cas", compiled.ptx))


def test_plain_rows_are_released_and_acquired_at_system_scope(binaries: list[Binary]) -> None:
    for push in of(binaries, DispatchRows, rows=True):
        assert push.ptx.count(FLAG_STORE) == waits(push) + 1, "reports, and the chunk's flag"
        receives = push.kernel.receive  # type: ignore[attr-defined]
        assert push.ptx.count(FLAG_LOAD) == 2 * receives, "the first look, and the loop's"
    for combine in of(binaries, ExchangeCombine, rows=True):
        assert combine.ptx.count(FLAG_STORE) == waits(combine) + 2, "and the flags of chunks' and tokens' results"
    for total in of(binaries, CombineRows, rows=True):
        sends = total.kernel.send  # type: ignore[attr-defined]
        assert total.ptx.count(FLAG_STORE) == waits(total) + 2 * sends
        assert total.ptx.count(FLAG_LOAD) == 2
    for compiled in of(binaries, ExchangeDispatch, rows=True):
        assert compiled.ptx.count(FLAG_LOAD) == 2, "the first look, and the loop's"
    for compiled in binaries:
        fences = set(re.findall(r"fence\.[a-z_:.]+", compiled.ptx))
        bulk = "cp.async.bulk" in compiled.ptx
        assert fences == ({"fence.mbarrier_init.release.cluster", "fence.proxy.async.global"} if bulk else set())
        assert not re.search(r"(st\.release|ld\.acquire|st\.relaxed)\.gpu", compiled.ptx), compiled.kernel.label
        assert compiled.ptx.count("red.relaxed.gpu.global.add.u64") >= 1, "the epoch, once a block"


def test_peers_see_whole_vectors(binaries: list[Binary]) -> None:
    """What another GPU reads is stored 16 bytes at a time or by bulk copies, or is one word of meta, run or scales."""
    for push in of(binaries, DispatchRows, rows=True):
        if push.kernel.receive:  # type: ignore[attr-defined]
            assert push.ptx.count(PACKET_STORE) == 1, "the header"
            assert BULK_STORE in push.ptx
        else:
            assert push.ptx.count(PACKET_STORE) >= 5, "the header, and four of a row in flight"
            assert "ld.global.L1::no_allocate.v4.b32" in push.ptx


def test_packed_rows_are_stored_as_wide_as_they_go(arch: Arch, binaries: list[Binary]) -> None:
    for compiled in of(binaries, ExchangeDispatch, rows=False):
        assert binary.facts(compiled).widest_store == arch.vector_bytes * 8


def test_dependent_launch_waits_before_it_touches_memory(binaries: list[Binary]) -> None:
    for compiled in binaries:
        if isinstance(compiled.kernel, DispatchRows) and compiled.kernel.moves:
            continue  # `test_numbers_are_awaited` of tests/comm
        before, after = compiled.ptx.split("griddepcontrol.wait;")
        assert not re.search(r"(ld|st|red|atom)\.\S*global", before), compiled.kernel.label
        assert "griddepcontrol.launch_dependents;" in after


def test_the_largest_layout_fits_into_shared_memory() -> None:
    """48 KB are static; the most experts over the fewest ranks, in rows that take every packet of a part."""
    layout = ExchangeLayout(
        ranks=2, experts=2048, top_k=8, max_tokens=256, row_bytes=24576, scale_bytes=0, result_bytes=49152
    )
    kernel = ExchangeDispatch(HOPPER, layout, PackedLayout(), 16, PARTS.variants[-1], True, True)
    sizes = re.findall(r"\.shared\s+\.align \d+ \.b8 \S+\[(\d+)\]", jit.compile_binary(kernel).ptx)
    assert 40_000 < sum(map(int, sizes)) <= 48 * 1024


def test_nothing_spills(binaries: list[Binary]) -> None:
    for compiled in binaries:
        facts = binary.facts(compiled)
        assert facts.stack_bytes == 0, compiled.kernel.label
        assert facts.registers <= 128, compiled.kernel.label  # 512 threads a block
