"""The job's ranks: how they find each other, share out into groups, and end together."""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from rose_dist.comm.addresses import reachable_address
from rose_dist.comm.affinity import settle
from rose_dist.comm.agreement import check_agreement, code_version
from rose_dist.comm.group import Group
from rose_dist.comm.guard import Guard
from rose_dist.comm.launcher import check_launch, check_size, expected_rank, is_launched
from rose_dist.comm.layout import Layout, LayoutError, Place
from rose_dist.comm.logs import configure_logging
from rose_dist.comm.mpi_environment import mpi_environment
from rose_dist.comm.topology import Topology
from rose_dist.errors import RoseError

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

HEAD_START_SECONDS = 0.5
"""From a rank's start of MPI to its first message. Open MPI 5.0.11 ends its start behind a barrier, but prepares the
world's communicator after it: a message that comes before crashes the receiver (mca_pml_ob1_recv_frag_callback_match).
"""
_TURN_SECONDS = 0.5
"""How much later another rank than 0 speaks of an error that it shares with rank 0."""


@dataclass(frozen=True)
class Groups:
    """This rank's groups under one layout."""

    layout: Layout
    place: Place
    tp: Group
    """The ranks with the same tokens."""
    ep: Group
    """The ranks that hold the other shards of the experts."""
    lockstep: Group
    """The ranks that must run the same number of steps."""
    topology: Topology
    """Of `ep`."""

    def free(self) -> None:
        """Give the communicators back; collective over the world."""
        for group in (self.tp, self.ep, self.lockstep):
            group.free()


