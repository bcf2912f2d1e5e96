import time

import pytest

from tests.ranks import run_ranks


def facts(world):
    world.group.barrier()
    return world.rank, world.size, world.group.all_gather_objects(world.rank)


def fail_on_last(world):
    if world.rank == world.size - 1:
        raise ValueError("the last rank is unwell")


def hang_on_last(world):
    if world.rank == world.size - 1:
        time.sleep(30)


@pytest.mark.mpi(3)
def test_all():
    assert run_ranks(3, facts) == [(rank, 3, [0, 1, 2]) for rank in range(3)]


@pytest.mark.mpi(2)
def test_part():
    assert run_ranks(2, facts) == [(rank, 2, [0, 1]) for rank in range(2)]


@pytest.mark.mpi(4)
def test_too_many():
    raise AssertionError


def test_fails():
    run_ranks(3, fail_on_last)


def test_goes_on():
    assert run_ranks(3, facts)[2][0] == 2


def test_hangs():
    run_ranks(3, hang_on_last, timeout=1)


def test_lost():
    run_ranks(3, facts)
