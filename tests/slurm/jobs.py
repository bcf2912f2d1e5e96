"""Submitting the scripts of slurm/ to the test cluster."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.ranks import REPOSITORY
from tests.slurm.cluster import SlurmCluster

SCRIPTS = REPOSITORY / "slurm"


def submit(cluster: SlurmCluster, folder: Path, script: str, *arguments: str, **variables: str) -> int:
    """`sbatch OPTIONS -- script ARGUMENTS`: options are all before "--". Logs go to `folder`, the job's to job.out."""
    split = arguments.index("--")
    options, rest = arguments[:split], arguments[split + 1 :]
    environment = cluster.environment | {
        "ROSE_HOME": str(REPOSITORY),
        "ROSE_PYTHON": sys.executable,
        "ROSE_LOGS": str(folder),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    where = ["-o", str(folder / "job.out")] if not any(option == "-o" for option in options) else []
    return cluster.submit(*options, *where, str(SCRIPTS / script), *rest, env=environment)


def output(folder: Path) -> str:
    """Everything that a job wrote."""
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.rglob("*")) if path.is_file())
