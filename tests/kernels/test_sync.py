"""Grid barriers and bounded waits under a weak memory model, and on a GPU where there is one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import jit, launch
from rose_dist.kernels.arch import HOPPER
from rose_dist.kernels.probe import BARRIER_STAGE, GridBarriers
from rose_dist.kernels.sync import COUNTER_BYTES, COUNTERS, REPORT_WORDS, WaitExpiredError, WaitReport
from tests.kernels.emulation import compiled, stream
from tests.ptx.errors import PtxError
from tests.ptx.machine import Machine

REPEATS, BLOCKS = 3, 4
KERNEL = GridBarriers(HOPPER, REPEATS, threads=32)
LONG = 1 << 40


def expected(blocks: int, repeats: int) -> list[int]:
    """Repeat i lets block b add b + 1 to slot (b + i) mod blocks."""
    return [sum((slot - i) % blocks + 1 for i in range(repeats)) for slot in range(blocks)]


def run(
    seed: int, *, base: int = 0, counter: int = 0, limit: int = LONG, weaken: str = ""
) -> tuple[list[int], torch.Tensor]:
    """Slots and report words after one emulated launch; `weaken` is an instruction to strip of its release."""
    machine = Machine()
    words = torch.full((COUNTERS * COUNTER_BYTES // 4,), counter, dtype=torch.int64)
    counters = machine.tensor(words.to(torch.uint32).view(torch.int32))
    slots, report = machine.zeros(BLOCKS, torch.int32), machine.zeros(REPORT_WORDS, torch.int32)
    host = compiled(KERNEL)
    launches = host(counters.data_ptr(), base, slots.data_ptr(), report.data_ptr(), limit, BLOCKS, stream())
    if weaken:
        weakened = host.changed(weaken, weaken.replace("release", "relaxed").replace("acquire", "relaxed"))
        launches = [dataclasses.replace(one, program=weakened) for one in launches]
    machine.run(launches, seed=seed, races="off" if weaken else "error")
    return slots.tolist(), report


@pytest.mark.parametrize("seed", range(6))
def test_barriers_order_all_writes(seed: int) -> None:
    slots, report = run(seed)
    assert slots == expected(BLOCKS, REPEATS)
    assert not report.any()


@pytest.mark.parametrize("seed", range(2))
def test_the_counter_may_wrap_around(seed: int) -> None:
    start = (1 << 32) - 5
    assert run(seed, base=start, counter=start)[0] == expected(BLOCKS, REPEATS)


@pytest.mark.parametrize("weaken", ["red.release.gpu", "ld.acquire.gpu"])
def test_a_weakened_barrier_fails(weaken: str) -> None:
    wrong = 0
    for seed in range(40):
        try:
            wrong += run(seed, weaken=weaken)[0] != expected(BLOCKS, REPEATS)
        except PtxError:
            wrong += 1
    assert wrong > 0


def test_a_wait_that_expires_reports_and_ends() -> None:
    _, words = run(0, base=1000, limit=20_000)
    assert words[0] == 1
    assert words[7] == 1
    report = WaitReport({BARRIER_STAGE: "the grid barrier"})
    report.check()
    report._words.copy_(words)
    with pytest.raises(WaitExpiredError, match=r"rank 0 waited for rank 0 in the grid barrier .* wanted 1004, saw 4"):
        report.check()


def test_report_names_unknown_stages() -> None:
    report = WaitReport({})
    report._words.copy_(torch.tensor([1, 3, 5, 9, 70, 69, 0, 1]))
    with pytest.raises(
        WaitExpiredError, match="rank 3 waited for rank 5 in stage 9 beyond the limit: wanted 70, saw 69"
    ):
        report.check()


@pytest.mark.gpu(1)
def test_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    kernel = GridBarriers(HOPPER, 100)
    counters = torch.zeros(COUNTERS * COUNTER_BYTES // 4, dtype=torch.int32, device="cuda")
    blocks = launch.device(counters).sms
    slots = torch.zeros(blocks, dtype=torch.int32, device="cuda")
    report = WaitReport({BARRIER_STAGE: "the grid barrier"})
    for _ in range(5):
        slots.zero_()
        base = int(counters[0])
        launch.run(jit.load(kernel), counters, counters, base, slots, report.address, 10**9, blocks)
        torch.cuda.synchronize()
        report.check()
        assert slots.tolist() == expected(blocks, 100)
    launch.run(jit.load(kernel), counters, counters, int(counters[0]) + 1, slots, report.address, 10**5, blocks)
    torch.cuda.synchronize()
    with pytest.raises(WaitExpiredError, match="the grid barrier"):
        report.check()
