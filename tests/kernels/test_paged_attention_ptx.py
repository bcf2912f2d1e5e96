"""What the compiler made of paged attention, and that its merge of splits needs every barrier and order it has."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, jit, launch, registry
from rose_dist.kernels.arch import ARCHS, HOPPER, Arch
from rose_dist.kernels.cute.paged_attention_decode import DecodeAttention
from rose_dist.kernels.jit import Binary
from tests.kernels import emulation
from tests.kernels.test_paged_attention import Cache, assert_close, attend, exact
from tests.ptx.errors import PtxError
from tests.ptx.weaken import Weakening, weakenings


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def arch(request: pytest.FixtureRequest) -> Arch:
    return ARCHS[request.param]


@pytest.fixture(scope="module")
def binaries(arch: Arch) -> list[Binary]:
    return [jit.compile_binary(kernel) for kernel in registry._attention(arch)]


def test_tensor_cores_fed_by_asynchronous_copies(binaries: list[Binary]) -> None:
    for compiled in binaries:
        kernel, text = compiled.kernel, compiled.ptx
        assert isinstance(kernel, DecodeAttention)
        assert binary.facts(compiled).stack_bytes == 0
        # A tile: 2 n-tiles · head_dim / 16 steps for the scores, head_dim / 8 n-tiles for the values.
        kind = "f16" if kernel.tiles.fp8 else "bf16"
        assert text.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32") == kernel.head_dim // 4
        assert text.count("mma.sync") == kernel.head_dim // 4
        sizes = re.findall(r"cp\.async\.c[ag]\S*\s+\[[^]]+\],\s*\[[^]]+\],\s*(\d+)", text)
        assert set(sizes) == {"16", str(kernel.tiles.value_bytes)}
        # The first tiles of the first item and of the next, and one in the loop.
        assert sum(map(int, sizes)) == (2 * (kernel.stages - 1) + 1) * kernel.tiles.bytes // 32
        assert f"cp.async.wait_group {kernel.stages - 2}" in text
        # bf16 goes as it is, e4m3 four at a time: its keys and its values.
        conversions = text.count("cvt.rn.f16x2.e4m3x2")
        assert conversions == (2 * 16 * kernel.head_dim // 2 // 32 if kernel.tiles.fp8 else 0)


def test_nothing_is_touched_before_the_dependency_wait(binaries: list[Binary]) -> None:
    for compiled in binaries:
        before, after = compiled.ptx.split("griddepcontrol.wait;")
        assert not re.search(r"(ld|st|red|atom|cp)\.\S*global", before)
        assert "griddepcontrol.launch_dependents;" in after


def test_splits_meet_in_one_ordered_atomic(binaries: list[Binary]) -> None:
    for compiled in binaries:
        assert re.findall(r"\b(?:atom|red|fence)\.\S+", compiled.ptx) == ["atom.acq_rel.gpu.global.add.u32"]


def right(monkeypatch: pytest.MonkeyPatch, weakening: Weakening | None, seed: int) -> bool:
    """Whether two splits, on two of three blocks, are merged as they should be, and what they do next is right."""
    gpu = emulation.install(monkeypatch, HOPPER, sms=1)
    torch.manual_seed(seed)

    def run(kernel: jit.Kernel, on: torch.Tensor, *arguments: Any) -> None:
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        launches = emulation.compiled(kernel)(*numbers, emulation.stream())
        gpu.machine.run([weakening.apply(one) if weakening else one for one in launches], seed=seed)

    monkeypatch.setattr(launch, "run", run)
    cache = Cache.filled([256, 40, 40, 40, 40], 1, 64)
    q = torch.randn(5, 8, 64).bfloat16()
    try:
        out = attend(gpu, q, cache, context=256)
        for row in range(5):
            assert_close(out[row], exact(q, cache, row, 0.2, None))
    except (PtxError, AssertionError):
        return False
    return True


def test_each_weakening_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    host = emulation.compiled(DecodeAttention(HOPPER, torch.bfloat16, torch.bfloat16, 64, False, 1))
    (program,) = host.programs.values()
    assert right(monkeypatch, None, 0)
    found = {str(w): w for w in weakenings(program) if "griddepcontrol" not in w.text}
    missed = [
        name for name, weakening in found.items() if all(right(monkeypatch, weakening, seed) for seed in range(6))
    ]
    assert len(found) >= 7
    assert not missed
