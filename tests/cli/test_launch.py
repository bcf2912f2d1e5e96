"""`rose launch` with the real mpirun: what it starts, and how it stops it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_dist.cli.launch import Launch

RANK = """
import os, signal, sys, time
from pathlib import Path
from rose_dist.comm.guard import Guard

guard = Guard()  # as every rank has
guard.stage("a rank")
folder, drain = Path(sys.argv[1]), float(sys.argv[2])
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(time.monotonic()))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ["OMPI_COMM_WORLD_RANK"]
(folder / f"started{rank}").write_text(str(os.getpid()))
while not asked or time.monotonic() < asked[0] + drain:
    time.sleep(0.02)
(folder / f"drained{rank}").touch()
guard.close()
"""

SUPERVISOR = """
import os, sys
from rose_dist.cli.launch import Launch
from rose_dist.cli.supervise import supervise

launch = Launch(2, (), ())
environment = launch.environment(os.environ)
mpirun = launch.mpirun(environment)[:-2]  # without -m rose_dist
sys.exit(supervise([*mpirun, *sys.argv[2:]], environment, float(sys.argv[1])))
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: object, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


class Supervised:
    """Two ranks under `supervise`, started."""

    def __init__(self, folder: Path, *, drain: float, drain_timeout: float) -> None:
        (folder / "rank.py").write_text(RANK)
        rank = [str(folder / "rank.py"), str(folder), str(drain)]
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(drain_timeout), *rank])
        wait_for(lambda: all(self.path("started", rank).exists() for rank in range(2)))
        wait_for(lambda: all(self.path("started", rank).read_text() for rank in range(2)))
        self.pids = [int(self.path("started", rank).read_text()) for rank in range(2)]

    def path(self, kind: str, rank: int) -> Path:
        return self.folder / f"{kind}{rank}"

    def drained(self) -> list[bool]:
        return [self.path("drained", rank).exists() for rank in range(2)]

    def end(self) -> int:
        code = self.process.wait(timeout=30)
        wait_for(lambda: not any(alive(pid) for pid in self.pids))
        return code


