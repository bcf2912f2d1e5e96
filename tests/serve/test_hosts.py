"""Ranks on several hosts that mpirun reaches without ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import Hosts, skip_unless_root
from tests.ranks import REPOSITORY

pytestmark = pytest.mark.mpi(4)

GENERATE = ["--max-tokens", "12", "--kv-tokens", "1024", "The capital of France is", "One, two, three,"]


def rose(*arguments: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "rose_dist", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def one_rank(demo_model: Path) -> str:
    return rose("generate", str(demo_model), *GENERATE)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("layout", [["--dp", "4", "--ep", "4"], ["--dp", "2", "--tp", "2"]], ids=["ep4", "dp2·tp2"])
def test_same_tokens_as_one_rank(
    count: int, layout: list[str], one_rank: str, demo_model: Path, tmp_path: Path
) -> None:
    skip_unless_root()
    with Hosts(count, tmp_path) as hosts:
        places = ",".join(f"{host.address}:{4 // count}" for host in hosts)
        reach = {
            "PRTE_MCA_plm_ssh_agent": str(hosts.agent),
            "PRTE_MCA_prte_if_include": hosts.network,
            "OMPI_MCA_btl_tcp_if_include": hosts.network,
        }
        text = rose(
            "launch", "-n", "4", "--hosts", places, "--", "generate", str(demo_model), *layout, *GENERATE, **reach
        )
        assert text == one_rank
        assert [host.shared_memory() for host in hosts] == [[]] * count
        assert [host.processes() for host in hosts] == [{}] * count
