"""Which hosts and GPUs replicas get, and the commands that come of it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rose_dist.cli.placement import Placement, place_replicas
from rose_dist.errors import RoseError


@pytest.mark.parametrize(
    ("hosts", "ranks", "replicas", "places"),
    [
        ((), 4, 1, [Placement((), None)]),
        ((), 4, 2, [Placement((), range(4)), Placement((), range(4, 8))]),
        (("a", "b"), 8, 2, [Placement(("a:8",), None), Placement(("b:8",), None)]),
        (("a:8", "b:8"), 4, 3, [
            Placement(("a:4",), range(4)), Placement(("a:4",), range(4, 8)), Placement(("b:4",), None)
        ]),
        (("a", "b", "c", "d"), 8, 2, [Placement(("a:4", "b:4"), None), Placement(("c:4", "d:4"), None)]),
        (("a:2", "b:2", "a:2"), 2, 3, [
            Placement(("a:2",), range(2)), Placement(("a:2",), range(2, 4)), Placement(("b:2",), None)
        ]),
    ],
)  # fmt: skip
def test_replicas_have_whole_hosts_or_a_part_of_one(
    hosts: tuple[str, ...], ranks: int, replicas: int, places: list[Placement]
) -> None:
    assert place_replicas(hosts, ranks, replicas) == places


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (("a:3", "b:5"), "replica 0 would have a, b and share b with another replica"),
        (("a:3", "b:1"), "2 replicas of 4 ranks need 8 places, but --hosts has 4"),
    ],
)
def test_what_does_not_fit_is_refused(hosts: tuple[str, ...], message: str) -> None:
    with pytest.raises(RoseError, match=message):
        place_replicas(hosts, 4, 2)


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rose_dist", "launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_of_each_replica(tmp_path: Path) -> None:
    printed = launch(
        "--replicas", "2", "-n", "2", "--hosts", "a:4", "--print", "--",
        "serve", "model", "--tp", "2", "--log-dir", str(tmp_path),
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    for number, line in enumerate(printed.stdout.splitlines()):
        words = shlex.split(line)
        assert f"CUDA_VISIBLE_DEVICES={2 * number},{2 * number + 1}" in words
        assert words[words.index("--host") + 1] == "a:2"
        assert words[-4:] == ["--announce", "outside", "--log-dir", f"{tmp_path}/replica-{number}.0"]
        assert "CUDA_VISIBLE_DEVICES" in [words[i + 1] for i, word in enumerate(words) if word == "-x"]


def test_the_slurm_step_of_each_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'n1\\nn2\\nn3\\nn4\\n'\n")
    scontrol.chmod(0o755)
    arguments = ["--replicas", "2", "-n", "4", "--by", "srun", "--srun-options", "--label --gpus 4", "--print"]
    assert "is for a Slurm allocation" in launch(*arguments, "--", "serve", "model").stderr
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    printed = launch(*arguments, "--", "serve", "model")
    assert printed.returncode == 0, printed.stderr
    for words, nodes in zip(map(shlex.split, printed.stdout.splitlines()), ["n1,n2", "n3,n4"], strict=True):
        assert words[words.index("-w") + 1] == nodes
        assert words[words.index("-N") + 1] == "2"
        assert {"--exact", "--label", "--gpus", "--mpi=pmix", "--kill-on-bad-exit=1"} <= set(words)
        assert not any(word.startswith("CUDA_VISIBLE_DEVICES") for word in words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "1", "--", "doctor"), "--replicas is for `serve`"),
        (("-n", "1", "--", "serve", "model", "--no-such"), "No such option"),
        (("-n", "1", "--by", "srun", "--hosts", "a", "--", "serve", "model"), "not --hosts"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = launch("--replicas", "2", *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_model_that_is_not_here_is_named() -> None:
    result = launch("--replicas", "2", "-n", "1", "--", "serve", "/nowhere")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: there is no model in /nowhere on this host")
