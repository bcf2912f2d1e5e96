"""pytest under mpirun or srun: `mpirun -n 4 pytest`, `srun --mpi=pmix -n 4 pytest`.

One process collects, runs and reports the tests, so that there is one report and one order: rank 0's. The other ranks,
and a child of that process in rank 0's place, wait for functions of `tests.ranks.run_ranks`. A test for fewer ranks
than the job has gets a world of the first ones. What fails on any rank fails the test; what takes too long fails it
with the stacks of the ranks that did not finish, on whatever host they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

KEY = "ROSE_TEST_KEY"
"""The variable by which rank 0 learns the key of `tests.ranks`' connections."""
_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
"""Beginnings of the variables by which a launcher's ranks know each other."""


def enter(config: pytest.Config) -> None:
    """Join the surrounding job, if there is one. Returns on rank 0 alone."""
    size = size_of_job(os.environ)
    if size == 1:
        return
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMIX_RANK")) != "0":
        become_worker(config)
    from tests import ranks  # noqa: PLC0415  imports torch, which the other ranks do after `become_worker`

    environment = dict(os.environ)
    for name in environment:
        if name.startswith(_LAUNCHER):
            del os.environ[name]  # tests start jobs of their own
    ranks.job = ranks.RankPool(size, lambda worker: subprocess.Popen(worker, env=environment | {KEY: os.environ[KEY]}))


def size() -> int | None:
    """The surrounding job's ranks; None if there is none."""
    ranks = sys.modules.get("tests.ranks")
    return ranks.job.size if ranks is not None and ranks.job is not None else None


def leave() -> None:
    """Let the job's ranks end."""
    ranks = sys.modules.get("tests.ranks")
    if ranks is not None and ranks.job is not None:
        ranks.job.close()


def size_of_job(environment: Mapping[str, str]) -> int:
    """1 without a launcher."""
    if "PMIX_RANK" not in environment and "OMPI_COMM_WORLD_RANK" not in environment:
        return 1
    return int(environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("SLURM_STEP_NUM_TASKS") or 1)


def become_worker(config: pytest.Config) -> None:
    """Does not return."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()  # else pytest's temporary files stay this process' output
    os.execv(sys.executable, [sys.executable, "-m", "tests.rank_worker", "0"])
