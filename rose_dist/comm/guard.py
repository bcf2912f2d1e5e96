"""The rank's side of its guard, `guard_process`."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).with_name("guard_process.py")


class Guard:
    """Starts the process. If that is killed, the rank goes on without, until the other guards have noticed."""

    def __init__(self) -> None:
        progress = os.memfd_create("progress")
        os.truncate(progress, 8)
        self._progress = mmap.mmap(progress, 8)
        self._signs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT), *map(str, (os.getpid(), os.getppid(), progress))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[progress],
            start_new_session=True,  # signals to the rank's group are not for the guard
        )
        os.close(progress)

    def limit(self, seconds: float, message: str) -> None:
        """After so long, write `message` to standard error and end the job; without a message, kill this process.
        Replaces an earlier limit.
        """
        self._tell("limit", seconds=seconds, message=message)

    def no_limit(self) -> None:
        self._tell("limit", seconds=None)

    def stall_limit(self, seconds: float | None) -> None:
        """End the job when `progress` is not called for so long."""
        self._tell("stall", seconds=seconds)

    def progress(self) -> None:
        """This rank gets on. Costs less than a microsecond."""
        self._signs += 1
        self._progress[:] = self._signs.to_bytes(8, "little")

    def stage(self, who: str) -> None:
        """`who`: this rank and what it does now, the beginning of messages."""
        self._tell("stage", who=who)

    def listen(self, host: str, token: str) -> str:
        """On rank 0: the address to which the other ranks' guards connect."""
        self._tell("listen", host=host, token=token)
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def connect(self, address: str, token: str, rank: int, hub: str) -> None:
        """On other ranks: `listen`'s answer. `hub` names rank 0 in messages."""
        self._tell("connect", address=address, token=token, rank=rank, hub=hub)

    def frontend(self, process: int) -> None:
        """A process that gets SIGUSR1, and time to tell its clients, before a failure ends this rank."""
        self._tell("frontend", process=process)

    def spoken(self) -> None:
        """This rank has said why it ends the job: no guard needs to."""
        self._tell("spoken")

    def close(self) -> None:
        """This rank leaves in order."""
        self._tell("leave")
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _tell(self, order: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps({"order": order, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
