"""Hopper's kernel for chunks of prompts on the interpreter, against float64, and what the compiler made of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, jit, launch, paged_prefill, registry
from rose_dist.kernels.arch import HOPPER, DeviceInfo
from rose_dist.kernels.cute import paged_attention_prefill
from rose_dist.kernels.cute.paged_attention_prefill import PrefillAttention
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.paged_prefill import prefill
from rose_dist.kernels.prefill_tiling import PREFILL_TILINGS, PrefillTiling
from tests.kernels import emulation
from tests.kernels.conftest import emulated
from tests.kernels.emulation import Emulator
from tests.kernels.test_paged_prefill import Chunks, assert_close
from tests.ptx.errors import PtxError
from tests.ptx.launch import Launch
from tests.ptx.machine import Machine
from tests.ptx.weaken import weakenings

SMALL = PrefillTiling(64, warpgroups=1, keys=32, stages=4, registers=(40, 232))
"""Few rows and keys, so that the interpreter has many items and tiles soon."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    torch.manual_seed(0)
    return emulated(monkeypatch, "sm_90a")


@pytest.fixture
def small(gpu: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    monkeypatch.setattr(paged_prefill, "PREFILL_TILINGS", {64: SMALL})
    return gpu


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


@pytest.mark.parametrize("heads", [(8, 1, 64), (2, 2, 64), (6, 2, 64), (16, 1, 64)], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_with_and_without_a_prefix(small: Emulator, heads: tuple[int, int, int], window: int | None) -> None:
    """A token's heads in two items; rows of no token; windows that begin inside a tile; no queries."""
    chunks = Chunks([(0, 20), (50, 7), (50, 1), (9, 0), (3, 2)], heads, window)
    assert_close(attend(small, chunks), chunks.exact())


@pytest.mark.parametrize("head_dim", PREFILL_TILINGS)
def test_the_tilings_of_models(gpu: Emulator, head_dim: int) -> None:
    """Several warpgroups, each of which has other keys to hide."""
    chunks = Chunks([(150, 26)], (8, 1, head_dim), 128)
    assert_close(attend(gpu, chunks), chunks.exact())


def test_no_sinks(small: Emulator) -> None:
    chunks = Chunks([(33, 17)], (8, 1, 64), None)
    assert_close(attend(small, chunks, sinks=False), chunks.exact(sinks=False))


def test_a_sink_above_all_scores(small: Emulator) -> None:
    chunks = Chunks([(100, 3)], (8, 1, 64), None)
    chunks.sinks.fill_(300.0)
    assert attend(small, chunks).abs().max() == 0


def test_scores_that_keep_rising_and_falling(small: Emulator) -> None:
    """Later tiles outweigh earlier ones by far, or not at all."""
    chunks = Chunks([(300, 6)], (8, 1, 64), None)
    chunks.keys *= 10
    assert_close(attend(small, chunks), chunks.exact())


def test_keys_that_follow_one_another_and_queries_that_do_not(small: Emulator) -> None:
    chunks = Chunks([(0, 7), (40, 30)], (8, 2, 64), 16)
    among_others = torch.cat([chunks.q, torch.full((37, 4, 64), math.nan).bfloat16()], 1)
    wanted = attend(small, chunks, q=small.tensor(among_others)[:, :8])
    assert_close(wanted, chunks.exact())
    chunks.keys, chunks.values = (cache[chunks.slots] for cache in (chunks.keys, chunks.values))
    chunks.slots = None
    assert torch.equal(attend(small, chunks), wanted)


def test_fp8_cache(small: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = paged_prefill._gather

    def moved(stored: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return small.tensor(gather(small.plain(stored), small.plain(slots), dtype))

    monkeypatch.setattr(paged_prefill, "_gather", moved)
    chunks = Chunks([(33, 17), (0, 9)], (8, 2, 64), 20)
    chunks.keys, chunks.values = (x.to(torch.float8_e4m3fn) for x in (chunks.keys, chunks.values))
    attended = attend(small, chunks)
    chunks.keys, chunks.values = chunks.keys.float(), chunks.values.float()
    assert_close(attended, chunks.exact())


def test_any_number_of_blocks_gives_the_same_bits(small: Emulator) -> None:
    """A block's items follow one another through its ring; rounds go backwards and forwards."""
    chunks = Chunks([(70, 17), (0, 10), (5, 1)], (16, 2, 64), 40)
    found = []
    for sms in (1, 3, 99):
        small.info = DeviceInfo(small.info.arch, sms)
        found.append(attend(small, chunks))
    assert_close(found[0], chunks.exact())
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("sequences", [3, 0])
def test_a_shape_that_the_device_knows(small: Emulator, sequences: int) -> None:
    """As a captured graph has it: room for more sequences and longer ones."""
    chunks = Chunks([(70, 17), (0, 10), (5, 1)], (8, 2, 64), 40)
    wanted = attend(small, chunks)
    room = torch.zeros(9, dtype=torch.int32)
    starts = [torch.cat([x[: sequences + 1], room]) for x in (chunks.query_starts, chunks.key_starts)]
    out = small.tensor(torch.zeros_like(wanted))
    prefill(
        small.tensor(chunks.q), small.tensor(chunks.keys), small.tensor(chunks.values), small.tensor(chunks.slots),
        *map(small.tensor, starts), small.tensor(chunks.sinks), most_queries=64, most_keys=999, window=chunks.window,
        scale=chunks.scale, out=out, shape=small.tensor(torch.tensor([sequences, 17 if sequences else 0]).int()),
    )  # fmt: skip
    assert torch.equal(small.plain(out), wanted if sequences else torch.zeros_like(wanted))


def test_a_shape_needs_our_own_kernel() -> None:
    chunks = Chunks([(0, 10)], (8, 2, 64), None)
    with pytest.raises(KernelArgumentError, match="shape: is for our own kernel alone"):
        chunks.attend("cpu", shape=torch.tensor([1, 10]).int())  # type: ignore[arg-type]


class FreesValuesEarly(PrefillAttention):
    """While they are still multiplied."""

    def add_values(self, shared: Any, stage: Any, weights: Any, result: Any) -> None:
        super().add_values(shared, stage, weights, result)
        self.release(shared, stage)


@pytest.fixture
def launched(small: Emulator, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Launch]:
    """The launch of a block that fills its ring more than once; not run."""
    small.info = DeviceInfo(small.info.arch, 1)
    small.machine = Machine(check_shared=True)
    launches: list[Launch] = []

    def collect(kernel: jit.Kernel, on: torch.Tensor, *arguments: object) -> None:
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        launches.extend(emulation.compiled(kernel)(*numbers, emulation.stream()))
        small.kernels.append(kernel)

    def launch_it() -> Launch:
        attend(small, Chunks([(180, 12)], (8, 1, 64), None))
        return launches.pop()

    monkeypatch.setattr(launch, "run", collect)
    return launch_it


def test_freeing_values_early_is_a_race(
    small: Emulator, launched: Callable[[], Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    small.machine.run([launched()])
    monkeypatch.setattr(paged_attention_prefill, "PrefillAttention", FreesValuesEarly)
    emulation.forget()
    with pytest.raises(PtxError):
        small.machine.run([launched()])


@pytest.mark.parametrize("order", ["bar.sync 0", "fence.proxy.async.shared::cta"])
def test_every_order_is_needed(small: Emulator, launched: Callable[[], Launch], order: str) -> None:
    """All copies of an unrolled loop's together: a later one makes up for one alone."""
    weakened = launched()
    while found := next((w for w in weakenings(weakened.program) if w.text.startswith(order)), None):
        weakened = found.apply(weakened)
    with pytest.raises(PtxError):
        small.machine.run([weakened])


def test_products_run_beside_the_weights() -> None:
    """Two groups a step of the loop, and no wait of the assembler's own; the values' is behind all powers."""
    for kernel in registry._prefill_attention(HOPPER):
        compiled = jit.compile_binary(kernel)
        assert binary.facts(compiled).stack_bytes == 0
        waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d);", compiled.ptx)
        assert waits == ["0", "1", "0", "1", "0", "0"]
        assert compiled.ptx.count("griddepcontrol.wait;") == 1
        powers = [part.count("ex2.approx") for part in compiled.ptx.split("wgmma.wait_group.sync.aligned")]
        assert powers[2] == powers[4] == kernel.tiling.keys // 2 + 2
