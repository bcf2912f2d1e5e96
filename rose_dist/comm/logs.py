"""Log lines that say which rank speaks."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_STDERR = 2
_FORMAT = "%(asctime)s [{rank}@{host}] %(levelname)s %(name)s: %(message)s"


class _LineHandler(logging.Handler):
    """Writes a record with one system call. A buffered stream refuses a write from a signal handler that interrupts
    another one ("reentrant call"), and may mix the lines of processes that share it.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(self._descriptor, f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except Exception:  # as every handler does: a log that can't be written ends nothing
            self.handleError(record)


def configure_logging(rank: int, host: str, log_dir: Path | None = None, level: int = logging.INFO) -> None:
    """Rank 0 logs to standard error; the others into `log_dir`/rank-N.log or, without one, only from warnings up, to
    standard error. Replaces the root logger's handlers.
    """
    descriptor = _STDERR
    if rank and log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log_dir / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    handler = _LineHandler(descriptor)
    if rank and log_dir is None:
        handler.setLevel(logging.WARNING)
    escaped = host.replace("%", "%%")
    handler.setFormatter(logging.Formatter(_FORMAT.format(rank=rank, host=escaped), datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
