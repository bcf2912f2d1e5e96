"""What one guard does by itself; jobs with guards are in test_world.py and tests/serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rose_dist.comm import guard_process
from rose_dist.comm.guard_process import Guard, Link, end_job, state_of


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("alive", "message"), [(False, "rank 1: the process is gone"), (True, "")])
def test_a_guard_that_loses_rank_0s_looks_at_its_own_rank_first(
    capfd: pytest.CaptureFixture[str], alive: bool, message: str
) -> None:
    """A launcher that ends the job is faster than the kernel with a killed rank's memory."""
    rank = subprocess.Popen(["sleep", "60"])
    if not alive:
        rank.kill()
        wait_for(lambda: state_of(rank.pid)[0] == "Z")
    progress = os.memfd_create("progress")
    os.truncate(progress, 8)
    guard = Guard(rank.pid, os.getpid(), progress)
    guard.who, guard.rank = "rank 1", 1
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    listener.close()
    guard.links = [Link(ours, "rank 0")]
    guard.lose(guard.links[0], "its guard is gone")
    assert capfd.readouterr().err.startswith(message)
    assert (guard.turn is None) == bool(message), "else its turn comes to speak of rank 0's"
    rank.kill()
    rank.wait()
    os.close(progress)


def test_a_launcher_that_is_gone_before_the_guard_looks(capfd: pytest.CaptureFixture[str]) -> None:
    """The guard's interpreter takes longer to start than a launcher to be killed."""
    launcher = subprocess.Popen(["true"])
    launcher.wait()
    progress = os.memfd_create("progress")
    os.truncate(progress, 8)
    rank = subprocess.Popen(["sleep", "60"])
    command = [sys.executable, "-I", "-S", guard_process.__file__, *map(str, (rank.pid, launcher.pid, progress))]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[progress])
    assert rank.wait(30) == -signal.SIGKILL
    assert guard.wait(30) == 0
    assert capfd.readouterr().err == f"process {rank.pid}: its launcher is gone\n"
    os.close(progress)


def test_the_command_that_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = tmp_path / "done"
    end_job()
    monkeypatch.setenv("ROSE_END_JOB", "no-such-program x")
    end_job()
    monkeypatch.setenv("ROSE_END_JOB", f"touch {done}")
    end_job()
    wait_for(done.exists)
