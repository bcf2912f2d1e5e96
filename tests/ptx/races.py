"""The data-race check: conflicting accesses that nothing orders and that are not both strong at a common scope."""

from dataclasses import dataclass

import numpy as np

from tests.ptx.allocation import Allocation, Shadow
from tests.ptx.clocks import Clocks
from tests.ptx.errors import DataRace
from tests.ptx.history import HAS_VIEWS
from tests.ptx.number_formats import Array
from tests.ptx.topology import SCOPE_NAMES, WEAK, Topology


@dataclass(frozen=True)
class Event:
    """A thread's access: `action` is read, write or atomic; `epoch` is only needed of the earlier one of two."""

    thread: int
    action: str
    scope: int
    epoch: int = 0

    def describe(self, topology: Topology) -> str:
        return f"a {SCOPE_NAMES[self.scope]} {self.action} by {topology.name(self.thread)}"


@dataclass(frozen=True)
class Suspects:
    """For each granule of a write: whether the last write, and the last read in each reader slot, are unordered."""

    writes: Array
    reads: Array


class RaceCheck:
    """`policy` is "error" (raise), "count" or "off"."""

    def __init__(self, policy: str, topology: Topology, clocks: Clocks) -> None:
        if policy not in ("error", "count", "off"):
            raise ValueError(f"races must be error, count or off, not {policy!r}")
        self.policy, self.topology, self.clocks = policy, topology, clocks
        self.count = 0

    @property
    def on(self) -> bool:
        return self.policy != "off"

    def suspects(self, shadow: Shadow, index: Array, thread: Array) -> Suspects:
        writes = ~self.clocks.ordered(thread, shadow.writer[index], shadow.epoch[index])
        reads = ~self.clocks.ordered(thread, shadow.reader[:, index], shadow.read_epoch[:, index])
        return Suspects(writes, reads)

    def check_write(
        self,
        memory: Allocation,
        shadow: Shadow,
        index: Array,
        thread: Array,
        scope: int,
        suspects: Suspects,
        changed: Array,
    ) -> None:
        """After the data, before the shadow is written. Writes that change nothing are let pass."""
        for lane, part in np.argwhere(suspects.writes & changed):
            at = int(index[lane, part])
            earlier = Event(int(shadow.writer[at]), "write", int(shadow.kind[at]) & ~HAS_VIEWS, int(shadow.epoch[at]))
            self.check(memory, at * shadow.granule, earlier, Event(int(thread[lane, 0]), "write", scope))
        for slot, lane, part in np.argwhere(suspects.reads & changed):
            at = int(index[lane, part])
            reader, kind, epoch = shadow.reader[slot, at], shadow.read_kind[slot, at], shadow.read_epoch[slot, at]
            earlier = Event(int(reader), "read", int(kind), int(epoch))
            self.check(memory, at * shadow.granule, earlier, Event(int(thread[lane, 0]), "write", scope))

    def check(self, memory: Allocation, byte: int, earlier: Event, now: Event) -> None:
        other, thread = earlier.thread, now.thread
        if other in (-1, thread) or not self.on:
            return
        if earlier.epoch <= self.clocks.matrix[self.clocks.row[thread], other]:
            return
        strong = WEAK not in (earlier.scope, now.scope)
        if strong and min(earlier.scope, now.scope) >= self.topology.common(thread, other):
            return
        self.report(memory, byte, earlier, now)

    def report(self, memory: Allocation, byte: int, earlier: Event, now: Event) -> None:
        self.count += 1
        if self.policy == "error":
            first, second = now.describe(self.topology), earlier.describe(self.topology)
            raise DataRace(f"{memory.name}, byte {byte}: {first} and {second} with nothing that orders them")
