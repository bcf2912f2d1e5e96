"""The memory model: a view machine over PTX's causality order, with scopes, and the data-race check that falls out of
it.

Memory holds each location's newest value; a history keeps older ones. A read whose newest write happens before the
reader (by the clocks) returns it. Any other read may return any write that the reader is not yet known to be past,
chosen at random: that is how a missing release, a missing acquire or too narrow a scope shows itself. Such a read, or
write, is a data race unless both accesses are strong and each one's scope includes the other thread.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.allocation import Allocation, Shadow
from tests.ptx.clocks import Clocks, View
from tests.ptx.errors import DataRace, NonCoherentRead, UninitialisedRead
from tests.ptx.number_formats import Array

WEAK, CTA, CLUSTER, GPU, SYS = range(5)
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": SYS}
SCOPE_NAMES = ("weak", "cta", "cluster", "gpu", "sys")
_HAS_VIEWS = 8  # added to a shadow's kind: the write published something
_NEWEST = 0.6  # how often a racy read returns the newest write
_HISTORY_BYTES = 64 << 20


@dataclass(frozen=True)
class Access:
    """How one instruction touches memory. `scope` is WEAK for weak accesses."""

    size: int
    element: int
    scope: int = WEAK
    acquire: bool = False
    release: bool = False
    non_coherent: bool = False


Views = dict[tuple[int, int], View]  # (effective scope, CTA of the releaser) -> what it published


@dataclass(eq=False)
class _Record:
    """One write instruction: for each granule what it overwrote. `views` by granule index."""

    stamp: int
    allocation: Allocation
    granule: int
    index: Array
    old: Array
    old_writer: Array
    old_epoch: Array
    old_kind: Array
    old_record: Array
    views: dict[int, Views] = field(default_factory=dict)

    def position(self, byte: int) -> int:
        return int(np.flatnonzero(self.index == byte // self.granule)[-1])


@dataclass(frozen=True)
class _Version:
    """A write that a read may return."""

    value: bytes
    writer: int
    epoch: int
    kind: int
    stamp: int
    views: Views


@dataclass(frozen=True)
class Topology:
    """Where each thread of the run lives, and each thread's launch."""

    cta: Array
    cluster: Array
    gpu: Array
    launch: Array

    def common(self, a: int, b: int) -> int:
        """The narrowest scope that includes both threads."""
        if self.cta[a] == self.cta[b]:
            return CTA
        if self.cluster[a] == self.cluster[b]:
            return CLUSTER
        return GPU if self.gpu[a] == self.gpu[b] else SYS


@dataclass
class Checks:
    """What a run reports: "error" raises, "count" only counts, "off" does not look."""

    races: str = "error"
    non_coherent: bool = True
    vector_atomic: bool = True


