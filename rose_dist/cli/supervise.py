"""Running mpirun so that its ranks can finish what they do when they are asked to stop."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_KILL_AFTER = 10.0
"""Seconds that mpirun gets to end its ranks once it is told to; it needs half a second."""


def supervise(arguments: Sequence[str], environment: Mapping[str, str], drain_timeout: float) -> int:
    """Run mpirun to its end and return its exit code; 128 + n if signal n ended it.

    Open MPI 5's mpirun answers SIGTERM and SIGINT by killing every rank within half a second, and no option changes
    that. But it hands SIGUSR1 on to all ranks of all hosts, and waits. So the first stop signal goes to the ranks as
    SIGUSR1, which they take as `drain and exit`; after `drain_timeout` seconds, or at the next stop signal, mpirun gets
    SIGTERM. It runs in a session of its own, so that a terminal's Ctrl-C comes here alone, and dies if this process
    does.
    """
    child = subprocess.Popen(
        arguments,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=_die_with_parent(os.getpid()),  # noqa: PLW1509  this process has one thread
    )
    escalation = iter((signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL))

    def stop(number: int, frame: FrameType | None) -> None:
        chosen = next(escalation, signal.SIGKILL)
        if chosen == signal.SIGUSR1:
            print(f"rose launch: stopping, at most {drain_timeout:g} s; once more to stop at once", file=sys.stderr)
        child.send_signal(chosen)
        signal.setitimer(signal.ITIMER_REAL, max(drain_timeout, 0.001) if chosen == signal.SIGUSR1 else _KILL_AFTER)

    previous = {number: signal.signal(number, stop) for number in (*_STOP_SIGNALS, signal.SIGALRM)}
    try:
        code = child.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _die_with_parent(parent: int) -> Callable[[], None]:
    """What mpirun's process does before it becomes mpirun: ask for SIGTERM when its parent dies (prctl(2))."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
