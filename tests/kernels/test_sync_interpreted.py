"""The grid barrier of both archs, with each of its orders and scopes weakened in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.probe import GridBarriers
from rose_dist.kernels.sync import COUNTER_BYTES, COUNTERS, REPORT_WORDS
from tests.kernels.emulation import compiled, stream
from tests.ptx.errors import PtxError
from tests.ptx.machine import Machine
from tests.ptx.weaken import Weakening, weakenings

REPEATS, BLOCKS, LIMIT_NS = 2, 5, 1 << 40
EXPECTED = [sum((slot - i) % BLOCKS + 1 for i in range(REPEATS)) for slot in range(BLOCKS)]


def run(arch: str, seed: int, weakening: Weakening | None = None, **options: Any) -> bool:
    """Whether all blocks saw one another's writes."""
    machine = Machine()
    counters, slots = machine.zeros(COUNTERS * COUNTER_BYTES // 4, torch.int32), machine.zeros(BLOCKS, torch.int32)
    report = machine.zeros(REPORT_WORDS, torch.int32)
    host = compiled(GridBarriers(ARCHS[arch], REPEATS, threads=64))
    launches = host(counters.data_ptr(), 0, slots.data_ptr(), report.data_ptr(), LIMIT_NS, BLOCKS, stream())
    if weakening is not None:
        launches = [weakening.apply(one) for one in launches]
    machine.run(launches, seed=seed, **options)
    return slots.tolist() == EXPECTED and not report.any()


def orders_of_the_counter(arch: str) -> list[Weakening]:
    """Of the first barrier: nothing reads what the last one orders."""
    (program,) = compiled(GridBarriers(ARCHS[arch], REPEATS, threads=64)).programs.values()
    found = [w for w in weakenings(program, barriers=False) if "gpu" in w.text]
    return found[: len(found) // REPEATS]


def is_caught(arch: str, weakening: Weakening) -> bool:
    try:
        return not all(run(arch, seed, weakening) for seed in range(25))
    except PtxError:
        return True


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_each_weakened_order_is_caught(arch: str) -> None:
    weakened = orders_of_the_counter(arch)
    assert {w.change for w in weakened} == {"release made relaxed", "acquire made relaxed", "scope gpu made cta"}
    assert all(run(arch, seed) for seed in range(5))
    missed = [str(w) for w in weakened if not is_caught(arch, w)]
    assert not missed


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_blocks_that_are_not_all_resident_expire(arch: str) -> None:
    """Without co-residency the barrier can't be met: the wait gives up, reports, and the rest of the grid runs."""
    assert not run(arch, 0, resident=BLOCKS - 1)
