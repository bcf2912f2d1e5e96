"""mbarrier objects in shared memory: phases, pending arrivals and transaction bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.ptx.clocks import View
from tests.ptx.errors import BarrierError
from tests.ptx.history import Views


@dataclass
class MBarrier:
    """`expected` arrivals a phase. `released` is what all completed phases publish, `arriving` what this one will."""

    expected: int
    pending: int = 0
    transactions: int = 0
    phase: int = 0
    arriving: Views = field(default_factory=dict)
    released: Views = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = self.expected

    def arrive(self, count: int, views: Views) -> int:
        """Takes `count` arrivals; returns the phase that they belong to."""
        phase = self.phase
        if count > self.pending:
            raise BarrierError(f"{count} arrivals at an mbarrier that expects {self.pending} more in this phase")
        merge(self.arriving, views)
        self.pending -= count
        self._complete()
        return phase

    def expect(self, size: int) -> None:
        self.transactions += size

    def complete_transactions(self, size: int, views: Views) -> None:
        merge(self.arriving, views)
        self.transactions -= size
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.expected
            merge(self.released, self.arriving)
            self.arriving = {}


def merge(into: Views, views: Views) -> None:
    for key, view in views.items():
        old = into.get(key)
        into[key] = view if old is None else _later(old, view)


def _later(a: View, b: View) -> View:
    size = max(len(a.flags), len(b.flags))
    flags = np.zeros(size, np.int32)
    flags[: len(a.flags)] = a.flags
    flags[: len(b.flags)] = np.maximum(flags[: len(b.flags)], b.flags)
    return View(np.maximum(a.clock, b.clock), flags)
