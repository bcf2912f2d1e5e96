from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.conftest import demo_model, scripted
from tests.slurm.cluster import SlurmCluster, skip_without_slurm

__all__ = ["demo_model", "scripted"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Four nodes with two cores and two pretended GPUs each."""
    skip_without_slurm()
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=4, cpus=2, gpus=2) as cluster:
        yield cluster
