"""What the compiler made of paged attention, and that its merge of splits needs every barrier and order it has."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import attention_tiling, binary, jit, launch, registry
from rose_dist.kernels.arch import ARCHS, HOPPER, Arch
from rose_dist.kernels.cute.attention_results import THREADS, WARPS
from rose_dist.kernels.cute.kv_tiles import key_token, value_token
from rose_dist.kernels.cute.paged_attention_decode import DecodeAttention
from rose_dist.kernels.cute.whole_token_attention import (
    FEEDER_REGISTERS,
    WholeTokenAttention,
)
from rose_dist.kernels.cute.whole_token_feeder import FEEDERS
from rose_dist.kernels.cute.whole_token_tiles import WholeTokenTiles
from rose_dist.kernels.jit import Binary
from tests.kernels import emulation
from tests.kernels.binaries import Binaries
from tests.kernels.paged_cache import Cache, assert_close, attend, exact
from tests.ptx.errors import PtxError
from tests.ptx.weaken import Weakening, weakenings


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def arch(request: pytest.FixtureRequest) -> Arch:
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def binaries(arch: Arch, compiled_once: Binaries) -> list[Binary]:
    kernels = [kernel for kernel in registry._attention(arch) if isinstance(kernel, DecodeAttention)]
    return [compiled_once.of(kernel) for kernel in kernels]


@pytest.fixture(scope="module")
def whole(arch: Arch, compiled_once: Binaries) -> list[Binary]:
    """Those whose blocks take whole tokens."""
    kernels = [kernel for kernel in registry._attention(arch) if isinstance(kernel, WholeTokenAttention)]
    return [compiled_once.of(kernel) for kernel in kernels]


def test_tensor_cores_fed_by_asynchronous_copies(binaries: list[Binary]) -> None:
    for compiled in binaries:
        kernel, text = compiled.kernel, compiled.ptx
        assert isinstance(kernel, DecodeAttention)
        # Of every head and 8 query heads, head_dim / 16 products for the scores and as many for the values.
        octets = kernel.heads * kernel.rows // 8
        kind = "f16" if kernel.tiles.fp8 else "bf16"
        assert text.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32") == octets * kernel.head_dim // 8
        assert text.count("mma.sync") == octets * kernel.head_dim // 8
        assert text.count("movmatrix") == 2 * octets
        sizes = re.findall(r"cp\.async\.c[ag]\S*\s+\[[^]]+\],\s*\[[^]]+\],\s*(\d+)", text)
        assert set(sizes) == {"16", str(kernel.tiles.value_bytes)}
        # The first tiles of the first part, before or behind the wait, and of the next, and one in the loop.
        tiles = (2 + kernel.early) * kernel.distance + 1
        assert sum(map(int, sizes)) == tiles * kernel.tiles.bytes // 32
        assert f"cp.async.wait_group {kernel.distance - 1}" in text
        # bf16 goes as it is, e4m3 four at a time: its keys and its values.
        assert text.count("cvt.rn.f16x2.e4m3x2") == (kernel.tiles.bytes // 64 if kernel.tiles.fp8 else 0)


def test_whole_tokens_come_by_bulk_copies(whole: list[Binary]) -> None:
    for compiled in whole:
        kernel, text = compiled.kernel, compiled.ptx
        assert isinstance(kernel, WholeTokenAttention)
        assert text.count("mma.sync") == kernel.warp_heads * kernel.head_dim // 8
        assert "cp.async.c" not in text
        # One instruction, by as many lanes as a tile has chunks.
        assert text.count("cp.async.bulk.shared::cluster.global") == 1
        assert text.count("cvt.rn.f16x2.e4m3x2") == (
            kernel.warp_heads * kernel.head_dim // 2 if kernel.tiles.fp8 else 0
        )
        facts = binary.facts(compiled)
        assert facts.stack_bytes == 0
        # Else a computing warp would wait for registers for ever.
        assert not kernel.registers or facts.registers == kernel.launched_registers
        launched = kernel.launched_registers * (kernel.warps + FEEDERS)
        assert kernel.registers * kernel.warps + FEEDER_REGISTERS * FEEDERS <= launched
        assert kernel.stages * kernel.tiles.bytes >= kernel.heads * kernel.cache_dtype.itemsize << 13


def test_whole_tokens_are_read_without_bank_conflicts() -> None:
    """16 bytes of eight lanes at once, or 8 bytes of 16, are on different banks."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for heads in (2, 4, 8):
            tiles = WholeTokenTiles(64, 2, dtype, heads)
            for n in range(2):
                assert_spread([tiles.place(key_token(i // 4, n)) + i % 4 * 16 for i in range(32)], 16)
            for t in range(4):
                places = [tiles.place(value_token(i % 4, t)) + i // 4 * tiles.value_bytes for i in range(32)]
                assert_spread(places, tiles.value_bytes)


def assert_spread(places: list[int], size: int) -> None:
    together = 128 // size
    for first in range(0, 32, together):
        assert len({place % 128 // size for place in places[first : first + together]}) == together


def test_blocks_fit_on_an_sm_and_have_enough_under_way(binaries: list[Binary]) -> None:
    for compiled in binaries:
        kernel, facts = compiled.kernel, binary.facts(compiled)
        assert isinstance(kernel, DecodeAttention)
        assert facts.stack_bytes == 0
        assert kernel.blocks_per_sm * THREADS * facts.registers <= 65536
        assert kernel.blocks_per_sm * WARPS * kernel.distance * kernel.tiles.bytes >= 128 << 10
        assert kernel.results.bytes <= (kernel.stages - kernel.distance) * kernel.tiles.bytes


def test_before_the_dependency_wait_only_what_is_early_is_read(binaries: list[Binary]) -> None:
    for compiled in binaries:
        kernel = compiled.kernel
        assert isinstance(kernel, DecodeAttention)
        before, after = compiled.ptx.split("griddepcontrol.wait;")
        assert not re.search(r"\b(st|red|atom)\.\S*global", before)
        assert bool(re.search(r"\b(ld|cp)\.\S*global", before)) == kernel.early
        assert "griddepcontrol.launch_dependents;" in (before if kernel.gives_way else after)


def test_splits_meet_in_one_ordered_atomic(binaries: list[Binary], whole: list[Binary]) -> None:
    for compiled in binaries:
        assert re.findall(r"\b(?:atom|red|fence)\.\S+", compiled.ptx) == ["atom.acq_rel.gpu.global.add.u32"]
    for compiled in whole:
        assert re.findall(r"\b(?:atom|red)\.\S+", compiled.ptx) == ["atom.acq_rel.gpu.global.add.u32"]


def right(monkeypatch: pytest.MonkeyPatch, weakening: Weakening | None, seed: int, sms: int) -> bool:
    """Whether a request's two parts, the last of a block and the first of the other, are merged as they should be, and
    what blocks do before and after is right. The last part of 9 tiles fills the ring.
    """
    gpu = emulation.install(monkeypatch, HOPPER, sms=sms)
    torch.manual_seed(seed)

    def run(kernel: jit.Kernel, on: torch.Tensor, *arguments: Any) -> None:
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        launches = emulation.compiled(kernel)(*numbers, emulation.stream())
        gpu.machine.run([weakening.apply(one) if weakening else one for one in launches], seed=seed)

    monkeypatch.setattr(launch, "run", run)
    cache = Cache.filled([60, 60, 272, 40], 2, 64)
    q = torch.randn(4, 8, 64).bfloat16()
    try:
        out = attend(gpu, q, cache, context=272)
        for row in range(4):
            assert_close(out[row], exact(q, cache, row, 0.2, None))
    except (PtxError, AssertionError):
        return False
    return True


@pytest.mark.parametrize(
    ("kernel", "sms"),
    [
        (DecodeAttention(HOPPER, torch.bfloat16, torch.bfloat16, 64, 2, False, 1, False), 1),
        (WholeTokenAttention(HOPPER, torch.bfloat16, torch.bfloat16, 64, 2, 1, False), 2),
    ],
    ids=["by heads", "whole tokens"],
)
def test_each_weakening_is_caught(monkeypatch: pytest.MonkeyPatch, kernel: jit.Kernel, sms: int) -> None:
    """On two blocks. Of whole tokens, fences between proxies and what brings warps together again are left out: the
    interpreter needs neither here.
    """
    left_out = ("griddepcontrol",)
    if isinstance(kernel, WholeTokenAttention):
        monkeypatch.setattr(attention_tiling, "WHOLE_TOKENS", 0)
        left_out += ("fence", "bar.warp.sync")
    host = emulation.compiled(kernel)
    (program,) = host.programs.values()
    assert all(right(monkeypatch, None, seed, sms) for seed in range(6))
    found = {str(w): w for w in weakenings(program) if not w.text.startswith(left_out)}
    missed = [
        name for name, weakening in found.items() if all(right(monkeypatch, weakening, seed, sms) for seed in range(6))
    ]
    assert len(found) >= 7
    assert not missed
