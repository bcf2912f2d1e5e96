"""The command lines that slurm/ makes for containers, on an `srun` that only writes down how it was called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY

SRUN = """#!/bin/sh
[ "$1" != --help ] || { echo "$SRUN_HELP"; exit; }
for word; do printf '%s\\n' "$word"; done >"$CALL"
: >"$ROSE_ENDED"
"""


def call(folder: Path, **variables: str) -> list[str]:
    """The words after `srun` for `rose doctor` on the job's ranks."""
    program = folder / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(SRUN)
    program.chmod(0o755)
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(folder),
        "ROSE_HOME": str(REPOSITORY),
        "ROSE_PYTHON": "python3.11",
        "CALL": str(folder / "call"),
        "SRUN_HELP": "",
        **variables,
    }
    script = 'set -euo pipefail; . "$ROSE_HOME/slurm/job.sh"; run_ranks -m rose_dist doctor'
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return (folder / "call").read_text().splitlines()


def mounts(folder: Path) -> str:
    return f"{REPOSITORY}:{REPOSITORY},{folder}/rose-7:{folder}/rose-7"


def test_no_container(tmp_path: Path) -> None:
    words = call(tmp_path)
    assert words == [
        "--kill-on-bad-exit=1", "--unbuffered", "--mpi=pmix",
        f"--task-epilog={REPOSITORY}/slurm/task_ended.sh", "python3.11", "-m", "rose_dist", "doctor",
    ]  # fmt: skip


def test_pyxis_where_srun_has_it(tmp_path: Path) -> None:
    words = call(tmp_path, ROSE_CONTAINER="my image.sqsh", SRUN_HELP="--container-image=x", ROSE_MOUNTS="/models:/m")
    assert words[2:5] == [
        "--container-image=my image.sqsh",
        f"--container-mounts={mounts(tmp_path)},/models:/m",
        "--no-container-mount-home",
    ]
    assert words[-4:] == ["python3.11", "-m", "rose_dist", "doctor"]


@pytest.mark.parametrize(("gpus", "options"), [({}, []), ({"SLURM_GPUS_PER_NODE": "8"}, ["--nv"])])
def test_apptainer_otherwise(tmp_path: Path, gpus: dict[str, str], options: list[str]) -> None:
    words = call(tmp_path, ROSE_CONTAINER="rose.sif", **gpus)
    inside = words[words.index("apptainer") :]
    assert inside == [
        "apptainer", "exec", "--bind", mounts(tmp_path), *options, "rose.sif",
        "python3.11", "-m", "rose_dist", "doctor",
    ]  # fmt: skip


def test_by_the_variable(tmp_path: Path) -> None:
    words = call(tmp_path, ROSE_CONTAINER="rose.sif", ROSE_CONTAINER_BY="apptainer", SRUN_HELP="--container-image=x")
    assert "apptainer" in words
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(AssertionError, match="FATAL: ROSE_CONTAINER_BY is pyxis or apptainer, not docker"):
        call(other, ROSE_CONTAINER="rose.sif", ROSE_CONTAINER_BY="docker")
