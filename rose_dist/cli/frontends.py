"""The HTTP processes beside rank 0: their sockets, their start, their end."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import msgspec

from rose_dist.errors import RoseError
from rose_dist.frontend.config import ENGINE_FAILED, FrontendConfig, LaunchSpec
from rose_dist.frontend.sockets import listening_sockets

logger = logging.getLogger(__name__)


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
        raise FrontendError(f"can't listen on {host}:{port}: {error.strerror or error}") from None


class Frontends:
    """The HTTP side, in processes of its own so that it does not share the engine's interpreter."""

    def __init__(self, config: FrontendConfig, leaders: list[str], listeners: Sequence[socket.socket]) -> None:
        self._shared = tempfile.TemporaryDirectory(prefix="rose-frontends-") if len(listeners) > 1 else None
        host, self.port = listeners[0].getsockname()[:2]
        logger.info("listening on http://%s:%d; /health says when the model is loaded", host, self.port)
        self._processes = [self._start(config, leaders, listener) for listener in listeners]
        self._draining = False

    def _start(self, config: FrontendConfig, leaders: list[str], listener: socket.socket) -> subprocess.Popen[bytes]:
        spec = LaunchSpec(
            config=config,
            leaders=leaders,
            listen_fd=listener.fileno(),
            parent_pid=os.getpid(),
            shared=None if self._shared is None else self._shared.name,
        )
        arguments = [sys.executable, "-m", "rose_dist.frontend", msgspec.json.encode(spec).decode()]
        with listener:
            # A session of its own: mpirun hands signals to a rank's whole process group, and the rank starts the drain.
            return subprocess.Popen(arguments, pass_fds=[listener.fileno()], start_new_session=True)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

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

    def wait(self) -> None:
        """For their end, after a drain."""
        for process in self._processes:
            if code := process.wait():
                raise FrontendError(f"the frontend process ended with exit code {code}; see its log above")
        if self._shared is not None:
            self._shared.cleanup()
