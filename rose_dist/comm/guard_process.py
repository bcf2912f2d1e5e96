"""The guard: a small process beside each rank that ends it, and with it the job, when something goes wrong.

A thread can't do that: a stopped rank runs none, and MPI's start-up holds the interpreter lock while it waits
for other ranks. The guard is run as a script, without site packages or a path to this one: all of it is in this file.
Its standard input is a pipe from the rank, which ends when the rank does. What it watches:

- the limit that the rank set itself for a stage, or for the time between two signs of progress;
- whether the rank, or its frontend, is stopped, as by SIGSTOP;
- whether the rank ended without having said so, or its launcher did;
- the other guards. Each has a connection to rank 0's; both ends send a beat a second. Silence means a host that is gone
  or a network that is cut, since a guard whose rank dies says so.

What a guard finds it tells rank 0's guard. That one writes the first such message, tells all others, lets the frontend
tell its clients, and kills rank 0. The launcher then ends the other ranks; or else their guards do, a second later.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from typing import Any

TICK = 0.5
BEAT = 1.0
STOPPED = 5.0
"""How long a process may be stopped."""
SILENT = 10.0
"""How long nothing may be heard from another guard. After a break TCP sends again at 3.0, 6.2 and 12.6 s."""
LAUNCHER = 6.0
"""What mpirun gets to notice as well that a host is gone (`mpi_environment`). If a rank ends before that, it tells the
daemon there to end the others, and waits for the answer for a quarter of an hour."""
SUSPENDED = 3.0
"""A guard that did not run for so long was suspended itself, perhaps with its rank: that says nothing of others."""
FRONTEND = 2.0
"""What a frontend gets to tell its clients."""
TURN = 0.7
"""Guards that lose rank 0's speak one after another: mostly the first one's word is the end of the job."""


class Link:
    """A connection to another guard; lines of JSON go over it."""

    def __init__(self, connection: socket.socket, who: str = "") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._pending = b""
        self.heard = time.monotonic()
        self.who = who
        """The rank at the other end and its stage, for messages; empty until the link has shown the token."""

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def send(self, **message: object) -> None:
        with contextlib.suppress(OSError):  # full or broken: the silence will tell
            self._connection.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """None: the other end has closed it."""
        try:
            data = self._connection.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Guard:
    """The loop. An order of the rank is carried out by the method `on_` + its name."""

    def __init__(self, rank_process: int, launcher: int, progress: int) -> None:
        """
        launcher: the rank's parent, as the rank says: it may be gone by now.
        progress: a file of 8 bytes that the rank changes whenever it gets on.
        """
        self.process = rank_process
        self.launcher = launcher
        self.progress = mmap.mmap(progress, 8, prot=mmap.PROT_READ)
        self.frontends: list[int] = []
        self.rank = 0
        self.who = f"process {rank_process}"
        self.token = ""
        self.listener: socket.socket | None = None
        self.links: list[Link] = []
        """On rank 0 to every other guard, elsewhere to rank 0's."""
        self.limit: tuple[float, str] | None = None
        self.stall: float | None = None
        self.moved = (0.0, b"")
        self.stopped_since: dict[int, float] = {}
        self.turn: tuple[float, str, float] | None = None
        self.shared_memory: set[str] = set()
        """MPI's files, which stay when a rank does not leave in order."""
        self.rank_alive = True
        self.aborted = False
        """The rank, or another, ends the job itself."""
        self.leaving = self.spoken = self.done = False
        self.end_at: float | None = None
        self.pending = b""
        self.ticked = self.beaten = time.monotonic()

    def on_limit(self, seconds: float | None, message: str = "") -> None:
        self.limit = None if seconds is None else (time.monotonic() + seconds, message)

    def on_stall(self, seconds: float | None) -> None:
        self.stall = seconds
        self.moved = (time.monotonic(), b"")

    def on_stage(self, who: str) -> None:
        self.who = who
        self.send(beat=who)
        self.shared_memory = shared_memory(self.process)

    def on_listen(self, host: str, token: str) -> None:
        self.token = token
        self.listener = socket.create_server((host, 0), backlog=4096)
        print(f"{host}:{self.listener.getsockname()[1]}", flush=True)

    def on_connect(self, address: str, token: str, rank: int, hub: str) -> None:
        host, _, port = address.rpartition(":")
        self.rank = rank
        try:
            self.links = [Link(socket.create_connection((host, int(port)), timeout=10), hub)]
        except OSError as error:
            self.fail(f"{self.who}: can't reach rank 0's guard at {address}: {error}")
        self.send(token=token, beat=self.who)

    def on_frontend(self, process: int) -> None:
        self.frontends.append(process)

    def on_spoken(self) -> None:
        """The rank ends the job itself, and has said why."""
        self.spoken = self.aborted = True
        self.send(spoken=True)
        self.end()

    def on_leave(self) -> None:
        self.leaving = True

    def run(self) -> None:
        while not self.done:
            waiting: list[Any] = [*([0] if self.rank_alive else []), *self.links]
            ready, _, _ = select.select([*waiting, *([self.listener] if self.listener else [])], [], [], TICK)
            for one in ready:
                if one == 0:
                    self.read_orders()
                elif isinstance(one, socket.socket):
                    self.links.append(Link(one.accept()[0]))
                elif one in self.links:
                    self.read_link(one)
            self.tick(time.monotonic())

    def read_orders(self) -> None:
        received = os.read(0, 65536)
        if not received:
            self.rank_alive = False
            if self.leaving:
                self.send(leave=True)
                self.done = True
            else:
                self.fail_gone()
            return
        *orders, self.pending = (self.pending + received).split(b"\n")
        for order in map(json.loads, orders):
            getattr(self, f"on_{order.pop('order')}")(**order)

    def read_link(self, link: Link) -> None:
        messages = link.receive()
        if messages is None:
            self.lose(link, "its guard is gone")
        for message in messages or ():
            if not link.who and message.get("token") != self.token:
                self.drop(link)
                return
            link.who = message.get("beat") or link.who
            if "failed" in message:
                self.fail(message["failed"], message["stacks"])
            if "spoken" in message:
                self.spoken = self.aborted = True
                self.end()
            if "end" in message:
                self.end(message["end"])
            if "leave" in message:
                self.drop(link)
                return

    def lose(self, link: Link, why: str, wait: float = 0.0) -> None:
        self.drop(link)
        if not link.who or self.leaving or self.end_at is not None:
            return
        if state_of(self.process)[0] in "ZX":
            self.fail_gone()  # the launcher was faster than the kernel, which has its memory to give back first
        elif self.listener is not None:
            self.fail(f"{link.who}: {why}", wait=wait)
        else:
            turn = time.monotonic() + TURN * min(self.rank - 1, 3)
            self.turn = (turn, f"{link.who}: {why}, says {self.who}", wait)
            if wait:
                end_job()

    def drop(self, link: Link) -> None:
        self.links.remove(link)
        link.close()

    def send(self, **message: object) -> None:
        for link in self.links:
            link.send(**message)

    def tick(self, now: float) -> None:
        if now - self.ticked > SUSPENDED:
            self.stopped_since.clear()
            self.moved = (now, b"")
            for link in self.links:
                link.heard = now
        self.ticked = now
        if now - self.beaten >= BEAT:
            self.beaten = now
            self.send(beat=self.who)
        if self.end_at is not None:
            if now >= self.end_at or (not self.rank_alive and not self.frontends):
                self.finish()
            return
        if self.turn is not None and now >= self.turn[0]:
            self.fail(self.turn[1], wait=self.turn[2])
        for link in [link for link in self.links if now - link.heard > SILENT]:
            self.lose(link, f"nothing heard for {SILENT:g} s; its host is gone, or the network to it", LAUNCHER)
        if self.rank_alive:
            self.look_at_rank(now)

    def look_at_rank(self, now: float) -> None:
        if self.limit is not None and now >= self.limit[0]:
            if self.limit[1]:
                self.fail(self.limit[1])
            else:
                self.finish()
        if self.stall is not None:
            if self.progress[:] != self.moved[1]:
                self.moved = (now, self.progress[:])
            elif now - self.moved[0] > self.stall:
                self.fail(f"{self.who}: no progress for {self.stall:g} s", stacks=True)
        if state_of(self.process)[1] not in (self.launcher, 0):
            self.fail(f"{self.who}: its launcher is gone")
        for process in (self.process, *self.frontends):
            what = "" if process == self.process else "its frontend is "
            if state_of(process)[0] != "T":
                self.stopped_since.pop(process, None)
            elif now - self.stopped_since.setdefault(process, now) > STOPPED:
                self.fail(f"{self.who}: {what}stopped for {STOPPED:g} s, as by SIGSTOP")

    def fail_gone(self) -> None:
        self.fail(f"{self.who}: the process is gone; it was killed, or crashed")

    def fail(self, message: str, stacks: bool = False, wait: float = 0.0) -> None:
        """Something is wrong with a rank; `message` says with which and what. `stacks`: show what every rank does.
        `wait`: seconds before this rank is killed, besides those that its frontend gets.
        """
        if self.end_at is not None:
            return
        if self.links and self.listener is None:
            self.send(failed=message, stacks=stacks)
        elif not self.spoken:
            self.spoken = True
            with contextlib.suppress(OSError):
                os.write(2, message.encode() + b"\n")
        self.end(stacks, wait)

    def end(self, stacks: bool = False, wait: float = 0.0) -> None:
        if self.end_at is not None:
            return
        if self.listener is not None:
            self.send(end=stacks)
        if stacks:
            send_signal(self.process, signal.SIGUSR2)
        for frontend in self.frontends:
            send_signal(frontend, signal.SIGUSR1)
        if self.listener is None and self.links:
            wait += FRONTEND + 1
        else:
            wait += FRONTEND if self.frontends or self.aborted else 0.2
        self.end_at = time.monotonic() + wait

    def finish(self) -> None:
        if self.rank_alive:
            send_signal(self.process, signal.SIGKILL)
        for frontend in self.frontends:
            send_signal(frontend, signal.SIGKILL)
        for path in self.shared_memory:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.done = True


def end_job() -> None:
    """Rank 0's host is gone, and with it what would tell the cluster's manager that the job is at its end: do that from
    here, by the command that the job's script has left for it.
    """
    words = os.environ.get("ROSE_END_JOB", "").split()
    if words:
        with contextlib.suppress(OSError):  # a container may lack it
            os.posix_spawnp(words[0], words, os.environ)


def state_of(process: int) -> tuple[str, int]:
    """Its state, as `T` for stopped, and its parent; see proc(5)."""
    try:
        with open(f"/proc/{process}/stat") as stat:
            state, parent = stat.read().rpartition(")")[2].split()[:2]
            return state, int(parent)
    except OSError:
        return "X", 0


def shared_memory(process: int) -> set[str]:
    """Files in /dev/shm that it has mapped."""
    try:
        with open(f"/proc/{process}/maps") as maps:
            fields = [line.split(maxsplit=5) for line in maps]
    except OSError:
        return set()
    return {field[5].rstrip("\n") for field in fields if len(field) == 6 and field[5].startswith("/dev/shm/")}


def send_signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


if __name__ == "__main__":
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(caught, signal.SIG_IGN)  # Slurm sends them to every process; the guard ends with its rank
    Guard(*map(int, sys.argv[1:])).run()
