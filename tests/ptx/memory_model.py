"""The memory model: a view machine over PTX's causality order, with scopes.

Memory holds each location's newest value; a history keeps older ones. A read whose newest write happens before the
reader (by the clocks) returns it. Any other read may return any write that the reader is not yet known to be past,
chosen at random: that is how a missing release, a missing acquire or too narrow a scope shows itself.
"""

import random
from dataclasses import dataclass

import numpy as np

from tests.ptx.allocation import Allocation, Shadow
from tests.ptx.clocks import Clocks, View
from tests.ptx.errors import MissingProxyFence, NonCoherentRead, UninitialisedRead
from tests.ptx.history import HAS_VIEWS, History, Record, Version, Views
from tests.ptx.number_formats import Array
from tests.ptx.races import Event, RaceCheck
from tests.ptx.topology import CTA, WEAK, Topology

_NEWEST = 0.6
"""How often a racy read returns the newest write."""


@dataclass(frozen=True)
class Access:
    """How one instruction touches memory. `scope` is WEAK for weak accesses."""

    size: int
    element: int
    scope: int = WEAK
    acquire: bool = False
    release: bool = False
    non_coherent: bool = False


@dataclass(frozen=True)
class Checks:
    """What a run looks for; see Machine.run."""

    races: str = "error"
    non_coherent: bool = True
    vector_atomic: bool = True
    proxies: bool = True