class World:
    """All ranks of the job. To be used in a `with` block: leaving it in order ends MPI in order, an exception out of it
    on any rank ends the whole job at once with a non-zero exit code.
    """

    def __init__(self, communicator: MPI.Comm | None, guard: Guard | None, limit: float) -> None:
        """`join` makes one."""
        self.group = Group(communicator)
        self.rank = self.group.rank
        self.size = self.group.size
        self.host = socket.gethostname()
        self.hosts: list[str] = [self.host]
        """By rank."""
        self._communicator = communicator
        self._guard = guard
        self._limit = limit
        self._stage = "start"

    @classmethod
    def join(cls, timeout: float = 60.0, log_dir: Path | None = None, log_level: int = logging.INFO) -> World:
        """Meet the other ranks; without mpirun or srun, a world of one. No stage of start-up may take longer than
        `timeout` seconds: it ends the job with a message that names rank, host and stage.

        Configures logging, and has an uncaught exception on this rank end the job.
        """
        check_launch(os.environ)
        if not is_launched(os.environ):
            world = cls(None, None, timeout)
            configure_logging(0, world.host, log_dir, log_level)
            return world
        os.environ.update(settle(os.environ))
        guard = Guard()
        expected = expected_rank(os.environ)
        host = socket.gethostname()
        guard.stage(describe(expected, host, "start MPI"))
        guard.limit(timeout, describe(expected, host, "start MPI", f"took more than {timeout:g} s"))
        started = time.monotonic()
        world = cls(_start_mpi(), guard, timeout)
        elapsed = time.monotonic() - started
        world._hook_exceptions()
        configure_logging(world.rank, world.host, log_dir, log_level)
        with world.stage("meet the other ranks", timeout):
            check_size(os.environ, world.size)
            if world.size > 1:
                time.sleep(HEAD_START_SECONDS)
            world.hosts = world.group.all_gather_objects(world.host)
            world._link_guards(guard)
        world.require_agreement(code_version())
        hosts = sorted(set(world.hosts))
        logger.info("%d ranks on %d hosts (%s), MPI up in %.2f s", world.size, len(hosts), ", ".join(hosts), elapsed)
        return world

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its host."""
        return self.hosts[: self.rank].count(self.host)

    @property
    def local_size(self) -> int:
        return self.hosts.count(self.host)

    def _link_guards(self, guard: Guard) -> None:
        """From here on a rank that dies, stops or can't be reached ends the job."""
        faulthandler.register(signal.SIGUSR2)  # how the guard asks for this rank's stack
        if self.size == 1:
            return
        token = secrets.token_hex(16)
        address = guard.listen(reachable_address(self.hosts), token) if self.rank == 0 else ""
        address, token = self.group.all_gather_objects((address, token))[0]
        if self.rank != 0:
            guard.connect(address, token, self.rank, describe("0", self.hosts[0]))

    def require_agreement(self, fields: Mapping[str, str]) -> None:
        """Collective. Raises `AgreementError`, on every rank, if a value is not the same on all."""
        with self.stage("compare code and settings", self._limit):
            check_agreement(self.group.all_gather_objects(dict(fields)), self.hosts)

    @contextmanager
    def stage(self, name: str, limit: float | None = None, stall: float | None = None) -> Iterator[None]:
        """Name what this rank does now, for messages. More than `limit` seconds end the job, and more than `stall`
        seconds without a call of `progress`.
        """
        before, self._stage = self._stage, name
        started = time.monotonic()
        if self._guard is not None:
            self._guard.stage(self._say())
            if limit is not None:
                self._guard.limit(limit, self._say(f"took more than {limit:g} s"))
            if stall is not None:
                self._guard.stall_limit(stall)
        yield
        # Not in a `finally`: after an exception the stage is still the one to name.
        logger.info("%s: done in %.2f s", name, time.monotonic() - started)
        self._stage = before
        if self._guard is not None:
            if limit is not None:
                self._guard.no_limit()
            if stall is not None:
                self._guard.stall_limit(None)
            self._guard.stage(self._say())

    def progress(self) -> None:
        """This rank gets on with a stage that has a `stall` limit."""
        if self._guard is not None:
            self._guard.progress()

    def warn_on_failure(self, process: int) -> None:
        """If the job fails, `process` gets SIGUSR1 and two seconds before this rank ends."""
        if self._guard is not None:
            self._guard.frontend(process)

    def groups(self, layout: Layout, force_remote: int | None = None) -> Groups:
        """This rank's groups. Collective over the world, with the same layout. `force_remote`: see `Topology.of`."""
        if layout.world != self.size:
            raise LayoutError(f"{layout} is for {layout.world} ranks, the world has {self.size}")
        place = layout.at(self.rank)
        with self.stage(f"make groups for {layout}", self._limit):
            machines = self.group.all_gather_objects(machine_id())
            members = place.ep_members
            return Groups(
                layout=layout,
                place=place,
                tp=self._split(place.tp_members),
                ep=self._split(place.ep_members),
                lockstep=self._split(place.lockstep_members),
                topology=Topology.of([machines[rank] for rank in members], members.index(self.rank), force_remote),
            )

    def _split(self, members: range) -> Group:
        if self._communicator is None:
            return Group(None)
        # Members are in rank order, so that the first one's rank names the group.
        communicator = self._communicator.Split(members[0], self.rank)
        assert communicator.size == len(members)
        return Group(communicator)

    def abort(self, message: str) -> NoReturn:
        """End the job on all ranks with exit code 1 and one message that names this rank, its host and its stage."""
        with suppress(OSError):  # nowhere to write to, as on a full disk
            print(self._say(message), file=sys.stderr, flush=True)
        self._end()

    def _say(self, message: str = "") -> str:
        return describe(str(self.rank), self.host, self._stage, message)

    def _end(self) -> NoReturn:
        logging.shutdown()
        with suppress(OSError):
            sys.stdout.flush()
        if self._guard is not None:
            self._guard.spoken()  # and let it kill this rank if MPI can't end the job
        if self._communicator is not None:
            self._communicator.Abort(1)
        os._exit(1)

    def _hook_exceptions(self) -> None:
        def on_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            self._fail(value)

        def on_thread_exception(arguments: threading.ExceptHookArgs) -> None:
            if arguments.exc_value is not None:
                self._fail(arguments.exc_value)

        sys.excepthook = on_exception
        threading.excepthook = on_thread_exception

    def _fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, RoseError):
            # A user's mistake is mostly seen by all ranks at once: let the first one tell it, alone.
            time.sleep(_TURN_SECONDS * min(self.rank, 2))
            self.abort(f"error: {error}")
        with suppress(OSError):
            traceback.print_exception(error)
        self.abort(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Leave MPI in order; waits for all ranks. The world can't be used afterwards."""
        if self._communicator is None:
            return
        from mpi4py import MPI  # noqa: PLC0415  only where a communicator exists

        with self.stage("leave MPI", self._limit):
            MPI.Finalize()
        self._communicator = None
        if self._guard is not None:
            self._guard.close()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        elif self.size > 1:
            self._fail(error)


def machine_id() -> str:
    """The same for ranks whose GPUs may share an NVLink domain: those of one host, in one container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def describe(rank: str, host: str, stage: str = "", message: str = "") -> str:
    who = f"[{rank}@{host}] rank {rank}" + (f", stage '{stage}'" if stage else "")
    return f"{who}: {message}" if message else who


def _start_mpi() -> MPI.Comm:
    os.environ.update(mpi_environment(os.environ))  # srun starts ranks without it
    import mpi4py  # noqa: PLC0415  a world of one needs no MPI

    mpi4py.rc.finalize = False  # else a rank that fails would wait at exit for the others
    mpi4py.rc.thread_level = "multiple"
    from mpi4py import MPI  # noqa: PLC0415

    return MPI.COMM_WORLD
