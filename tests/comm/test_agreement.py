"""Ranks that were started differently find it out when they join, and say who has what."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rose_dist.comm.agreement import AgreementError, check_agreement
from rose_dist.comm.launcher import LaunchError, check_launch, check_size
from tests.ranks import REPOSITORY, mpirun
from tests.serve.conftest import demo_model

__all__ = ["demo_model"]

HOSTS = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([{"x": "1"}, {"x": "1"}, {"x": "1"}, {"x": "2"}], "ranks differ in x: 2 on rank 3 (b), but 1 on the others"),
        ([{"x": "2"}, {"x": "1"}, {"x": "1"}, {"x": "1"}], "x: 2 on rank 0 (a), but 1 on the others"),
        ([{"x": "1"}, {"x": "1"}, {"x": "2"}, {"x": "2"}], "x: 2 on rank 2 (b), rank 3 (b), but 1 on the others"),
        ([{"x": "1"}, {"x": "1"}, {"x": "1"}, {}], "x: - on rank 3 (b), but 1 on the others"),
        ([{"x": str(r)} for r in range(4)], "x: 3 on rank 3 (b), 2 on rank 2 (b), 1 on rank 1 (a), but 0 on the other"),
    ],
)  # fmt: skip
def test_what_differs_is_named(fields: list[dict[str, str]], message: str) -> None:
    with pytest.raises(AgreementError) as caught:
        check_agreement(fields, HOSTS)
    assert message in str(caught.value)


def test_equal_fields_agree() -> None:
    check_agreement([{"x": "1", "y": "2"}] * 4, HOSTS)


def test_launchers_that_do_not_tell_ranks_of_each_other() -> None:
    with pytest.raises(LaunchError, match="srun started 8 tasks without MPI"):
        check_launch({"SLURM_STEP_NUM_TASKS": "8"})
    check_launch({"SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "3"})
    check_launch({"SLURM_STEP_NUM_TASKS": "1"})
    with pytest.raises(LaunchError, match="4 ranks were started, but MPI sees 1"):
        check_size({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, 1)
    check_size({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, 4)
    check_size({}, 1)


GENERATE = [sys.executable, "-m", "rose_dist", "generate"]


def two_ranks(first: list[str], second: list[str]) -> str:
    """Output of a job whose two ranks have command lines of their own, and which fails."""
    process = mpirun(1, *first, ":", "-n", "1", *second, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode != 0
    return str(output.decode())


@pytest.mark.mpi(2)
def test_different_options(demo_model: Path) -> None:
    arguments = [*GENERATE, str(demo_model), "Hello"]
    output = two_ranks(arguments, [*arguments, "--kv-tokens", "512"])
    host = os.uname().nodename
    assert f"error: ranks differ in kv_tokens: 512 on rank 1 ({host}), but unset on the others" in output
    assert output.count("error: ") == 1
    assert "Traceback" not in output


@pytest.mark.mpi(2)
def test_different_code(demo_model: Path, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "rose_dist", tmp_path / "rose_dist")
    with (tmp_path / "rose_dist" / "errors.py").open("a") as source:
        source.write("# changed\n")
    arguments = [*GENERATE, str(demo_model), "Hello"]
    output = two_ranks(arguments, ["env", "-C", str(tmp_path), f"PYTHONPATH={tmp_path}", *arguments])
    assert "error: ranks differ in rose: 0.1.0+" in output
    assert f" on rank 1 ({os.uname().nodename}), but 0.1.0+" in output
