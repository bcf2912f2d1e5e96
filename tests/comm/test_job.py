"""pytest on the ranks of a job: one report, whatever rank a failure is on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.ranks import REPOSITORY, mpirun

pytestmark = pytest.mark.mpi(3)

TESTS = """
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
"""


def test_a_suite_on_three_ranks(tmp_path: Path) -> None:
    """The suite lies among the tests, so that their conftest serves it, for as long as this test."""
    suite = REPOSITORY / "tests" / f"suite_{os.getpid()}.py"
    suite.write_text(TESTS)
    report = tmp_path / "junit.xml"
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    try:
        job = mpirun(3, *pytest_command, str(suite), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=REPOSITORY)
        output = job.communicate(timeout=300)[0].decode()
    finally:
        suite.unlink()
    assert job.returncode != 0
    assert output.count("short test summary") == 1, output
    cases = {case.get("name"): case for case in ElementTree.parse(report).iter("testcase")}
    failed = {name: case.find("failure") for name, case in cases.items()}
    assert {name for name, failure in failed.items() if failure is not None} == {
        "test_fails",
        "test_hangs",
        "test_lost",
    }
    assert cases["test_too_many"].find("skipped") is not None
    texts = {name: failure.text or "" for name, failure in failed.items() if failure is not None}
    assert "--- rank 2 ---" in texts["test_fails"]
    assert "the last rank is unwell" in texts["test_fails"]
    assert "--- rank 2 did not finish ---" in texts["test_hangs"]
    assert "in hang_on_last" in texts["test_hangs"]
    assert "the job's ranks were lost in hang_on_last" in texts["test_lost"]
