"""What the compiler made of paged attention, and that its merge of splits needs every barrier and order it has."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, jit, launch, registry
from rose_dist.kernels.arch import ARCHS, HOPPER, Arch
from rose_dist.kernels.cute.attention_results import THREADS, WARPS
from rose_dist.kernels.cute.paged_attention_decode import DecodeAttention
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
    return [compiled_once.of(kernel) for kernel in registry._attention(arch)]


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
        assert "griddepcontrol.launch_dependents;" in after


def test_splits_meet_in_one_ordered_atomic(binaries: list[Binary]) -> None:
    for compiled in binaries:
        assert re.findall(r"\b(?:atom|red|fence)\.\S+", compiled.ptx) == ["atom.acq_rel.gpu.global.add.u32"]


def right(monkeypatch: pytest.MonkeyPatch, weakening: Weakening | None, seed: int) -> bool:
    """Whether a request's two parts, the last of a block and the first of the other, are merged as they should be, and
    what blocks do before and after is right. The last part of 9 tiles fills the ring.
    """
    gpu = emulation.install(monkeypatch, HOPPER, sms=1)
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


def test_each_weakening_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    host = emulation.compiled(DecodeAttention(HOPPER, torch.bfloat16, torch.bfloat16, 64, 2, False, 1, False))
    (program,) = host.programs.values()
    assert right(monkeypatch, None, 0)
    found = {str(w): w for w in weakenings(program) if "griddepcontrol" not in w.text}
    missed = [
        name for name, weakening in found.items() if all(right(monkeypatch, weakening, seed) for seed in range(6))
    ]
    assert len(found) >= 7
    assert not missed