@pytest.fixture
def supervised(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Supervised]:
    drain, drain_timeout = request.param
    started = Supervised(tmp_path, drain=drain, drain_timeout=drain_timeout)
    yield started
    for pid in (started.process.pid, *started.pids):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("supervised", [(1.0, 20.0)], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_lets_every_rank_finish(supervised: Supervised, number: signal.Signals) -> None:
    supervised.process.send_signal(number)
    assert supervised.end() == 0
    assert supervised.drained() == [True, True]


@pytest.mark.mpi(2)
@pytest.mark.parametrize("supervised", [(60.0, 0.5)], indirect=True)
def test_the_drain_time_is_bounded(supervised: Supervised) -> None:
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.end() != 0
    assert supervised.drained() == [False, False]


@pytest.mark.mpi(2)
@pytest.mark.parametrize("supervised", [(60.0, 60.0)], indirect=True)
def test_a_second_signal_ends_it_at_once(supervised: Supervised) -> None:
    supervised.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert supervised.process.poll() is None
    supervised.process.send_signal(signal.SIGINT)
    assert supervised.end() != 0


@pytest.mark.mpi(2)
@pytest.mark.parametrize("supervised", [(60.0, 60.0)], indirect=True)
def test_a_killed_rank_ends_the_job(supervised: Supervised) -> None:
    os.kill(supervised.pids[1], signal.SIGKILL)
    assert supervised.end() != 0


@pytest.mark.mpi(2)
@pytest.mark.parametrize("supervised", [(60.0, 60.0)], indirect=True)
def test_a_killed_launcher_takes_its_ranks_with_it(supervised: Supervised) -> None:
    supervised.process.kill()
    supervised.end()


def rose(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rose_dist", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.mpi(2)
def test_ranks_run_a_rose_command() -> None:
    result = rose("launch", "-n", "2", "--", "convert", "random", "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Usage: rose convert random") == 2


@pytest.mark.mpi(2)
def test_the_exit_code_of_a_failing_rank_comes_through() -> None:
    result = rose("launch", "-n", "2", "--", "convert", "random", "--seed", "x", "somewhere")
    assert result.returncode == 2
    assert "error: Invalid value for '--seed'" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--by", "srun"], "--by srun is for --replicas"),
        (["--replicas", "2", "--srun-options", "-w node1"], "--srun-options is for --by srun"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: list[str], message: str) -> None:
    result = rose("launch", "-n", "2", *options, "--", "serve", "M")
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense"], 2, "No such command 'nonsense'; there are bench, chat, "),
        (["serve", "M", "--tpp", "2"], 2, "No such option '--tpp'"),
        (["serve", "M", "--drain-timeout", "-5"], 2, "-5.0 is not in the range x>=0"),
        (["serve", "M", "--chat-format", "chatml"], 2, "'chatml' is not one of 'auto', 'harmony', 'jinja'"),
        (["serve", "M", "--tp", "2"], 1, "tp 2 does not divide 3 ranks. Possible on 3 ranks: tp1 dp3, tp3 dp1;"),
        (["serve", "M", "--tp", "3", "--dp", "3"], 1, "tp3 dp3 ep3 does not divide 3 ranks"),
    ],
)
@pytest.mark.parametrize("replicas", [[], ["--replicas", "2"]], ids=["one job", "replicas"])
def test_mistakes_are_told_once_before_any_rank_starts(
    arguments: list[str], code: int, message: str, replicas: list[str]
) -> None:
    result = rose("launch", "-n", "3", *replicas, "--", *arguments)
    assert result.returncode == code
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_print_shows_both_commands_and_runs_nothing() -> None:
    result = rose("launch", "-n", "4", "--print", "--", "serve", "a model", "--dp", "4")
    assert result.returncode == 0, result.stderr
    mpirun, srun = (shlex.split(line) for line in result.stdout.splitlines())
    assert mpirun[-7:] == [sys.executable, "-m", "rose_dist", "serve", "a model", "--dp", "4"]
    assert mpirun[mpirun.index("-n") + 1] == "4"
    assert srun[-7:] == mpirun[-7:]
    assert "--kill-on-bad-exit=1" in srun
    assert "OMPI_MCA_pml=ob1" in mpirun


def test_other_hosts_get_the_environment() -> None:
    launch = Launch(4, ("a:3", "b:1"), ("doctor",))
    command = launch.mpirun(
        launch.environment({"ROSE_X": "1", "SECRET": "2", "PYTHONPATH": "p", "LD_PRELOAD": "nvshmem.so"})
    )
    exported = [command[i + 1] for i, word in enumerate(command) if word == "-x"]
    assert command[command.index("--host") + 1] == "a:3,b:1"
    assert {"ROSE_X", "PYTHONPATH", "LD_PRELOAD", "OMP_NUM_THREADS", "OMPI_MCA_pml"} <= set(exported)
    assert "SECRET" not in exported


@pytest.mark.parametrize(
    ("ranks", "hosts", "most"),
    [(4, (), 4), (4, ("a", "b"), 2), (5, ("a", "b"), 3), (4, ("a:3", "b:1"), 3), (2, ("a:8", "b:8"), 2)],
)
def test_threads_share_the_cores_of_a_host(ranks: int, hosts: tuple[str, ...], most: int) -> None:
    launch = Launch(ranks, hosts, ())
    assert launch.ranks_per_host == most
    threads = max(1, len(os.sched_getaffinity(0)) // most)
    assert launch.environment({})["OMP_NUM_THREADS"] == str(threads)
    assert launch.environment({"OMP_NUM_THREADS": "9"})["OMP_NUM_THREADS"] == "9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0", "--", "doctor"), "-n"),
        (("-n", "2"), "ROSE_COMMAND"),
        (("-n", "2", "--hosts", "a:0", "--", "doctor"), "NAME:RANKS"),
        (("-n", "2", "--hosts", "a b", "--", "doctor"), "NAME:RANKS"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = rose("launch", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
