"""A progress bar for loads that take long enough to want one."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import click

SHOW_AFTER = 1.0
"""Seconds without a bar: most test models are loaded by then."""


class LoadProgress:
    """Called with bytes done and bytes in all. Draws on a terminal only."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._begun = time.monotonic()
        self._done = 0
        self._bar: click._termui_impl.ProgressBar[int] | None = None

    def __call__(self, done: int, total: int) -> None:
        if not self._shown or time.monotonic() - self._begun < SHOW_AFTER:
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, label=f"loading {total / 1e9:.1f} GB", file=sys.stderr)
            self._bar.__enter__()
        self._bar.update(done - self._done)
        self._done = done

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, trace)
