"""Older values of memory: each write instruction leaves a record of what it overwrote and of what it published."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.ptx.allocation import Allocation, Shadow
from tests.ptx.clocks import View
from tests.ptx.number_formats import Array

HAS_VIEWS = 8
"""Added to a shadow's `kind`: the write published something."""

_MAX_BYTES = 64 << 20

Views = dict[tuple[int, int], View]
"""(effective scope, CTA of the releaser) -> what it published."""


@dataclass(eq=False)
class Record:
    """One write instruction: by granule what it overwrote, and, by granule index, what it published."""

    stamp: int
    granule: int
    index: Array
    old: Array
    old_writer: Array
    old_epoch: Array
    old_kind: Array
    old_record: Array
    views: dict[int, Views] = field(default_factory=dict)

    def position(self, byte: int) -> int:
        matches = (self.index == byte // self.granule).nonzero()[0]
        return int(matches[-1])


@dataclass(frozen=True)
class Version:
    """A value of one granule, who wrote it, and what the write published. `stamp` grows along a location's writes."""

    value: bytes
    writer: int
    epoch: int
    scope: int
    stamp: int
    views: Views


class History:
    """Records by stamp; the oldest are forgotten when they take too much memory."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._order: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._stamp = 0

    def __getitem__(self, stamp: int) -> Record:
        return self._records[stamp]

    def record(self, shadow: Shadow, index: Array, old: Array) -> Record:
        """A new record of a write to the granules `index`, which hold `old`."""
        self._stamp += 1
        before = (shadow.writer[index], shadow.epoch[index], shadow.kind[index], shadow.record[index])
        record = Record(self._stamp, shadow.granule, index, old, *before)
        self._records[self._stamp] = record
        cost = old.nbytes + 24 * len(index)
        self._order.append((self._stamp, cost))
        self._bytes += cost
        while self._bytes > _MAX_BYTES and len(self._order) > 1:
            stamp, freed = self._order.popleft()
            del self._records[stamp]
            self._bytes -= freed
        return record

    def versions(self, memory: Allocation, shadow: Shadow, index: int) -> Iterator[Version]:
        """The writes of a granule, newest first, as far as the history goes."""
        size = shadow.granule
        byte = index * size
        value = memory.data[byte : byte + size].tobytes()
        writer, epoch = int(shadow.writer[index]), int(shadow.epoch[index])
        kind, stamp = int(shadow.kind[index]), int(shadow.record[index])
        while True:
            record = self._records.get(stamp)
            views: Views = {}
            if record is not None and kind >= HAS_VIEWS:
                views = record.views.get(byte // record.granule, {})
            yield Version(value, writer, epoch, kind & ~HAS_VIEWS, stamp, views)
            if record is None:
                return
            at = record.position(byte)
            start = byte % record.granule
            value = record.old[at : at + 1].tobytes()[start : start + size]
            writer, epoch = int(record.old_writer[at]), int(record.old_epoch[at])
            kind, stamp = int(record.old_kind[at]), int(record.old_record[at])