class MemoryModel:
    """All accesses and fences of a run. `launch_base[i]` is what launch i's threads knew when it began."""

    def __init__(self, topology: Topology, checks: Checks, rng: random.Random, launch_base: list[Array]) -> None:
        self.topology, self.checks, self.rng = topology, checks, rng
        self.launch_base = launch_base
        self.clocks = Clocks(len(topology.cta))
        self.races = RaceCheck(checks.races, topology, self.clocks)
        self._history = History()
        self._released: dict[int, dict[int, View]] = {}
        self._pending: dict[int, list[tuple[Views, int]]] = {}
        self._flag_ids: dict[tuple[int, int], int] = {}
        self._sequential: View | None = None
        self._fenced: dict[int, View] = {}

    def read(self, memory: Allocation, offsets: Array, access: Access, threads: Array) -> Array:
        """The bytes that `threads` (one per offset) read: an array of words or void records of access.size."""
        if memory.unwritten is not None:
            _check_written(memory, offsets, access)
        shadow = memory.shadow_for(self._granule(access))
        index, thread = _granules(shadow, offsets, access, threads)
        writer, epoch = shadow.writer[index], shadow.epoch[index]
        slow = ~self.clocks.ordered(thread, writer, epoch)
        if access.non_coherent and self.checks.non_coherent:
            self._check_non_coherent(memory, index, writer, epoch, thread)
        if access.scope != WEAK:
            slow |= shadow.kind[index] >= HAS_VIEWS
        values = memory.words(access.size)[offsets // access.size]
        if slow.any():
            values = values.copy()
            octets = values.view(np.uint8).reshape(len(offsets), access.size // shadow.granule, shadow.granule)
            for lane in np.flatnonzero(slow.any(axis=1)):
                parts = [self._candidates(memory, shadow, int(i), access, int(threads[lane])) for i in index[lane]]
                for part, chosen in enumerate(self._pick(parts, access)):
                    if slow[lane, part]:
                        byte = int(index[lane, part]) * shadow.granule
                        self._observe(memory, byte, chosen, int(threads[lane]))
                        self._learn(chosen.views, access, int(threads[lane]))
                        octets[lane, part] = np.frombuffer(chosen.value, np.uint8)
        slot = self.rng.getrandbits(1)
        shadow.reader[slot][index] = thread
        shadow.read_epoch[slot][index] = self.clocks.epoch[thread]
        shadow.read_kind[slot][index] = access.scope
        return values

    def write(
        self,
        memory: Allocation,
        offsets: Array,
        values: Array,
        access: Access,
        threads: Array,
        writer: int | None = None,
    ) -> None:
        """Writes words or void records of access.size. `writer` is who the writes count for, if not `threads` (whose
        order they must respect)."""
        if memory.unwritten is not None:
            memory.unwritten[offsets[:, None] + np.arange(access.size)] = False
        shadow = memory.shadow_for(self._granule(access))
        index, thread = _granules(shadow, offsets, access, threads)
        flat = index.reshape(-1)
        suspects = self.races.suspects(shadow, index, thread) if self.races.on else None
        old = memory.words(shadow.granule)[flat].copy()
        record = self._history.record(shadow, flat, old)
        memory.words(access.size)[offsets // access.size] = values
        if suspects is not None and (suspects.writes.any() or suspects.reads.any()):
            changed = (memory.words(shadow.granule)[flat] != old).reshape(index.shape)
            self.races.check_write(memory, shadow, index, thread, access.scope, suspects, changed)
        kind = np.full(len(flat), access.scope, np.int8)
        if access.scope != WEAK:
            self._attach_views(record, index, threads, access, kind.reshape(index.shape))
        thread = thread if writer is None else np.full_like(thread, writer)
        shadow.writer[flat] = np.broadcast_to(thread, index.shape).reshape(-1)
        if self.races.on and access.scope == WEAK and len(flat) > 1:
            self._check_collisions(memory, shadow, index, thread, access.size, offsets, values)
        # A release belongs to the epoch that it publishes, which it has just ended.
        shadow.epoch[flat] = np.broadcast_to(self.clocks.epoch[thread] - access.release, index.shape).reshape(-1)
        shadow.kind[flat] = kind
        shadow.record[flat] = record.stamp

    def read_latest(self, memory: Allocation, offset: int, access: Access, thread: int) -> tuple[bytes, Views]:
        """The newest value, for an atomic operation, and what its release sequence has published."""
        if memory.unwritten is not None:
            _check_written(memory, np.array([offset]), access)
        shadow = memory.shadow_for(access.size)
        index = offset // shadow.granule
        newest = next(self._history.versions(memory, shadow, index))
        earlier = Event(newest.writer, "write", newest.scope, newest.epoch)
        self.races.check(memory, offset, earlier, Event(thread, "atomic", access.scope))
        self._observe(memory, offset, newest, thread)
        self._learn(newest.views, access, thread)
        return newest.value, newest.views

    def use(self, memory: Allocation, offset: int, access: Access, threads: Array) -> None:
        """`read_latest` by several threads that need no value."""
        shadow = memory.shadow_for(access.size)
        index = offset // shadow.granule
        known = self.clocks.ordered(threads, shadow.writer[index], shadow.epoch[index])
        if memory.unwritten is None and shadow.kind[index] < HAS_VIEWS and known.all():
            return
        for thread in map(int, threads):
            self.read_latest(memory, offset, access, thread)

    def write_atomic(
        self, memory: Allocation, offset: int, value: bytes, access: Access, thread: int, inherited: Views
    ) -> None:
        """The write half of an atomic operation: it carries on the release sequence."""
        words = np.frombuffer(value, memory.words(access.size).dtype)
        self.write(memory, np.array([offset]), words, access, np.array([thread]))
        if inherited:
            shadow = memory.shadow_for(access.size)
            index = offset // shadow.granule
            record = self._history[int(shadow.record[index])]
            record.views[index] = {**inherited, **record.views.get(index, {})}
            shadow.kind[index] |= HAS_VIEWS

    def fence(
        self, threads: Array, scope: int, *, acquire: bool = True, release: bool = True, sequential: bool = False
    ) -> None:
        """A fence by each thread. `sequential` is fence.sc: such fences have one order, and later ones see what earlier
        ones saw."""
        for thread in map(int, threads):
            if sequential and self._sequential is not None:
                self.clocks.acquire(np.array([thread]), self._sequential)
            if acquire:
                for views, read_scope in self._pending.pop(thread, ()):
                    self.take(views, min(read_scope, scope), np.array([thread]))
            if release:
                released = self._released.setdefault(thread, {})
                for narrower in [s for s in released if s <= scope]:
                    del released[narrower]
                released[scope] = self.clocks.publish(thread)
                if sequential:
                    self._sequential = released[scope]

    def publish(self, thread: int, scope: int) -> Views:
        """What a release by the thread publishes through something that is no plain location (an mbarrier)."""
        return {(scope, int(self.topology.cta[thread])): self.clocks.publish(thread)}

    def proxy_fence(self, threads: Array) -> None:
        """fence.proxy.async: asynchronous copies may use what the threads wrote, or have learnt of, until now."""
        for thread in map(int, threads):
            self._fenced[thread] = self.clocks.publish(thread)

    def check_proxy(self, memory: Allocation, offset: int, size: int, thread: int) -> None:
        """An asynchronous copy reads `size` bytes: generic writes to them need a proxy fence by writer or issuer."""
        shadow = memory.shadow
        if shadow is None or not self.checks.proxies:
            return
        index = np.arange(offset // shadow.granule, -(-(offset + size) // shadow.granule))
        writers, epochs = shadow.writer[index], shadow.epoch[index]
        mine = self._fenced.get(thread)
        unfenced = (writers >= 0) & (writers < self.topology.agents)
        if mine is not None:
            unfenced &= epochs > mine.clock[writers]
        for writer in sorted(set(writers[unfenced].tolist())):
            own = self._fenced.get(writer)
            if own is None or epochs[unfenced & (writers == writer)].max() > own.clock[writer]:
                raise MissingProxyFence(
                    f"{memory.name}: an asynchronous copy reads what {self.topology.name(writer)} wrote without a "
                    "fence.proxy.async since"
                )

    def barrier(self, threads: Array) -> None:
        """Threads meet: each sees what any of them did before."""
        self.clocks.join(threads)

    def _granule(self, access: Access) -> int:
        return access.size if self.checks.vector_atomic else access.element

    def _check_non_coherent(self, memory: Allocation, index: Array, writer: Array, epoch: Array, thread: Array) -> None:
        launch = int(self.topology.launch[thread[0, 0]])
        bad = epoch > self.launch_base[launch][writer]
        if bad.any():
            lane, part = map(int, np.argwhere(bad)[0])
            error = NonCoherentRead(
                f"{memory.name}: granule {int(index[lane, part])} was written during this launch by "
                f"{self.topology.name(int(writer[lane, part]))}, so ld.global.nc may not read it"
            )
            error.lane = lane
            raise error

    def _candidates(self, memory: Allocation, shadow: Shadow, index: int, access: Access, thread: int) -> list[Version]:
        """The writes that a read may return, the newest first. Checks for a race."""
        byte = index * shadow.granule
        flag = self._flag_ids.get((memory.base, byte))
        floor = self.clocks.floor(thread, flag) if flag is not None else 0
        candidates: list[Version] = []
        for version in self._history.versions(memory, shadow, index):
            candidates.append(version)
            if version.stamp <= floor or self._is_before(version, thread):
                break
        newest = candidates[0]
        earlier = Event(newest.writer, "write", newest.scope, newest.epoch)
        self.races.check(memory, byte, earlier, Event(thread, "read", access.scope))
        return candidates

    def _pick(self, parts: list[list[Version]], access: Access) -> list[Version]:
        """One of the candidates of each part of an access. All parts of an access that is one on the hardware are as
        they were after one and the same write.
        """
        if len(parts) == 1 or self._granule(access) < access.size:
            return [part[0] if self.rng.random() < _NEWEST else self.rng.choice(part) for part in parts]
        least = max(part[-1].stamp for part in parts)
        stamps = [version.stamp for part in parts for version in part if version.stamp >= least]
        moment = max(stamps) if self.rng.random() < _NEWEST else self.rng.choice(stamps)
        return [next(version for version in part if version.stamp <= moment) for part in parts]

    def _is_before(self, version: Version, thread: int) -> bool:
        known = self.clocks.matrix[self.clocks.row[thread]]
        return version.writer == thread or version.epoch <= known[version.writer]

    def _observe(self, memory: Allocation, byte: int, version: Version, thread: int) -> None:
        """The thread has seen a write that is not ordered before it: it will not go back behind it."""
        if version.stamp >= 0 and not self._is_before(version, thread):
            flag = self._flag_ids.setdefault((memory.base, byte), len(self._flag_ids))
            self.clocks.observe(thread, flag, version.stamp)

    def _learn(self, views: Views, access: Access, thread: int) -> None:
        """An acquire takes over what the write published; a relaxed read keeps it for a later fence."""
        if not views or access.scope == WEAK:
            return
        if access.acquire:
            self.take(views, access.scope, np.array([thread]))
            return
        pending = self._pending.setdefault(thread, [])
        if not pending or pending[-1][0] is not views:
            pending.append((views, access.scope))

    def take(self, views: Views, scope: int, threads: Array) -> None:
        """Threads of one CTA synchronise with every releaser whose scope includes them and who is in their scope."""
        topology = self.topology
        reader = int(threads[0])
        for (released, cta), view in views.items():
            same = int(topology.cta[reader]) == cta
            needed = CTA if same else topology.common(reader, int(topology.first_thread[cta]))
            if min(released, scope) >= needed:
                self.clocks.acquire(threads, view)

    def _attach_views(self, record: Record, index: Array, threads: Array, access: Access, kind: Array) -> None:
        """What each strong write publishes: its own release, and the thread's earlier fences (of two that the store
        narrows to one scope, the narrower fence is the later one)."""
        for lane, thread in enumerate(map(int, threads)):
            cta = int(self.topology.cta[thread])
            fences = self._released.get(thread, {})
            views: Views = {
                (min(scope, access.scope), cta): view for scope, view in sorted(fences.items(), reverse=True)
            }
            if access.release:
                views[(access.scope, cta)] = self.clocks.publish(thread)
            if views:
                kind[lane] |= HAS_VIEWS
                for granule in map(int, index[lane]):
                    record.views[granule] = views

    def _check_collisions(
        self,
        memory: Allocation,
        shadow: Shadow,
        index: Array,
        thread: Array,
        size: int,
        offsets: Array,
        values: Array,
    ) -> None:
        """Lanes of one instruction that wrote different values to the same place."""
        lost = shadow.writer[index] != thread
        if not lost.any():
            return
        final = memory.words(size)[offsets // size]
        for lane in np.flatnonzero(lost.any(axis=1) & (final != values)):
            earlier = Event(int(shadow.writer[index[lane, 0]]), "write", WEAK)
            self.races.report(memory, int(offsets[lane]), earlier, Event(int(thread[lane, 0]), "write", WEAK))


def _granules(shadow: Shadow, offsets: Array, access: Access, threads: Array) -> tuple[Array, Array]:
    """(granule indices (lanes, parts), threads (lanes, 1))."""
    first = (offsets // shadow.granule)[:, None]
    parts = access.size // shadow.granule
    return (first + np.arange(parts) if parts > 1 else first), threads[:, None]


def _check_written(memory: Allocation, offsets: Array, access: Access) -> None:
    assert memory.unwritten is not None
    missing = memory.unwritten[offsets[:, None] + np.arange(access.size)]
    if missing.any():
        lane, byte = map(int, np.argwhere(missing)[0])
        error = UninitialisedRead(f"byte {int(offsets[lane]) + byte} of {memory.name} is read but was never written")
        error.lane = lane
        raise error
