"""A small process beside each rank that ends it when a stage takes too long.

A thread can't do that: MPI's start-up holds the interpreter lock while it waits for other ranks. The guard is run as a
script, with the standard library only; its standard input is a pipe from the rank, which ends when the rank does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time


class StageGuard:
    """The rank's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,  # signals to the rank's group are not for the guard
        )

    def arm(self, limit: float, message: str) -> None:
        """After `limit` seconds, write `message` to standard error and kill this process; replaces an earlier limit."""
        self._tell({"limit": limit, "message": message})

    def disarm(self) -> None:
        self._tell({"limit": None})

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guard was killed: the rank goes on without
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()


def watch(rank_process: int) -> None:
    """The guard's side: obey orders until the pipe ends."""
    deadline, message, pending = None, "", b""
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if select.select([0], [], [], wait)[0]:
            received = os.read(0, 65536)
            if not received:
                return
            *orders, pending = (pending + received).split(b"\n")
            for order in map(json.loads, orders):
                deadline = None if order["limit"] is None else time.monotonic() + order["limit"]
                message = order.get("message", "")
        elif deadline is not None and time.monotonic() >= deadline:
            if message:
                os.write(2, message.encode() + b"\n")
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank_process, signal.SIGKILL)
            return


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to every process; the guard ends with its rank
    watch(int(sys.argv[1]))
