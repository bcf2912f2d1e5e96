"""Ranks and frontends that are stopped, guards that die: the job ends in time, and clients are told."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import openai
import pytest

from tests.serve.server import Server
from tests.serve.test_faults import LIMIT_SECONDS, alive, cmdline

pytestmark = pytest.mark.mpi(2)

OPTIONS = ("--kv-tokens", "2048")


def ends_in_time(server: Server, begun: float, message: str) -> None:
    """The job has ended by itself with exactly one message of the guards, `message`, and nothing is left of it."""
    family = server.family()
    assert server.process.wait(LIMIT_SECONDS) != 0
    while any(alive(process) for process in family):
        assert time.monotonic() - begun < LIMIT_SECONDS, server.log.read_text()
        time.sleep(0.05)
    said = [line for line in server.log.read_text().splitlines() if re.match(r"\[\d+@\S+\] rank", line)]
    assert len(said) == 1, server.log.read_text()
    assert re.fullmatch(message.replace("HOST", re.escape(os.uname().nodename)), said[0]), said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank(demo_model: Path, tmp_path: Path, rank: int) -> None:
    with Server(demo_model, 2, *OPTIONS, folder=tmp_path) as server:
        stream = iter(server.client(timeout=120).completions.create(
            model="demo-model", prompt="One", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        ))  # fmt: skip
        next(stream)
        begun = time.monotonic()
        os.kill(server.ranks()[rank], signal.SIGSTOP)
        with pytest.raises(openai.APIError, match="The engine has failed"):
            for _ in stream:
                pass
        who = rf"\[{rank}@HOST\] rank {rank}, stage 'serve'"
        ends_in_time(server, begun, rf"{who}: stopped for 5 s, as by SIGSTOP")


def test_a_stopped_frontend(demo_model: Path, tmp_path: Path) -> None:
    with Server(demo_model, 2, *OPTIONS, folder=tmp_path) as server:
        frontend = next(process for process in server.family() if b"rose_dist.frontend" in cmdline(process))
        begun = time.monotonic()
        os.kill(frontend, signal.SIGSTOP)
        who = r"\[0@HOST\] rank 0, stage 'serve'"
        ends_in_time(server, begun, rf"{who}: its frontend is stopped for 5 s, as by SIGSTOP")


def test_a_killed_guard(demo_model: Path, tmp_path: Path) -> None:
    with Server(demo_model, 2, *OPTIONS, folder=tmp_path) as server:
        parent = server.ranks()[1]
        guard = next(
            process for process in server.family()
            if b"guard_process.py" in cmdline(process) and str(parent).encode() in cmdline(process)
        )  # fmt: skip
        begun = time.monotonic()
        os.kill(guard, signal.SIGKILL)
        ends_in_time(server, begun, r"\[1@HOST\] rank 1, stage 'serve': its guard is gone")


def test_a_killed_mpirun_leaves_nothing(demo_model: Path, tmp_path: Path) -> None:
    with Server(demo_model, 2, *OPTIONS, folder=tmp_path) as server:
        shared = server.shared_memory()
        assert shared
        family = server.family()
        begun = time.monotonic()
        os.kill(next(process for process in family if b"prterun" in cmdline(process)), signal.SIGKILL)
        assert server.process.wait(LIMIT_SECONDS) != 0
        while any(alive(process) for process in family) or any(path.exists() for path in shared):
            assert time.monotonic() - begun < LIMIT_SECONDS, server.log.read_text()
            time.sleep(0.05)


def test_a_long_step_is_no_failure(demo_model: Path, tmp_path: Path) -> None:
    """Beats go on while a step takes longer than the time between them."""
    options = ("--kv-tokens", "2048", "--max-step-tokens", "1024")
    with Server(demo_model, 2, *options, folder=tmp_path) as server:
        answer = server.client().completions.create(model="demo-model", prompt="word " * 800, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1
        assert server.health() == 200


def test_a_stuck_step_ends_the_job_and_shows_every_stack(demo_model: Path, tmp_path: Path) -> None:
    options = ("--kv-tokens", "8192", "--max-step-tokens", "4096", "--step-timeout", "3")
    with Server(demo_model, 2, *options, folder=tmp_path) as server:
        begun = time.monotonic()
        with pytest.raises(openai.APIError, match="The engine has failed"):
            server.client().completions.create(model="demo-model", prompt="word " * 4000, max_tokens=1)
        ends_in_time(server, begun, r"\[\d@HOST\] rank \d, stage 'serve': no progress for 3 s")
        assert server.log.read_text().count("in forward") > 1
        assert server.log.read_text().count("most recent call first") >= 2
