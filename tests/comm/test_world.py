"""How a job starts and ends: in order, or at once on all ranks with one message that says where."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rose_dist.comm.world import World
from tests.ranks import mpirun, run_ranks

pytestmark = pytest.mark.mpi(2)

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World

behaviour, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["PMIX_RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
if behaviour == "never joins" and rank == 1:
    time.sleep(60)
if behaviour == "raise outside with":
    world = World.join()
    if world.rank == 1:
        raise ValueError("the weights are wrong")
    world.group.barrier()
limit = 3 if behaviour == "never joins" else 120
with World.join(timeout=limit, log_dir=folder if behaviour == "log" else None) as world:
    with world.stage("load weights"):
        if world.rank == 1:
            match behaviour:
                case "raise":
                    raise ValueError("the weights are wrong")
                case "raise in a thread":
                    def fail():
                        raise ValueError("the weights are wrong")
                    threading.Thread(target=fail).start()
                case "abort":
                    world.abort("no memory left")
                case "exit code":
                    sys.exit(3)
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "segfault":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "late for groups":
                    time.sleep(60)
        if behaviour == "late for groups":
            world._limit = 3  # from here on: a slow machine needs more to join
            world.groups(Layout.of(world.size))
        if behaviour == "late for a stage":
            with world.stage("wait for rank 1", limit=3):
                if world.rank != 1:
                    time.sleep(60)
                time.sleep(0.5)
        if behaviour not in ("in order", "log", "late for a stage"):
            world.group.barrier()
            time.sleep(60)
    import logging
    logging.info("rank %d is done", world.rank)
    logging.warning("rank %d warns", world.rank)
"""

FAILURES = {
    "raise": r"\[1@{host}\] rank 1, stage 'load weights': ValueError: the weights are wrong",
    "raise outside with": r"\[1@{host}\] rank 1, stage 'start': ValueError: the weights are wrong",
    "raise in a thread": r"\[1@{host}\] rank 1, stage 'load weights': ValueError: the weights are wrong",
    "abort": r"\[1@{host}\] rank 1, stage 'load weights': no memory left",
    "exit code": r"\[1@{host}\] rank 1, stage 'load weights': SystemExit: 3",
    "killed": r"process rank 1 .* on node {host} exited on\s+signal 9",
    "segfault": r"process rank 1 .* on node {host} exited on\s+signal 11",
    "never joins": r"\[0@{host}\] rank 0, stage 'start MPI': took more than 3 s",
    "late for groups": r"\[0@{host}\] rank 0, stage 'make groups for tp1 dp2 ep2': took more than 3 s",
    "late for a stage": r"\[0@{host}\] rank 0, stage 'wait for rank 1': took more than 3 s",
}


def launch(behaviour: str, folder: Path) -> tuple[int, str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    job = mpirun(
        2, sys.executable, str(program), behaviour, str(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = job.communicate(timeout=180)
    finally:
        job.kill()
    return job.returncode, output.decode()


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(folder: Path, deadline: float) -> None:
    processes = [int(path.read_text()) for path in folder.glob("pid-*")]
    assert len(processes) == 2
    while any(alive(process) for process in processes):
        assert time.monotonic() < deadline, "a process survives"
        time.sleep(0.05)


@pytest.mark.parametrize("behaviour", FAILURES)
def test_a_failure_ends_the_job(behaviour: str, tmp_path: Path) -> None:
    code, output = launch(behaviour, tmp_path)
    ended = time.monotonic()
    assert code != 0
    pattern = FAILURES[behaviour].replace("{host}", os.uname().nodename)
    assert re.search(pattern, output), output
    if "Error" in pattern:
        assert output.count("Traceback") == 1
    wait_until_gone(tmp_path, ended + 60)


def test_leaving_in_order(tmp_path: Path) -> None:
    code, output = launch("in order", tmp_path)
    assert code == 0
    assert "rank 0 is done" in output
    assert "rank 1 is done" not in output, "other ranks speak from warnings up"
    assert f"[1@{os.uname().nodename}] WARNING root: rank 1 warns" in output


def test_other_ranks_log_into_files(tmp_path: Path) -> None:
    code, output = launch("log", tmp_path)
    assert code == 0
    assert "rank 0 is done" in output
    assert "rank 1" not in output
    assert f"[1@{os.uname().nodename}] INFO root: rank 1 is done" in (tmp_path / "rank-1.log").read_text()
    assert not (tmp_path / "rank-0.log").exists()


def report(world: World) -> tuple[int, int, list[str]]:
    return world.local_rank, world.local_size, world.hosts


def test_hosts_and_local_ranks() -> None:
    assert run_ranks(2, report) == [(rank, 2, [os.uname().nodename] * 2) for rank in range(2)]


def test_sigterm_to_mpirun_ends_every_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = mpirun(
        2, sys.executable, str(program), "sleeps", str(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert job.stdout is not None
    while b"2 ranks" not in job.stdout.readline():
        pass
    job.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    job.communicate(timeout=60)
    assert job.returncode != 0
    wait_until_gone(tmp_path, deadline)
