"""slurm/serve.sbatch on a real Slurm: four nodes, two ranks each."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest

from tests.slurm.cluster import KILL_WAIT_SECONDS, SlurmCluster
from tests.slurm.jobs import output, submit

pytestmark = pytest.mark.slurm

READY_SECONDS = 300


def wait_for_endpoint(cluster: SlurmCluster, job: int, folder: Path) -> str:
    endpoint = folder / f"rose-{job}" / "endpoint"
    deadline = time.monotonic() + READY_SECONDS
    while not endpoint.exists():
        assert cluster.state(job) in ("PENDING", "RUNNING", "CONFIGURING"), output(folder)
        assert time.monotonic() < deadline, output(folder)
        time.sleep(0.2)
    return endpoint.read_text().strip()


def left_behind(cluster: SlurmCluster) -> list[str]:
    """Processes besides Slurm's daemons, and shared memory, on all nodes."""
    return [
        f"{node.name}: {thing}"
        for node in cluster.nodes
        for thing in [*(c for c in node.processes().values() if "slurm" not in c.split()[0]), *node.shared_memory()]
    ]


def test_eight_ranks_on_four_nodes_answer_and_drain(cluster: SlurmCluster, demo_model: Path, tmp_path: Path) -> None:
    job = submit(
        cluster, tmp_path, "serve.sbatch", "-N4", "--ntasks-per-node=2", "--gpus-per-node=2", "--",
        str(demo_model), "--tp", "2", "--kv-tokens", "2048", ROSE_DRAIN_SECONDS="45",
    )  # fmt: skip
    url = wait_for_endpoint(cluster, job, tmp_path)
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = client.chat.completions.create(model="demo-model", messages=[question], temperature=0, max_tokens=16)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert "8 ranks on 4 hosts" in (tmp_path / "job.out").read_text()
    assert sorted(path.name for path in (tmp_path / f"rose-{job}").glob("rank-*.log")) == [
        f"rank-{rank}.log" for rank in range(1, 8)
    ]

    stream = iter(client.completions.create(
        model="demo-model", prompt="One", max_tokens=24, stream=True, extra_body={"ignore_eos": True}
    ))  # fmt: skip
    next(stream)
    cluster.run("scancel", str(job))
    assert sum(len(chunk.choices) for chunk in stream) >= 20, "what runs is finished"
    cluster.wait_for_state(job, "CANCELLED", "COMPLETED", seconds=KILL_WAIT_SECONDS)
    deadline = time.monotonic() + KILL_WAIT_SECONDS
    while left := left_behind(cluster):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert not (tmp_path / f"rose-{job}" / "endpoint").exists()
    log = (tmp_path / "job.out").read_text()
    assert "SIGTERM: draining" in log
    assert "Traceback" not in log


def test_a_node_without_the_model_is_named(cluster: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    missing = cluster.nodes[2]
    missing.run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    job = submit(cluster, tmp_path, "serve.sbatch", "-N4", "--ntasks-per-node=2", "--", str(folder))
    cluster.wait_for_state(job, "FAILED", seconds=120)
    missing.run("umount", str(folder))
    log = (tmp_path / "job.out").read_text()
    # The node's own word and the script's come from two processes, in either order.
    named = f"FATAL: {missing.name} has no model in {folder} (no config.json there)"
    assert any(line.endswith(named) for line in log.splitlines())
    assert "rank" not in log
