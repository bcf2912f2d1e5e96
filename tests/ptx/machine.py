"""The emulated machine: GPUs with tensors in one address space, and the scheduler that interleaves all threads of a
run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.ptx.allocation import MULTICAST_WINDOW, AddressMap, Allocation, Multicast, allocate
from tests.ptx.bulk_ops import BulkCopy
from tests.ptx.control_ops import complete
from tests.ptx.errors import Deadlock, PtxError
from tests.ptx.gang import WARP, Cta, Gang
from tests.ptx.launch import ActiveLaunch, Launch
from tests.ptx.mbarrier import MBarrier
from tests.ptx.memory_model import Checks, MemoryModel
from tests.ptx.network_ops import Piece, Signal
from tests.ptx.topology import Topology

_TURN_NS = 100
_FUEL = (1, 2, 4, 16, 64)
_COPY_PER_TURN = 0.3
_MAX_TURNS = 1_000_000
_LONGEST_STALL = 400


@dataclass(frozen=True)
class Report:
    """What a run did. `races` counts data races where they are only counted."""

    seed: int
    turns: int
    races: int
    nanoseconds: int


class Machine:
    """Emulated GPUs. Tensors are torch CPU tensors whose storage is emulated memory, so `data_ptr()` is what kernels
    may be given.
    """

    def __init__(self, *, check_shared: bool = False) -> None:
        self.addresses = AddressMap()
        self.check_shared = check_shared
        self.now: int = 0
        self.admission_due = False
        self.rng = random.Random(0)
        self.memory: MemoryModel
        self.ctas: list[Cta] = []
        self.mbarriers: dict[tuple[int, int], MBarrier] = {}
        self.copies: list[BulkCopy | Piece | Signal] = []
        self.prefetched: list[tuple[Allocation, int, int]] = []
        """Memory, offset and size of each prefetch of all runs."""
        self.symmetric: list[list[Allocation]] = []
        self._first_agent = 0
        self._owners: dict[int, Allocation] = {}

    def empty(
        self,
        shape: Sequence[int] | int,
        dtype: torch.dtype,
        *,
        gpu: int = 0,
        name: str = "",
        check_unwritten: bool = False,
    ) -> torch.Tensor:
        """A tensor in emulated memory, filled with 0xA5 bytes. With `check_unwritten`, reads of bytes that no kernel
        wrote are errors.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(np.prod(shape, dtype=np.int64))
        size = count * torch.empty((), dtype=dtype).element_size()
        label = name or f"tensor {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')} on GPU {gpu}"
        memory = self.addresses.add(allocate(label, size, gpu, check_unwritten=check_unwritten))
        memory.data[:] = 0xA5
        self._owners[memory.base] = memory
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(memory.data[:size]).view(dtype).reshape(shape)

    def tensor(self, values: torch.Tensor | np.ndarray, *, gpu: int = 0, name: str = "") -> torch.Tensor:
        """A copy of `values` in emulated memory."""
        values = torch.as_tensor(values)
        result = self.empty(values.shape, values.dtype, gpu=gpu, name=name)
        result.copy_(values)
        return result

    def zeros(self, shape: Sequence[int] | int, dtype: torch.dtype, *, gpu: int = 0, name: str = "") -> torch.Tensor:
        return self.empty(shape, dtype, gpu=gpu, name=name).zero_()

    def multicast(self, tensors: Sequence[torch.Tensor], name: str = "multicast") -> int:
        """The address of a multicast object over one tensor per GPU."""
        members = tuple(self._owners[t.data_ptr()] for t in tensors)
        base = MULTICAST_WINDOW + sum(-(-m.size // 4096) * 4096 + 4096 for m in self.addresses.multicasts)
        self.addresses.multicasts.append(Multicast(name, base, members))
        return base

    def register_symmetric(self, tensors: Sequence[torch.Tensor]) -> None:
        """One tensor a GPU, in the order of the GPUs, which puts to other PEs may name."""
        self.symmetric.append([self._owners[tensor.data_ptr()] for tensor in tensors])

    def run(
        self,
        launches: Sequence[Launch],
        *,
        seed: int = 0,
        races: str = "error",
        non_coherent: bool = True,
        vector_atomic: bool = True,
        gang_warps: int | None = None,
        resident: int | None = None,
        stalls: float = 0.0,
    ) -> Report:
        """Runs launches to their end: those of one GPU one after the other, in order; those of different GPUs at once.

        `races` is "error", "count" or "off"; `gang_warps` fixes how many warps run in lockstep (else random);
        `resident` bounds the CTAs that a GPU holds at once; `stalls` is how often, by turn, a random GPU stands still
        for some hundred turns. An error carries the seed; the same seed gives the same schedule.
        """
        self.rng = random.Random(seed)
        self.now = 1_000_000
        self.mbarriers, self.copies = {}, []
        start = self.now
        active = self._activate(launches, Checks(races, non_coherent, vector_atomic))
        try:
            with np.errstate(all="ignore"):
                turns = _Scheduler(self, active, gang_warps, resident, stalls).run()
        except PtxError as error:
            error.args = (f"{error.args[0] if error.args else type(error).__name__}\n  replay with seed={seed}",)
            raise
        finally:
            self._reset(active)
        return Report(seed, turns, self.memory.races.count, self.now - start)

    def _activate(self, launches: Sequence[Launch], checks: Checks) -> list[ActiveLaunch]:
        active: list[ActiveLaunch] = []
        thread = cta = 0
        last: dict[int, ActiveLaunch] = {}
        for index, launch in enumerate(launches):
            one = ActiveLaunch(launch, index, thread, cta, self)
            one.predecessor = last.get(launch.gpu)
            last[launch.gpu] = one
            active.append(one)
            thread += launch.ctas * launch.threads
            cta += launch.ctas
        self.ctas = [c for one in active for c in one.ctas]
        sizes = [c.threads for c in self.ctas]
        self._first_agent = thread

        def by_thread(values: list[int]) -> np.ndarray:
            """A value for each thread from one for each CTA, then one for each CTA's agent."""
            column = np.array(values, np.int64)
            return np.concatenate([np.repeat(column, sizes), column])

        clusters = [c.launch.index << 32 | c.linear // c.launch.cluster_size for c in self.ctas]
        topology = Topology(
            by_thread(list(range(len(self.ctas)))),
            by_thread(clusters),
            by_thread([c.gpu for c in self.ctas]),
            by_thread([c.launch.index for c in self.ctas]),
            np.array([c.first_thread for c in self.ctas], np.int64),
            thread,
        )
        base = np.zeros(thread + cta + 1, np.int32)
        base[-1] = np.iinfo(np.int32).max
        self.memory = MemoryModel(topology, checks, self.rng, [base] * len(active))
        return active

    def _reset(self, active: list[ActiveLaunch]) -> None:
        """The host waits for the end of a run, so nothing of it can race with the next. What ran refers to the machine:
        rings would keep its memory for long.
        """
        for one in active:
            one.leave()
        for memory in self.addresses:
            memory.shadow = None
        self.ctas, self.mbarriers, self.copies = [], {}, []

    def agent(self, cta: Cta) -> int:
        """The thread number that stands for the CTA's asynchronous copies."""
        return self._first_agent + cta.uid

    def lanes_left(self, gang: Gang) -> None:
        """Lanes of `gang` left the kernel: whoever waited for them may go on."""
        for split in gang.splits:
            if split.waiting == "warp":
                split.waiting = ""
        cta = gang.cta
        for barrier in list(cta.barriers.values()):
            complete(cta, barrier)


class _Scheduler:
    """Random turns. A turn runs a gang for a random number of memory instructions; a gang that only polls ends its
    turn early.
    """

    def __init__(
        self,
        machine: Machine,
        launches: list[ActiveLaunch],
        gang_warps: int | None,
        resident: int | None,
        stalls: float,
    ) -> None:
        self.machine, self.launches = machine, launches
        self.gang_warps, self.resident, self.stalls = gang_warps, resident, stalls
        self.stalled, self.stalled_until = -1, 0
        self.gangs: list[Gang] = []
        self.idle = 0

    def run(self) -> int:
        rng = self.machine.rng
        turns = 0
        self._admit()
        while self.gangs:
            gang = self._choose(turns)
            moved = gang.run(rng.choice(_FUEL))
            turns += 1
            self._copy(often=not moved)
            if not gang.splits:
                self._retire(gang)
            if self.machine.admission_due:
                self._admit()
            self._account(moved)
            if turns > _MAX_TURNS:
                raise Deadlock(f"no end after {turns} turns:\n" + "\n".join(self._positions()))
        while self.machine.copies:
            self._copy(often=True)
        if not all(one.done for one in self.launches):
            raise Deadlock("launches wait for one another")
        return turns

    def _choose(self, turn: int) -> Gang:
        rng = self.machine.rng
        if self.stalls and turn >= self.stalled_until and rng.random() < self.stalls:
            self.stalled, self.stalled_until = rng.choice(self.gangs).cta.gpu, turn + rng.randrange(_LONGEST_STALL)
        if turn < self.stalled_until:
            others = [gang for gang in self.gangs if gang.cta.gpu != self.stalled]
            return rng.choice(others or self.gangs)
        return rng.choice(self.gangs)

    def _copy(self, *, often: bool) -> None:
        """Lets a random asynchronous copy happen now and then."""
        copies = self.machine.copies
        if copies and (often or self.machine.rng.random() < _COPY_PER_TURN):
            copies.pop(self.machine.rng.randrange(len(copies))).finish()
            self.idle = 0

    def _admit(self) -> None:
        self.machine.admission_due = False
        for one in self.launches:
            if not one.started and one.may_start():
                one.start()
            while one.started and one.next_cta < len(one.ctas) and self._has_room(one.gpu):
                self._start(one.ctas[one.next_cta])
                one.next_cta += 1
            if one.started and not one.ctas:
                one.done = True

    def _has_room(self, gpu: int) -> bool:
        if self.resident is None:
            return True
        return len({g.cta.uid for g in self.gangs if g.cta.gpu == gpu}) < self.resident

    def _start(self, cta: Cta) -> None:
        warps = -(-cta.threads // WARP)
        size = self.gang_warps or self.machine.rng.choice((1, max(1, warps // 2), warps, warps))
        for first in range(0, cta.threads, size * WARP):
            gang = Gang(cta, first, min(size * WARP, cta.threads - first), self.machine)
            cta.gangs.append(gang)
            self.gangs.append(gang)

    def _retire(self, gang: Gang) -> None:
        self.gangs.remove(gang)
        gang.bulk_groups.clear()
        cta = gang.cta
        if cta.live == 0 and all(not g.splits for g in cta.gangs) and cta.gangs:
            cta.gangs.clear()
            cta.launch.unfinished -= 1
            if cta.launch.unfinished == 0:
                cta.launch.done = True
                self._wake_grid_waiters()
            self._admit()

    def _wake_grid_waiters(self) -> None:
        for gang in self.gangs:
            for split in gang.splits:
                if split.waiting == "grid":
                    split.waiting = ""

    def _account(self, moved: bool) -> None:
        """The clock, and the end of a run in which nobody gets on. While all only poll, time runs faster and faster,
        so that bounded waits expire within some thousand turns.
        """
        if moved:
            self.idle = 0
            self.machine.now += _TURN_NS
            return
        self.idle += 1
        patience = 400 + 40 * len(self.gangs)
        over = max(0, self.idle - patience)
        self.machine.now += _TURN_NS << min(over // 32, 36)
        if over > 32 * 60 or (self.idle > 4 * len(self.gangs) and not self._anyone_ready()):
            raise Deadlock("no thread can go on:\n" + "\n".join(self._positions()))

    def _anyone_ready(self) -> bool:
        return any(not s.waiting for g in self.gangs for s in g.splits)

    def _positions(self) -> list[str]:
        lines = []
        for gang in self.gangs[:32]:
            for split in gang.splits:
                gang.activate(split.mask)
                why = f"waits for {split.waiting}" if split.waiting else "polls"
                last = len(gang.launch.program.kernel.instructions) - 1
                lines.append(f"  {gang.site(min(split.pc, last))} {why}, {int(split.mask.sum())} threads")
        return lines
