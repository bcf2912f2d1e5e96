"""Launches: what the host asks for, and what runs of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.allocation import Allocation, allocate
from tests.ptx.errors import PtxError
from tests.ptx.gang import Cta, Gang, Split
from tests.ptx.number_formats import Array
from tests.ptx.program import Program

if TYPE_CHECKING:
    from tests.ptx.machine import Machine

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `params` is the kernel's parameter block, laid out as `Program.param_offsets` says.

    `overlaps` marks a programmatic dependent launch: it may start when all CTAs of the launch before it on the same
    GPU allow it.
    """

    program: Program
    grid: Dim3
    block: Dim3
    params: bytes
    gpu: int = 0
    dynamic_shared: int = 0
    cluster: Dim3 = (1, 1, 1)
    overlaps: bool = False
    cooperative: bool = False

    def __post_init__(self) -> None:
        threads = self.block[0] * self.block[1] * self.block[2]
        required = self.program.kernel.required_threads
        if required is not None and required != self.block:
            raise PtxError(
                f"{self.program.kernel.short_name()} is compiled for {required} threads, launched with {self.block}"
            )
        if not 1 <= threads <= 1024:
            raise PtxError(f"{threads} threads a CTA; allowed are 1 to 1024")
        if len(self.params) < self.program.param_size:
            raise PtxError(f"{len(self.params)} parameter bytes given, {self.program.param_size} needed")

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def ctas(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(eq=False)
class ClusterBarrier:
    """barrier.cluster: each thread's arrivals, and the completed phases."""

    launch: ActiveLaunch
    threads: Array
    arrived: dict[int, int] = field(default_factory=dict)
    phase: int = 0
    waiting: list[tuple[Gang, Split]] = field(default_factory=list)

    def arrive(self, threads: Array) -> None:
        for thread in map(int, threads):
            self.arrived[thread] = self.arrived.get(thread, 0) + 1
        if all(self.arrived.get(int(t), 0) > self.phase for t in self.threads):
            self.phase += 1
            self.launch.machine.memory.barrier(self.threads)
            for gang, split in self.waiting:
                split.waiting = ""
                gang.effects += 1
            self.waiting.clear()

    def passed(self, threads: Array) -> bool:
        return all(self.arrived.get(int(t), 0) <= self.phase for t in threads)


class ActiveLaunch:
    """A launch in a run: its CTAs, constants and its place in the GPU's stream."""

    def __init__(self, launch: Launch, index: int, first_thread: int, first_cta: int, machine: Machine) -> None:
        self.launch, self.index, self.machine = launch, index, machine
        self.program, self.gpu = launch.program, launch.gpu
        self.grid, self.block, self.cluster = launch.grid, launch.block, launch.cluster
        self.dynamic_shared: int = launch.dynamic_shared
        self.cluster_size: int = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        self.divergence = 0.05
        self.params = np.frombuffer(launch.params, np.uint8)
        self.first_thread = first_thread
        self.threads = np.arange(first_thread, first_thread + launch.ctas * launch.threads)
        self.predecessor: ActiveLaunch | None = None
        self.started = self.done = False
        self.unfinished = launch.ctas
        self._allowed: set[int] = set()
        self._waited: set[int] = set()
        self.hasty = False
        self.known: ActiveLaunch | None = None
        self._cluster_barriers: dict[int, ClusterBarrier] = {}
        self.constants = self._constants()
        self.ctas = [self._cta(i, first_cta + i) for i in range(launch.ctas)]
        self.next_cta = 0

    def _constants(self) -> dict[str, Allocation]:
        constants = {}
        for variable in self.program.constants:
            memory = self.machine.addresses.add(allocate(variable.name, variable.size, self.gpu))
            memory.data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
            constants[variable.name] = memory
        return constants

    def _cta(self, linear: int, uid: int) -> Cta:
        gx, gy, _ = self.grid
        size = self.program.dynamic_shared_base() + self.dynamic_shared
        shared = allocate(
            f"shared memory of CTA {linear} on GPU {self.gpu}",
            size,
            self.gpu,
            base=0,
            check_unwritten=self.machine.check_shared,
        )
        first = self.first_thread + linear * self.launch.threads
        index = (linear % gx, linear // gx % gy, linear // (gx * gy))
        return Cta(uid, index, linear, self.launch.threads, first, self, shared, live=self.launch.threads)

    def leave(self) -> None:
        """Give back what the launch had of the machine, and break the rings of a run that an error has ended."""
        for memory in self.constants.values():
            self.machine.addresses.remove(memory)
        for cta in self.ctas:
            for gang in cta.gangs:
                gang.bulk_groups.clear()
                gang.copy_groups.clear()
            cta.gangs.clear()
            cta.barriers.clear()
        self.ctas.clear()
        self._cluster_barriers.clear()

    def allow_dependents(self, cta: Cta, threads: Array) -> None:
        self._allowed.add(cta.linear)
        self.hasty |= not self._waited.issuperset(map(int, threads))
        self.machine.admission_due = True

    def may_start(self) -> bool:
        before = self.predecessor
        if before is None or before.done:
            return True
        if not self.launch.overlaps or not before.started or before.next_cta < len(before.ctas):
            return False
        return all(c.live == 0 or c.linear in before._allowed for c in before.ctas)

    def start(self) -> None:
        self.started = True
        before = self.predecessor
        if before is None:
            return
        if before.done:
            self.known = before
            self.see_predecessor(self.threads)
            return
        if before.predecessor is not None and before.predecessor.done and not before.hasty:
            # It allowed this start after it had waited, so what that wait was for is complete.
            self.known = before.predecessor
        else:
            # What was complete when it began.
            self.known = before.known
        if self.known is not None:
            self._see(self.known, self.threads)

    def predecessor_done(self) -> bool:
        return self.predecessor is None or self.predecessor.done

    def see_predecessor(self, threads: Array) -> None:
        """The launch before is complete and its writes are visible to `threads`."""
        self._waited.update(map(int, threads))
        if self.predecessor is not None:
            self._see(self.predecessor, threads)

    def _see(self, earlier: ActiveLaunch, threads: Array) -> None:
        memory = self.machine.memory
        memory.clocks.start_after(threads, earlier.threads)
        memory.launch_base[self.index] = memory.clocks.matrix[memory.clocks.row[threads[0]]].copy()

    def cluster_barrier(self, cta: Cta) -> ClusterBarrier:
        first = cta.linear - cta.rank_in_cluster()
        if first not in self._cluster_barriers:
            members = self.ctas[first : first + self.cluster_size]
            threads = np.concatenate([np.arange(c.first_thread, c.first_thread + c.threads) for c in members])
            self._cluster_barriers[first] = ClusterBarrier(self, threads)
        return self._cluster_barriers[first]
