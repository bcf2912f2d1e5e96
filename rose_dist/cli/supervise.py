"""Running mpirun so that its ranks can finish what they do when they are asked to stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_KILL_AFTER = 10.0
"""Seconds that mpirun gets to end its ranks once it is told to; it needs half a second."""
HOST_LOST = "PRTE has lost communication with a remote daemon"
"""What mpirun says when a host is gone. It ends the job then, with exit code 0."""
_HOST_LOST_CODE = 1


def supervise(arguments: Sequence[str], environment: Mapping[str, str], drain_timeout: float) -> int:
    """Run mpirun to its end and return its exit code; 128 + n if signal n ended it.

    Open MPI 5's mpirun answers SIGTERM and SIGINT by killing every rank within half a second, and no option changes
    that. But it hands SIGUSR1 on to all ranks of all hosts, and waits. So the first stop signal goes to the ranks as
    SIGUSR1, which they take as `drain and exit`; after `drain_timeout` seconds, or at the next stop signal, mpirun gets
    SIGTERM. It runs in a session of its own, so that a terminal's Ctrl-C comes here alone, and dies if this process
    does.
    """
    with session_folder(environment) as own:
        return _supervise(arguments, own, drain_timeout)


@contextlib.contextmanager
def session_folder(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """`environment` with what gives one mpirun a folder of its own for its session, as long as the block.

    Otherwise it is named by process id, and one that a killed mpirun left behind keeps a later one with that id from
    starting: "The PMIx server's listener thread failed to start". A base for all hosts that the user has set stays:
    mpirun refuses both.
    """
    if "PRTE_MCA_prte_tmpdir_base" in environment:
        yield dict(environment)
        return
    with tempfile.TemporaryDirectory(prefix="rose-mpirun-", ignore_cleanup_errors=True) as folder:
        yield {**environment, "PRTE_MCA_prte_local_tmpdir_base": folder}


def _supervise(arguments: Sequence[str], environment: Mapping[str, str], drain_timeout: float) -> int:
    child = subprocess.Popen(
        arguments,
        env=dict(environment),
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509  this process has one thread
    )
    copy = _ErrorCopy(child)
    escalation = iter((signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL))

    def stop(number: int, frame: FrameType | None) -> None:
        chosen = next(escalation, signal.SIGKILL)
        if chosen == signal.SIGUSR1:
            message = f"rose launch: stopping, at most {drain_timeout:g} s; once more to stop at once\n"
            with contextlib.suppress(OSError):
                os.write(2, message.encode())  # a handler may interrupt another one's write: no buffered stream
        child.send_signal(chosen)
        signal.setitimer(signal.ITIMER_REAL, max(drain_timeout, 0.001) if chosen == signal.SIGUSR1 else _KILL_AFTER)

    previous = {number: signal.signal(number, stop) for number in (*_STOP_SIGNALS, signal.SIGALRM)}
    try:
        code = child.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if code == 0 and copy.host_lost():
        return _HOST_LOST_CODE
    return code if code >= 0 else 128 - code


class _ErrorCopy:
    """Passes mpirun's standard error on to this process', and reads it meanwhile."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._lost = False
        self._thread = threading.Thread(target=self._copy, args=(child,), daemon=True)
        self._thread.start()

    def _copy(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None
        for line in child.stderr:
            self._lost = self._lost or HOST_LOST.encode() in line
            with contextlib.suppress(OSError):  # nowhere to write to, as on a full disk
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def host_lost(self) -> bool:
        """After mpirun's end."""
        self._thread.join(1.0)
        return self._lost


def die_with_parent(parent: int) -> Callable[[], None]:
    """What mpirun's process does before it becomes mpirun: ask for SIGTERM when its parent dies (prctl(2)).

    Its standard error goes nowhere then; it must not die of that before it has ended its ranks.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