class MemoryModel:
    def __init__(self, topology: Topology, checks: Checks, rng: random.Random, launch_base: list[Array]) -> None:
        self.topology = topology
        self.checks = checks
        self.rng = rng
        self.clocks = Clocks(len(topology.cta))
        self.launch_base = launch_base
        self.races = 0
        self.writes = 0
        self._records: dict[int, _Record] = {}
        self._order: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._released: dict[int, dict[int, View]] = {}
        self._pending: dict[int, list[tuple[Views, int]]] = {}
        self._flag_ids: dict[tuple[int, int], int] = {}
        self._sequential: View | None = None
        self._stamp = 0

    def read(self, memory: Allocation, offsets: Array, access: Access, threads: Array) -> Array:
        """The bytes that `threads` (one per offset) read: an array of words or void records of access.size."""
        if memory.unwritten is not None:
            self._check_written(memory, offsets, access)
        shadow = memory.shadow_for(self._granule(access))
        index, thread = self._granules(shadow, offsets, access, threads)
        writer, kind = shadow.writer[index], shadow.kind[index]
        ordered = self.clocks.ordered(thread, writer, shadow.epoch[index])
        if access.non_coherent and self.checks.non_coherent:
            self._check_non_coherent(memory, index, writer, shadow.epoch[index], thread)
        values = memory.words(access.size)[offsets // access.size]
        slow = ~ordered
        if access.scope != WEAK:
            slow |= kind >= _HAS_VIEWS
        if slow.any():
            values = values.copy()
            octets = values.view(np.uint8).reshape(len(offsets), access.size)
            per_lane = index.shape[1]
            for lane in np.flatnonzero(slow.any(axis=1)):
                for part in range(per_lane):
                    if slow[lane, part]:
                        self._read_slowly(
                            memory,
                            shadow,
                            int(index[lane, part]),
                            access,
                            int(threads[lane]),
                            octets,
                            int(lane),
                            int(offsets[lane]),
                        )
        slot = self.rng.getrandbits(1)
        shadow.reader[slot][index] = thread
        shadow.read_epoch[slot][index] = self.clocks.epoch[thread]
        shadow.read_kind[slot][index] = access.scope
        return values

    def write(self, memory: Allocation, offsets: Array, values: Array, access: Access, threads: Array) -> None:
        """Writes words or void records of access.size."""
        if memory.unwritten is not None:
            for byte in range(access.size):
                memory.unwritten[offsets + byte] = False
        shadow = memory.shadow_for(self._granule(access))
        index, thread = self._granules(shadow, offsets, access, threads)
        flat = index.reshape(-1)
        old = memory.words(shadow.granule)[flat].copy()
        record = self._record(memory, shadow, flat, old)
        suspects = self._unordered(shadow, index, thread)
        target = memory.words(access.size)
        target[offsets // access.size] = values
        if self.checks.races != "off":
            self._check_write_races(memory, shadow, index, thread, access, suspects, old)
        kind = np.full(len(flat), access.scope, np.int8)
        if access.scope != WEAK:
            self._attach_views(record, index, threads, access, kind.reshape(index.shape))
        shadow.writer[flat] = np.broadcast_to(thread, index.shape).reshape(-1)
        if self.checks.races != "off" and len(flat) > 1:
            self._check_collisions(memory, shadow, index, thread, access, offsets, values)
        shadow.epoch[flat] = np.broadcast_to(self.clocks.epoch[thread], index.shape).reshape(-1)
        if access.release:
            shadow.epoch[flat] -= 1  # the release itself belongs to what it published
        shadow.kind[flat] = kind
        shadow.record[flat] = record.stamp
        self.writes += 1

    def read_latest(self, memory: Allocation, offset: int, access: Access, thread: int) -> tuple[bytes, Views]:
        """The newest value, for an atomic operation, and what its release sequence has published."""
        if memory.unwritten is not None:
            self._check_written(memory, np.array([offset]), access)
        shadow = memory.shadow_for(access.size)
        index = offset // shadow.granule
        newest = next(self._versions(memory, shadow, index))
        self._race_if_unordered(
            memory, index * shadow.granule, newest.writer, newest.epoch, newest.kind, access, thread, "atomic", "write"
        )
        self._observe(memory, index * shadow.granule, newest, thread)
        self._learn(newest.views, access, thread)
        start = offset - index * shadow.granule
        return newest.value[start : start + access.size], newest.views

    def write_atomic(
        self, memory: Allocation, offset: int, value: bytes, access: Access, thread: int, inherited: Views
    ) -> None:
        """The write half of an atomic operation: it carries on the release sequence."""
        words = np.frombuffer(value, memory.words(access.size).dtype)
        self.write(memory, np.array([offset]), words, access, np.array([thread]))
        if inherited:
            shadow = memory.shadow_for(access.size)
            index = offset // shadow.granule
            record = self._records[int(shadow.record[index])]
            record.views[index] = {**inherited, **record.views.get(index, {})}
            shadow.kind[index] |= _HAS_VIEWS

    def fence(
        self, threads: Array, scope: int, *, acquire: bool = True, release: bool = True, sequential: bool = False
    ) -> None:
        """`sequential` is fence.sc: besides, all such fences have one order, and later ones see what earlier ones
        saw.
        """
        for thread in map(int, threads):
            if sequential and self._sequential is not None:
                self.clocks.acquire(thread, self._sequential)
            if acquire:
                for views, read_scope in self._pending.pop(thread, ()):
                    self._join(views, min(read_scope, scope), thread)
            if release:
                released = self._released.setdefault(thread, {})
                for narrower in [s for s in released if s <= scope]:
                    del released[narrower]
                released[scope] = self.clocks.publish(thread)
                if sequential:
                    self._sequential = released[scope]

    def barrier(self, threads: Array) -> None:
        self.clocks.join(threads)

    def _granule(self, access: Access) -> int:
        return access.size if self.checks.vector_atomic else access.element

    @staticmethod
    def _granules(shadow: Shadow, offsets: Array, access: Access, threads: Array) -> tuple[Array, Array]:
        """(granule indices (lanes, parts), threads (lanes, 1))."""
        first = (offsets // shadow.granule)[:, None]
        parts = access.size // shadow.granule
        return (first + np.arange(parts) if parts > 1 else first), threads[:, None]

    def _check_written(self, memory: Allocation, offsets: Array, access: Access) -> None:
        assert memory.unwritten is not None
        for byte in range(access.size):
            missing = memory.unwritten[offsets + byte]
            if missing.any():
                lane = int(np.argmax(missing))
                error = UninitialisedRead(
                    f"byte {int(offsets[lane]) + byte} of {memory.name} is read but was never written"
                )
                error.lane = lane
                raise error

    def _check_non_coherent(self, memory: Allocation, index: Array, writer: Array, epoch: Array, thread: Array) -> None:
        for launch in np.unique(self.topology.launch[thread]):
            base = self.launch_base[launch]
            bad = (epoch > base[writer]) & (self.topology.launch[thread] == launch)
            if bad.any():
                lane, part = map(int, np.argwhere(bad)[0])
                raise NonCoherentRead(
                    f"{memory.name}: granule {int(index[lane, part])} was written during this launch by "
                    f"{self._who(int(writer[lane, part]))}, so ld.global.nc may not read it"
                )

    def _versions(self, memory: Allocation, shadow: Shadow, index: int) -> Iterator[_Version]:
        """The writes of a granule, newest first, as far as the history goes."""
        size = shadow.granule
        byte = index * size
        value = memory.data[byte : byte + size].tobytes()
        writer, epoch = int(shadow.writer[index]), int(shadow.epoch[index])
        kind, stamp = int(shadow.kind[index]), int(shadow.record[index])
        while True:
            record = self._records.get(stamp)
            views: Views = {}
            if record is not None and kind >= _HAS_VIEWS:
                views = record.views.get(byte // record.granule, {})
            yield _Version(value, writer, epoch, kind & ~_HAS_VIEWS, stamp, views)
            if record is None:
                return
            at = record.position(byte)
            start = byte - byte // record.granule * record.granule
            value = record.old[at : at + 1].tobytes()[start : start + size]
            writer, epoch = int(record.old_writer[at]), int(record.old_epoch[at])
            kind, stamp = int(record.old_kind[at]), int(record.old_record[at])

    def _read_slowly(
        self,
        memory: Allocation,
        shadow: Shadow,
        index: int,
        access: Access,
        thread: int,
        octets: Array,
        lane: int,
        offset: int,
    ) -> None:
        """A read that may be stale or that has something to learn: picks a version, checks for a race, puts the bytes
        in place.
        """
        byte = index * shadow.granule
        flag = self._flag_ids.get((memory.base, byte))
        floor = self.clocks.floor(thread, flag) if flag is not None else 0
        candidates: list[_Version] = []
        for version in self._versions(memory, shadow, index):
            candidates.append(version)
            if version.stamp <= floor or self._is_before(version, thread):
                break
        newest = candidates[0]
        self._race_if_unordered(memory, byte, newest.writer, newest.epoch, newest.kind, access, thread, "read", "write")
        chosen = newest if self.rng.random() < _NEWEST else self.rng.choice(candidates)
        self._observe(memory, byte, chosen, thread)
        self._learn(chosen.views, access, thread)
        octets[lane, byte - offset : byte - offset + shadow.granule] = np.frombuffer(chosen.value, np.uint8)

    def _is_before(self, version: _Version, thread: int) -> bool:
        row = self.clocks.matrix[self.clocks.row[thread]]
        return version.writer == thread or version.epoch <= row[version.writer]

    def _observe(self, memory: Allocation, byte: int, version: _Version, thread: int) -> None:
        if self._is_before(version, thread) or version.stamp < 0:
            return
        flag = self._flag_ids.setdefault((memory.base, byte), len(self._flag_ids))
        self.clocks.observe(thread, flag, version.stamp)

    def _learn(self, views: Views, access: Access, thread: int) -> None:
        if not views or access.scope == WEAK:
            return
        if access.acquire:
            self._join(views, access.scope, thread)
        else:
            pending = self._pending.setdefault(thread, [])
            if not pending or pending[-1][0] is not views:
                pending.append((views, access.scope))

    def _join(self, views: Views, scope: int, thread: int) -> None:
        """Synchronises with every releaser whose scope includes the reader and who is in the reader's scope."""
        topology = self.topology
        for (released, cta), view in views.items():
            if topology.cta[thread] == cta:
                needed = CTA
            else:
                needed = topology.common(thread, int(np.argmax(topology.cta == cta)))
            if min(released, scope) >= needed:
                self.clocks.acquire(thread, view)

    def _attach_views(self, record: _Record, index: Array, threads: Array, access: Access, kind: Array) -> None:
        """What each strong write publishes: its own release, and the thread's earlier fences."""
        for lane, thread in enumerate(map(int, threads)):
            cta = int(self.topology.cta[thread])
            views: Views = {
                (min(scope, access.scope), cta): view for scope, view in self._released.get(thread, {}).items()
            }
            if access.release:
                views[(access.scope, cta)] = self.clocks.publish(thread)
            if views:
                kind[lane] |= _HAS_VIEWS
                for granule in index[lane]:
                    record.views[int(granule)] = views

    def _record(self, memory: Allocation, shadow: Shadow, flat: Array, old: Array) -> _Record:
        self._stamp += 1
        record = _Record(
            self._stamp, memory, shadow.granule, flat, old,
            shadow.writer[flat], shadow.epoch[flat], shadow.kind[flat], shadow.record[flat],
        )  # fmt: skip
        self._records[self._stamp] = record
        cost = old.nbytes + 24 * len(flat)
        self._order.append((self._stamp, cost))
        self._bytes += cost
        while self._bytes > _HISTORY_BYTES and len(self._order) > 1:
            stamp, freed = self._order.popleft()
            del self._records[stamp]
            self._bytes -= freed
        return record

    def _unordered(self, shadow: Shadow, index: Array, thread: Array) -> tuple[Array, Array]:
        """(earlier writes, earlier reads per reader slot) that are not ordered before a write by `thread`."""
        writes = ~self.clocks.ordered(thread, shadow.writer[index], shadow.epoch[index])
        reads = ~self.clocks.ordered(thread, shadow.reader[:, index], shadow.read_epoch[:, index])
        return writes, reads

    def _check_write_races(
        self,
        memory: Allocation,
        shadow: Shadow,
        index: Array,
        thread: Array,
        access: Access,
        suspects: tuple[Array, Array],
        old: Array,
    ) -> None:
        writes, reads = suspects
        if not writes.any() and not reads.any():
            return
        new = memory.words(shadow.granule)[index.reshape(-1)]
        changed = (new != old).reshape(index.shape)
        size = shadow.granule
        for lane, part in np.argwhere(writes & changed):
            at = int(index[lane, part])
            kind = int(shadow.kind[at]) & ~_HAS_VIEWS
            self._race_if_unordered(
                memory,
                at * size,
                int(shadow.writer[at]),
                int(shadow.epoch[at]),
                kind,
                access,
                int(thread[lane, 0]),
                "write",
                "write",
            )
        for slot, lane, part in np.argwhere(reads & changed):
            at = int(index[lane, part])
            self._race_if_unordered(
                memory, at * size, int(shadow.reader[slot, at]), int(shadow.read_epoch[slot, at]),
                int(shadow.read_kind[slot, at]), access, int(thread[lane, 0]), "write", "read",
            )  # fmt: skip

    def _check_collisions(
        self,
        memory: Allocation,
        shadow: Shadow,
        index: Array,
        thread: Array,
        access: Access,
        offsets: Array,
        values: Array,
    ) -> None:
        """Lanes of one instruction that wrote different values to the same place."""
        lost = shadow.writer[index] != thread
        if not lost.any() or access.scope != WEAK:
            return
        final = memory.words(access.size)[offsets // access.size]
        for lane in np.flatnonzero(lost.any(axis=1) & (final != values)):
            self._report(
                memory,
                int(offsets[lane]),
                "write",
                int(thread[lane, 0]),
                WEAK,
                "write",
                int(shadow.writer[index[lane, 0]]),
                WEAK,
            )

    def _race_if_unordered(
        self,
        memory: Allocation,
        byte: int,
        other: int,
        epoch: int,
        kind: int,
        access: Access,
        thread: int,
        now: str,
        earlier: str,
    ) -> None:
        if (
            other in (-1, thread)
            or self.checks.races == "off"
            or epoch <= self.clocks.matrix[self.clocks.row[thread], other]
        ):
            return
        strong = WEAK not in (access.scope, kind)
        if strong and min(kind, access.scope) >= self.topology.common(thread, other):
            return
        self._report(memory, byte, now, thread, access.scope, earlier, other, kind)

    def _report(
        self, memory: Allocation, byte: int, now: str, thread: int, scope: int, earlier: str, other: int, kind: int
    ) -> None:
        self.races += 1
        if self.checks.races == "error":
            raise DataRace(
                f"{memory.name}, byte {byte}: a {SCOPE_NAMES[scope]} {now} by {self._who(thread)} and a "
                f"{SCOPE_NAMES[kind]} {earlier} by {self._who(other)} with nothing that orders them"
            )

    def _who(self, thread: int) -> str:
        if thread < 0:
            return "the host"
        topology = self.topology
        cta = int(topology.cta[thread])
        first = int(np.argmax(topology.cta == cta))
        return f"GPU {int(topology.gpu[thread])} CTA #{cta} thread {thread - first}"
