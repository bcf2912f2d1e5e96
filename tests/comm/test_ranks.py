"""The test tool itself: results by rank, and failures that say what happened on which rank."""

from __future__ import annotations

import os
import time

import pytest

from rose_dist.comm.world import World
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.mpi(2)


@pytest.fixture(autouse=True)
def _own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A surrounding job would be lost with its ranks."""
    monkeypatch.setattr("tests.ranks.job", None)


def double_rank(world: World, factor: int) -> int:
    world.group.barrier()
    return world.rank * factor


def fail_on_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank one is unwell")
    world.group.barrier()


def sleep_on_one(world: World) -> None:
    if world.rank == 1:
        time.sleep(60)


def die_on_one(world: World) -> None:
    if world.rank == 1:
        os._exit(9)
    world.group.barrier()


def test_results_come_by_rank() -> None:
    assert run_ranks(2, double_rank, 5) == [0, 5]


def test_a_failure_on_one_rank_is_told_and_new_ranks_follow() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1.*rank one is unwell") as caught:
        run_ranks(2, fail_on_one)
    assert "rank 0 did not finish" in str(caught.value)
    assert "barrier" in str(caught.value), "the stack of the rank that hangs"
    assert run_ranks(2, double_rank, 1) == [0, 1]


def test_a_hang_ends_with_the_stack() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 did not finish.*sleep_on_one"):
        run_ranks(2, sleep_on_one, timeout=1.0)


def test_a_dead_rank_is_told() -> None:
    with pytest.raises(RankError, match="the process is gone"):
        run_ranks(2, die_on_one)
