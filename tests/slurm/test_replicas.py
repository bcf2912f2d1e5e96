"""slurm/serve.sbatch with replicas, each a step of the job on nodes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.slurm.cluster import KILL_WAIT_SECONDS, SlurmCluster
from tests.slurm.jobs import submit
from tests.slurm.test_serve import left_behind, wait_for_endpoint

pytestmark = pytest.mark.slurm

START_SECONDS = 300


def wait_for_status(url: str, status: str, seconds: float, log: Path) -> Any:
    """What /health says."""
    deadline = time.monotonic() + seconds
    while True:
        with urllib.request.urlopen(f"{url.removesuffix('/v1')}/health", timeout=10) as answer:
            health = json.load(answer)
        if health["status"] == status:
            return health
        assert time.monotonic() < deadline, f"{health}\n{log.read_text()}"
        time.sleep(0.1)


def test_a_step_that_is_lost_is_started_again(cluster: SlurmCluster, scripted: Path, tmp_path: Path) -> None:
    job = submit(
        cluster, tmp_path, "serve.sbatch", "-N4", "--ntasks-per-node=1", "--no-kill", "--",
        str(scripted), "--kv-tokens", "1024", ROSE_REPLICAS="2",
    )  # fmt: skip
    url = wait_for_endpoint(cluster, job, tmp_path)
    log = tmp_path / "job.out"
    wait_for_status(url, "ok", START_SECONDS, log)
    ranks = [
        process
        for node in cluster.nodes[2:]
        for process, command in node.processes().items()
        if re.match(r"\S*python\S* -m rose_dist serve", command)
    ]
    assert len(ranks) == 2, "the second replica has the last two nodes"
    os.kill(ranks[1], signal.SIGKILL)
    (missing,) = wait_for_status(url, "degraded", 60, log)["missing"]
    assert missing["replica"] == 1
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for _ in range(4):
        assert client.completions.create(model="scripted-model", prompt="One", max_tokens=2).usage
    wait_for_status(url, "ok", START_SECONDS, log)
    assert re.search(r"replica 1 has ended: \[1@\S+\] rank 1, stage 'serve': the process is gone", log.read_text())
    cluster.run("scancel", str(job))
    cluster.wait_for_state(job, "CANCELLED", "COMPLETED", seconds=KILL_WAIT_SECONDS)
    deadline = time.monotonic() + KILL_WAIT_SECONDS + 20
    while left := left_behind(cluster):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert not (tmp_path / f"rose-{job}" / "endpoint").exists()
    assert "Draining" in log.read_text()
    assert "Traceback" not in log.read_text()
