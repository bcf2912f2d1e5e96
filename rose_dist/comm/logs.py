"""Log lines that say which rank speaks."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

_FORMAT = "%(asctime)s [{rank}@{host}] %(levelname)s %(name)s: %(message)s"


def configure_logging(rank: int, host: str, log_dir: Path | None = None, level: int = logging.INFO) -> None:
    """Rank 0 logs to standard error; the others into `log_dir`/rank-N.log or, without one, only from warnings up, to
    standard error. Replaces the root logger's handlers.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if rank and log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_dir / f"rank-{rank}.log", mode="w", encoding="utf-8")
    elif rank:
        handler.setLevel(logging.WARNING)
    escaped = host.replace("%", "%%")
    handler.setFormatter(logging.Formatter(_FORMAT.format(rank=rank, host=escaped), datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
