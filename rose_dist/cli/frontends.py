"""The HTTP processes beside rank 0: their sockets, their start, their end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence

import msgspec

from rose_dist.comm.addresses import outward_address
from rose_dist.errors import RoseError
from rose_dist.frontend.config import ENGINE_FAILED, FRONTEND_SIGNALS, FrontendConfig, LaunchSpec, ReplicaNews
from rose_dist.frontend.sockets import listening_sockets

logger = logging.getLogger(__name__)


_TELL_SECONDS = 3.0
"""What frontends get to tell their clients that the engine has failed."""


class FrontendError(RoseError):
    """A frontend could not start, or ended by itself."""


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """A listening TCP socket a process, all on one port.

    Raises:
        FrontendError: the port is in use, or not this user's to take.
    """
    try:
        return listening_sockets(host, port, count)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FrontendError(
                f"port {port} on {host} is in use by another process; choose another with --port, or 0 for a free one"
            ) from None
        raise FrontendError(
            f"can't listen on {host}:{port}: {error.strerror or error}; --host takes an IPv4 address of this host or a "
            "name that leads to one, 0.0.0.0 is all of them"
        ) from None


class Frontends:
    """The HTTP side, in processes of its own so that it does not share the engine's interpreter."""

    def __init__(
        self, config: FrontendConfig, listeners: Sequence[socket.socket], leaders: Sequence[str] = (), replicas: int = 0
    ) -> None:
        """`leaders` or `replicas`, as in `LaunchSpec`."""
        self._shared = tempfile.TemporaryDirectory(prefix="rose-frontends-") if len(listeners) > 1 else None
        host, port = listeners[0].getsockname()[:2]
        logger.info("listening on http://%s:%d; /health says when the model is loaded", host, port)
        self._address = host, port
        spec = LaunchSpec(
            config=config,
            leaders=list(leaders),
            replicas=replicas,
            listen_fd=-1,
            parent_pid=os.getpid(),
            shared=None if self._shared is None else self._shared.name,
        )
        self._processes = [self._start(spec, listener) for listener in listeners]
        self._draining = False

    def _start(self, spec: LaunchSpec, listener: socket.socket) -> subprocess.Popen[bytes]:
        spec = msgspec.structs.replace(spec, listen_fd=listener.fileno())
        arguments = [sys.executable, "-m", "rose_dist.frontend", msgspec.json.encode(spec).decode()]
        with listener, _blocked(FRONTEND_SIGNALS):
            # A session of its own: mpirun hands signals to a rank's whole process group, and the rank starts the drain.
            return subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE if spec.replicas else subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        """As other hosts reach it."""
        host, port = self._address
        return f"http://{outward_address() if host == '0.0.0.0' else host}:{port}"

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, news: ReplicaNews) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `check` will say that it has ended
                process.stdin.write(msgspec.json.encode(news) + b"\n")
                process.stdin.flush()

    def drain(self) -> None:
        """Let them finish what runs and then stop the engine."""
        self._draining = True
        for process in self._processes:
            process.send_signal(signal.SIGTERM)

    def check(self) -> None:
        """Raises `FrontendError` if one has ended on its own."""
        for process in self._processes:
            code = process.poll()
            if code == ENGINE_FAILED:
                continue  # the guard, which told it, has told why and is about to end this rank
            if code is not None and not (self._draining and code == 0):
                raise FrontendError(f"the frontend process ended by itself with exit code {code}; see its log above")

    @property
    def ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def fail(self) -> None:
        """Have those that still run tell their clients that the engine has failed, and end them."""
        for number in (signal.SIGUSR1, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TELL_SECONDS)
        self._cleanup()

    def wait(self) -> None:
        """For their end, after a drain."""
        for process in self._processes:
            if code := process.wait():
                raise FrontendError(f"the frontend process ended with exit code {code}; see its log above")
        self._cleanup()

    def _cleanup(self) -> None:
        """After their end: what they shared."""
        if self._shared is not None:
            self._shared.cleanup()


@contextlib.contextmanager
def _blocked(signals: Collection[signal.Signals]) -> Iterator[None]:
    """A process that is started in the block begins with these signals waiting, until it can handle them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
