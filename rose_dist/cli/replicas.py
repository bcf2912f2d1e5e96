"""Replicas: jobs that share nothing but the front door. Each can be lost, and started again, without the others.

`rose launch` is their supervisor. It starts the frontends and, for each replica, a launcher (mpirun or srun). A
replica's rank 0 says through the launcher's standard output where its leaders are; the supervisor passes that, and the
end of a launcher, on to the frontends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rose_dist.cli.announcement import announced
from rose_dist.cli.endpoint_file import EndpointFile
from rose_dist.cli.frontends import FrontendError, Frontends
from rose_dist.cli.supervise import HOST_LOST, die_with_parent, session_folder
from rose_dist.comm.guard_process import STOPPED, state_of
from rose_dist.errors import RoseError
from rose_dist.frontend.config import ReplicaNews

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_LONGEST_PAUSE = 60.0
"""Seconds before another start of a replica that fails again and again; the first pause is of one second."""
_LEAVE_SECONDS = 10.0
"""What a replica gets to end in order once the frontends have told it to."""
_KILL_AFTER = 10.0
"""What its launcher gets to end the ranks."""
_PATIENCE_SECONDS = 20.0
"""How long a launcher may go on after a guard has said why the job ends."""
_LAST_WORDS_SECONDS = 1.0
"""What remains to be read of what its launcher wrote, once that has ended."""


class ReplicaError(RoseError):
    """No replica can be started."""


class Replica:
    """One replica's job, started again whenever it ends."""

    def __init__(
        self,
        number: int,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        tell: Callable[[ReplicaNews], None],
    ) -> None:
        """
        Args:
            command: the launcher's command line, by how many starts there were before.
            tell: what the frontends must know.
        """
        self.number = number
        self.ready = False
        self.failed_starts = 0
        """In a row."""
        self.reason = ""
        """Why it ended last."""
        self._command = command
        self._environment = environment
        self._tell = tell
        self._said_at: float | None = None
        """When a guard told the reason."""
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Until `stop`."""
        starts = 0
        while not self._stopping.is_set():
            await self._run_once(self._command(starts))
            starts += 1
            self.failed_starts = 0 if self.ready else self.failed_starts + 1
            self.ready = False
            if self._stopping.is_set():
                return
            logger.error("replica %d has ended: %s", self.number, self.reason)
            self._tell(ReplicaNews(number=self.number, reason=self.reason))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), min(2.0**self.failed_starts, _LONGEST_PAUSE))

    async def stop(self, *, drained: bool) -> None:
        """Do not start it again, and end what runs; in order where the frontends have `drained` and told it to."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        ended = asyncio.create_task(process.wait())
        for number, seconds in (
            (None, _LEAVE_SECONDS * (self.ready and drained)),
            (signal.SIGTERM, _KILL_AFTER),
            (signal.SIGKILL, 5),
        ):
            if number is not None and process.returncode is None:
                process.send_signal(number)
            if (await asyncio.wait([ended], timeout=seconds))[0]:
                return

    async def _run_once(self, command: Sequence[str]) -> None:
        self.reason, self._said_at = "", None
        with session_folder(self._environment) as own:
            code = await self._launch(command, own)
        self.reason = self.reason or f"its launcher ended with exit code {code}"

    async def _launch(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """The launcher's exit code, after its end."""
        output, error = _Lines(self._take_output), _Lines(self._take_error)
        process = self._process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=await output.open(),
            stderr=await error.open(),
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
        for lines in (output, error):
            lines.close_writer()
        code = await self._end_of(process)
        # Not for ever: a process of another host's daemon may still hold an end.
        await asyncio.wait([output.ended, error.ended], timeout=_LAST_WORDS_SECONDS)
        for lines in (output, error):
            lines.close()
        return code

    async def _end_of(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code. A launcher may wait very long for ranks on a host that is gone."""
        ended = asyncio.create_task(process.wait())
        while not (await asyncio.wait([ended], timeout=_LOOK_SECONDS))[0]:
            if self._said_at is not None and time.monotonic() - self._said_at > _PATIENCE_SECONDS:
                process.kill()
        return ended.result()

    def _take_output(self, line: str) -> None:
        if (leaders := announced(line)) is None:
            self._print(line, sys.stdout)
            return
        self.ready = True
        self.failed_starts = 0
        logger.info("replica %d is ready", self.number)
        self._tell(ReplicaNews(number=self.number, leaders=leaders))

    def _take_error(self, line: str) -> None:
        found = re.match(r"(?:\d+: )?(\[\d+@\S+\] rank .*)", line)
        if found is not None and self._said_at is None:
            self.reason, self._said_at = found[1], time.monotonic()
        elif HOST_LOST in line and not self.reason:
            self.reason = "its host is gone, or the network to it, says mpirun"
        self._print(line, sys.stderr)

    def _print(self, line: str, target: TextIO) -> None:
        with contextlib.suppress(OSError):  # nowhere to write to, as on a full disk
            print(f"[replica {self.number}] {line}", file=target, flush=True)


class _Lines(asyncio.Protocol):
    """A pipe that is read by lines."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._pending = b""
        self.ended = asyncio.get_running_loop().create_future()

    async def open(self) -> int:
        """The end to write to."""
        reader, self._writer = os.pipe()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(reader, "rb"))
        return self._writer

    def close_writer(self) -> None:
        """This process' copy of it."""
        os.close(self._writer)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def run_replicas(
    frontends: Frontends,
    replicas: Callable[[Callable[[ReplicaNews], None]], Sequence[Replica]],
    endpoint_file: Path | None,
    drain_timeout: float,
) -> None:
    """Until a stop signal and the frontends' drain, which may take `drain_timeout` seconds.

    Raises:
        FrontendError: a frontend ended by itself, or was stopped.
        ReplicaError: no replica can be started.
    """
    door = _FrontDoor(frontends, drain_timeout)
    endpoint = None if endpoint_file is None else EndpointFile(endpoint_file, frontends.url)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        loop.add_signal_handler(number, door.stop)
    jobs = replicas(frontends.tell)
    running = [asyncio.create_task(job.run()) for job in jobs]
    drained = False
    try:
        while not door.closed():
            if door.stopping and endpoint is not None:
                endpoint.remove()
            if all(job.failed_starts for job in jobs) and not door.stopping:
                raise ReplicaError(f"no replica can be started; replica 0: {jobs[0].reason}")
            await asyncio.sleep(_LOOK_SECONDS if not door.stopping else 0.05)
        drained = True
    finally:
        if endpoint is not None:
            endpoint.remove()
        frontends.fail()
        await asyncio.gather(*(job.stop(drained=drained) for job in jobs))
        await asyncio.gather(*running)


class _FrontDoor:
    """The frontends on their way from open to closed."""

    def __init__(self, frontends: Frontends, drain_timeout: float) -> None:
        self._frontends = frontends
        self._drain_timeout = drain_timeout
        self._deadline: float | None = None
        self._stopped_since: dict[int, float] = {}

    @property
    def stopping(self) -> bool:
        return self._deadline is not None

    def stop(self) -> None:
        """On a signal: drain; on a second one, a while later, the frontends give up what runs."""
        if self._deadline is None:
            print(
                f"rose launch: stopping, at most {self._drain_timeout:g} s; once more to stop at once", file=sys.stderr
            )
            self._deadline = time.monotonic() + self._drain_timeout
        self._frontends.drain()

    def closed(self) -> bool:
        """All have ended after `stop`.

        Raises:
            FrontendError: one ended by itself, is stopped, or takes too long.
        """
        self._frontends.check()
        now = time.monotonic()
        for process in self._frontends.pids:
            if state_of(process)[0] != "T":
                self._stopped_since.pop(process, None)
            elif now - self._stopped_since.setdefault(process, now) > STOPPED:
                raise FrontendError(f"the frontend process is stopped for {STOPPED:g} s, as by SIGSTOP")
        if self._deadline is not None and now > self._deadline + _KILL_AFTER:
            raise FrontendError(f"the frontend process has not ended {_KILL_AFTER:g} s after the drain's time limit")
        if self._deadline is None and self._frontends.ended:
            raise FrontendError("the frontend process ended by itself; see its log above")
        return self._frontends.ended
