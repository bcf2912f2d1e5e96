"""Hopper's kernel for chunks of prompts on the interpreter, against float64, and what the compiler made of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, jit, launch, paged_prefill, registry
from rose_dist.kernels.arch import DeviceInfo
from rose_dist.kernels.paged_prefill import prefill
from rose_dist.kernels.prefill_tiling import PrefillTiling
from tests.kernels import emulation
from tests.kernels.conftest import emulated
from tests.kernels.emulation import Emulator
from tests.kernels.test_paged_prefill import Chunks, assert_close
from tests.ptx.errors import PtxError
from tests.ptx.machine import Machine
from tests.ptx.weaken import weakenings

SMALL = PrefillTiling(64, warpgroups=1, keys=32, stages=4, registers=(40, 232))
"""Few rows and keys, so that the interpreter has many items and tiles soon."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    torch.manual_seed(0)
    yield emulated(monkeypatch, "sm_90a")


def attend(gpu: Emulator, chunks: Chunks, sinks: bool = True, q: torch.Tensor | None = None) -> torch.Tensor:
    queries = gpu.tensor(chunks.q) if q is None else q
    given = (chunks.keys, chunks.values, chunks.slots, chunks.query_starts, chunks.key_starts)
    out = prefill(
        queries, *(None if x is None else gpu.tensor(x) for x in given), gpu.tensor(chunks.sinks) if sinks else None,
        most_queries=max(tokens for _, tokens in chunks.sizes), most_keys=max(map(sum, chunks.sizes)),
        window=chunks.window, scale=chunks.scale,
    )  # fmt: skip
    assert len(gpu.kernels) == 1
    gpu.kernels.clear()
    return gpu.plain(out)


@pytest.mark.parametrize("heads", [(8, 1, 64), (2, 2, 64), (6, 2, 64), (16, 1, 64), (8, 1, 128)], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_with_and_without_a_prefix(gpu: Emulator, heads: tuple[int, int, int], window: int | None) -> None:
    """Rows of several warpgroups and items; a token's heads in two items; windows that begin inside a tile."""
    chunks = Chunks([(0, 40), (150, 17), (50, 1), (9, 0), (3, 2)], heads, window)
    assert_close(attend(gpu, chunks), chunks.exact())


def test_no_sinks(gpu: Emulator) -> None:
    chunks = Chunks([(33, 17)], (8, 1, 64), None)
    assert_close(attend(gpu, chunks, sinks=False), chunks.exact(sinks=False))


def test_a_sink_above_all_scores(gpu: Emulator) -> None:
    chunks = Chunks([(100, 3)], (8, 1, 64), None)
    chunks.sinks.fill_(300.0)
    assert attend(gpu, chunks).abs().max() == 0


def test_scores_that_keep_rising_and_falling(gpu: Emulator) -> None:
    """Later tiles outweigh earlier ones by far, or not at all."""
    chunks = Chunks([(300, 6)], (8, 1, 64), None)
    chunks.keys *= 10
    assert_close(attend(gpu, chunks), chunks.exact())


def test_keys_that_follow_one_another_and_queries_that_do_not(gpu: Emulator) -> None:
    chunks = Chunks([(0, 7), (40, 30)], (8, 2, 64), 16)
    among_others = torch.cat([chunks.q, torch.full((37, 4, 64), math.nan).bfloat16()], 1)
    wanted = attend(gpu, chunks, q=gpu.tensor(among_others)[:, :8])
    assert_close(wanted, chunks.exact())
    chunks.keys, chunks.values = (cache[chunks.slots] for cache in (chunks.keys, chunks.values))
    chunks.slots = None
    assert torch.equal(attend(gpu, chunks), wanted)


def test_any_number_of_blocks_gives_the_same_bits(gpu: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's items follow one another through its ring; rounds go backwards and forwards."""
    monkeypatch.setattr(paged_prefill, "PREFILL_TILINGS", {64: SMALL})
    chunks = Chunks([(70, 33), (0, 20), (5, 1)], (16, 2, 64), 40)
    found = []
    for sms in (1, 2, 3, 99):
        gpu.info = DeviceInfo(gpu.info.arch, sms)
        found.append(attend(gpu, chunks))
    assert_close(found[0], chunks.exact())
    assert all(torch.equal(out, found[0]) for out in found)


def test_every_order_is_needed(gpu: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_prefill, "PREFILL_TILINGS", {64: SMALL})
    gpu.info = DeviceInfo(gpu.info.arch, 1)
    gpu.machine = Machine(check_shared=True)
    launches: list[Any] = []

    def collect(kernel: jit.Kernel, on: torch.Tensor, *arguments: object) -> None:
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        launches.extend(emulation.compiled(kernel)(*numbers, emulation.stream()))
        gpu.kernels.append(kernel)

    monkeypatch.setattr(launch, "run", collect)
    attend(gpu, Chunks([(150, 12)], (8, 1, 64), None))
    gpu.machine.run(launches)
    weakened = [w for w in weakenings(launches[0].program) if "griddepcontrol" not in w.text]
    assert weakened
    idle = []
    for weakening in weakened:
        try:
            for seed in range(4):
                gpu.machine.run([weakening.apply(launches[0])], seed=seed)
            idle.append(str(weakening))
        except PtxError:
            pass
    assert not idle


def test_products_run_beside_the_weights() -> None:
    """Two groups a step of the loop, and no wait of the assembler's own; the values' is behind all powers."""
    for kernel in registry._prefill_attention(registry.HOPPER):
        compiled = jit.compile_binary(kernel)
        assert binary.facts(compiled).stack_bytes == 0
        waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d);", compiled.ptx)
        assert waits == ["0", "1", "0", "1", "0", "0"]
        assert compiled.ptx.count("griddepcontrol.wait;") == 1
        powers = [part.count("ex2.approx") for part in compiled.ptx.split("wgmma.wait_group.sync.aligned")]
        assert powers[2] == powers[4] == kernel.tiling.keys // 2 + 2
