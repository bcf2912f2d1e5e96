"""The other scripts of slurm/, and what they make of GPUs and containers."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import output, submit

pytestmark = pytest.mark.slurm


def show(variable: str) -> str:
    """A line of a sweep: each rank writes, in one go, its number and what `variable` says."""
    text = f"'%s %s' % (e['SLURM_PROCID'], e.get('{variable}'))"
    return f'-c "import os; e = os.environ; os.write(1, ({text} + chr(10)).encode())"'


def test_generate_in_an_array(cluster: SlurmCluster, demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt-1.txt").write_text("The capital of France is")
    (tmp_path / "prompt-2.txt").write_text("One, two, three,")
    job = submit(
        cluster, tmp_path, "generate.sbatch", "-N1", "-n2", "--array=1-2", "-o", str(tmp_path / "job-%a.out"), "--",
        str(demo_model), str(tmp_path / "prompt-%a.txt"), "--max-tokens", "4", "--ep", "2",
    )  # fmt: skip
    for task in (1, 2):
        cluster.wait_for_state(f"{job}_{task}", "COMPLETED", seconds=120)
    texts = {path.read_text() for path in tmp_path.glob("rose-*/output.txt")}
    assert texts == {" the largest city in\n", " four, five,\n"}, output(tmp_path)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (["--gpus-per-node=2"], ["0 0,1", "1 0,1"]),
        (["--gpus-per-task=1"], ["0 0", "1 1"]),
        ([], ["0 None", "1 None"]),
    ],
)
def test_gpus_that_ranks_see(cluster: SlurmCluster, tmp_path: Path, options: list[str], seen: list[str]) -> None:
    sweep = tmp_path / "sweep"
    sweep.write_text(f"# devices\n{show('CUDA_VISIBLE_DEVICES')}\n")
    job = submit(cluster, tmp_path, "bench.sbatch", "-N1", "--ntasks-per-node=2", *options, "--", str(sweep))
    cluster.wait_for_state(job, "COMPLETED", seconds=120)
    assert sorted((tmp_path / f"rose-{job}" / "line-2.txt").read_text().splitlines()) == seen


def test_ranks_that_do_not_fit_the_gpus_are_refused(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(
        cluster, tmp_path, "bench.sbatch", "-N1", "--ntasks-per-node=1", "--gpus-per-node=2", "--", "/dev/null"
    )
    cluster.wait_for_state(job, "FAILED", seconds=120)
    assert "FATAL: one rank a GPU: --ntasks-per-node=1 does not fit --gpus-per-node=2" in output(tmp_path)


def test_a_failing_line_of_a_sweep_fails_the_job_after_the_others(cluster: SlurmCluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    sweep.write_text("-c 'raise SystemExit(7)'\n-c 'print(\"fine\")'\n")
    job = submit(cluster, tmp_path, "bench.sbatch", "-N1", "-n1", "--", str(sweep))
    cluster.wait_for_state(job, "FAILED", seconds=120)
    assert (tmp_path / f"rose-{job}" / "line-2.txt").read_text() == "fine\n"
    assert "line 1 failed with exit code 7" in output(tmp_path)


def test_ranks_in_an_apptainer_container(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Not the real program, which Debian lacks: one that shows how it was called, and runs the rest."""
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@" >>"$CALLS"\nshift 5\nINSIDE=yes exec "$@"\n')
    program.chmod(0o755)
    sweep = tmp_path / "sweep"
    sweep.write_text(show("INSIDE"))
    job = submit(
        cluster, tmp_path, "bench.sbatch", "-N1", "-n2", "--gpus-per-node=2", "--", str(sweep),
        ROSE_CONTAINER="rose.sif", ROSE_MOUNTS="/models:/models", CALLS=str(tmp_path / "calls"),
        PATH=f"{program.parent}:{cluster.environment['PATH']}",
    )  # fmt: skip
    cluster.wait_for_state(job, "COMPLETED", seconds=120)
    assert sorted((tmp_path / f"rose-{job}" / "line-1.txt").read_text().splitlines()) == ["0 yes", "1 yes"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert "exec --bind" in calls[0]
    assert "/models:/models --nv rose.sif" in calls[0]


def test_the_test_suite_on_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    suite = "tests/comm/test_group.py"
    job = submit(
        cluster, tmp_path, "test.sbatch", "-N2", "--ntasks-per-node=2", "--", "-q", suite, "-p", "no:cacheprovider"
    )
    cluster.wait_for_state(job, "COMPLETED", seconds=300)
    suites = ElementTree.parse(tmp_path / f"rose-{job}" / "junit.xml").getroot()[0]
    assert int(suites.get("tests", 0)) > 10
    assert (suites.get("failures"), suites.get("errors")) == ("0", "0"), output(tmp_path)
    assert "4 ranks on 2 hosts" in output(tmp_path)
