"""Execution state: CTAs, and gangs of warps that run in lockstep with a mask, splitting where they diverge.

A gang is a contiguous range of a CTA's warps whose lanes are the elements of numpy arrays. Lockstep inside a gang is
one legal schedule; gangs of one warp, of several and of whole CTAs are drawn at random, and gangs interleave at
random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.allocation import Allocation
from tests.ptx.errors import PtxError, Site
from tests.ptx.number_formats import Array
from tests.ptx.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptx.bulk_ops import BulkCopy
    from tests.ptx.launch import ActiveLaunch
    from tests.ptx.machine import Machine
    from tests.ptx.warpgroup_ops import Pipeline

WARP = 32
_SPINS_BEFORE_SWITCH = 6


@dataclass
class Barrier:
    """One of a CTA's 16 barriers: who has arrived so far."""

    arrived: list[Array] = field(default_factory=list)
    waiting: list[tuple[Gang, Split]] = field(default_factory=list)
    count: int = 0
    warp_pc: dict[int, int] = field(default_factory=dict)
    then: Callable[[], None] | None = None
    """What is done when it opens."""


@dataclass
class CopyGroup:
    """cp.async copies of one commit group; each is done when called."""

    copies: list[Callable[[], None]] = field(default_factory=list)

    def finish(self) -> None:
        for copy in self.copies:
            copy()
        self.copies.clear()


@dataclass(eq=False)
class Cta:
    """`uid` is unique in the run; `first_thread` is its first thread's number in the run."""

    uid: int
    index: tuple[int, int, int]
    linear: int
    threads: int
    first_thread: int
    launch: ActiveLaunch
    shared: Allocation
    live: int = 0
    barriers: dict[int, Barrier] = field(default_factory=dict)
    gangs: list[Gang] = field(default_factory=list)
    put_arguments: list[int] = field(default_factory=list)
    """Of the call at which threads of this CTA wait for the others."""

    @property
    def gpu(self) -> int:
        return self.launch.gpu

    def rank_in_cluster(self) -> int:
        return self.linear % self.launch.cluster_size

    def peer(self, rank: int) -> Cta:
        """The CTA of `rank` in this CTA's cluster."""
        return self.launch.ctas[self.linear - self.rank_in_cluster() + rank]


@dataclass(eq=False)
class Split:
    """Lanes of a gang that are at the same instruction. `waiting` says what for, if they can't run."""

    pc: int
    mask: Array
    waiting: str = ""
    spins: int = 0
    arrived: bool = False


class Gang:
    """Registers are rows of one raw matrix per width (u1 for predicates, u2, u4, u8), seen through typed views (s4,
    f4, …).
    """

    def __init__(self, cta: Cta, first: int, lanes: int, machine: Machine) -> None:
        self.cta, self.launch, self.machine = cta, cta.launch, machine
        self.first, self.lanes = first, lanes
        self.thread_in_cta = np.arange(first, first + lanes)
        self.threads = cta.first_thread + self.thread_in_cta
        self.lane_id = self.thread_in_cta % WARP
        counts = cta.launch.program.register_counts
        self.p: Array = np.zeros((counts["p"], lanes), np.bool_)
        self.u2: Array = np.full((counts["u2"], lanes), 0xDEAD, np.uint16)
        self.u4: Array = np.full((counts["u4"], lanes), 0xDEADBEEF, np.uint32)
        self.u8: Array = np.full((counts["u8"], lanes), 0xDEADBEEFDEADBEEF, np.uint64)
        self.s2: Array = self.u2.view(np.int16)
        self.s4: Array = self.u4.view(np.int32)
        self.s8: Array = self.u8.view(np.int64)
        self.f2: Array = self.u2.view(np.float16)
        self.f4: Array = self.u4.view(np.float32)
        self.f8: Array = self.u8.view(np.float64)
        self.local = np.zeros(lanes * max(cta.launch.program.local_size, 1), np.uint8)
        self.everyone = np.ones(lanes, np.bool_)
        self.splits = [Split(0, self.everyone.copy())]
        self.full = True
        self.mask: Array = self.everyone
        self._guarded = False
        self.copy_groups: list[list[CopyGroup]] = [[CopyGroup()] for _ in range(-(-lanes // WARP))]
        self.arguments: dict[str, Array] = {}
        """Of a call that is to come, by parameter name."""
        self.bulk_groups: dict[int, list[list[BulkCopy]]] = {}
        self.pipelines: dict[int, Pipeline] = {}
        """Of a warp, by its first lane."""
        self.fuel = 0
        self.strong_reads = 0
        self.effects = 0
        self.spun = self.polled = self.acted = False

    def activate(self, mask: Array) -> None:
        self.mask = mask
        self.full = bool(mask.all())

    def active(self) -> Array:
        """Indices of the active lanes."""
        return np.flatnonzero(self.mask)

    def active_warps(self) -> list[int]:
        """The gang's warps, counted from 0, that have active lanes."""
        return [w for w in range(-(-self.lanes // WARP)) if self.mask[w * WARP : (w + 1) * WARP].any()]

    def put(self, row: Array, value: Array) -> None:
        """Writes a register row under the mask; `value` has the row's dtype."""
        if self.full:
            row[:] = value
        else:
            np.copyto(row, value, where=self.mask)

    def live_lanes(self) -> Array:
        live = np.zeros(self.lanes, np.bool_)
        for split in self.splits:
            live |= split.mask
        return live

    def run(self, fuel: int) -> bool:
        """Runs up to `fuel` memory instructions, one split at a time; False if nothing came of it but polling."""
        self.fuel = fuel
        self.spun = self.polled = self.acted = False
        self.strong_reads = self.effects = 0
        moved = False
        while self.fuel > 0 and not self.spun:
            split = self._pick()
            if split is None:
                break
            moved |= self._advance(split)
        only_polled = (self.polled or self.strong_reads > 0) and not self.acted and self.effects == 0
        return moved and not only_polled

    def _pick(self) -> Split | None:
        ready = [s for s in self.splits if not s.waiting]
        if len(ready) <= 1:
            return ready[0] if ready else None
        ready = self._merge(ready)
        rng: random.Random = self.machine.rng
        first = min(ready, key=lambda s: s.pc)
        if len(ready) > 1 and (first.spins > _SPINS_BEFORE_SWITCH or rng.random() < self.launch.divergence):
            first.spins = 0
            return rng.choice(ready)
        return first

    def _merge(self, ready: list[Split]) -> list[Split]:
        by_pc: dict[int, Split] = {}
        for split in ready:
            if split.pc in by_pc:
                by_pc[split.pc].mask = by_pc[split.pc].mask | split.mask
                self.splits.remove(split)
            else:
                by_pc[split.pc] = split
        return list(by_pc.values())

    def _advance(self, split: Split) -> bool:
        """Runs one split until it blocks, ends, splits, meets another one's path or the fuel is out."""
        program = self.launch.program
        steps, memory, control, targets = program.steps, program.is_memory, program.control, program.targets
        self.activate(split.mask)
        pc = start = split.pc
        moved = False
        try:
            while True:
                if len(self.splits) > 1 and pc in targets and pc != start:
                    break
                handler = control[pc]
                if handler is not None:
                    split.pc = pc
                    if not handler(self, split):
                        moved |= split.pc != pc or split not in self.splits
                        return moved or self.effects > 0
                    moved, pc = True, split.pc
                    if self.spun or split.mask is not self.mask:
                        return True
                    continue
                if memory[pc]:
                    if self.fuel <= 0:
                        break
                    self.fuel -= 1
                steps[pc](self)
                pc += 1
                moved = True
        except PtxError as error:
            raise error.at(self.site(pc, error)) from None
        split.pc = pc
        return moved

    def site(self, pc: int, error: PtxError | None = None) -> Site:
        """Where the gang is: `error` says which of the active lanes is meant."""
        active = self.active()
        at = min(error.lane if error is not None else 0, len(active) - 1)
        return self.site_of(self.launch.program.kernel.instructions[pc], int(active[at]) if len(active) else 0)

    def site_of(self, instruction: Instruction, lane: int) -> Site:
        kernel = self.launch.program.kernel
        text = instruction.text.replace(kernel.name, "")
        thread = int(self.thread_in_cta[lane])
        return Site(kernel.short_name(), instruction.line, text, self.cta.gpu, self.cta.linear, thread)

    def branch(self, split: Split, taken: Array, target: int) -> bool:
        """Moves the lanes in `taken` to `target`, the others on. True if the split goes on undivided."""
        others = split.mask & ~taken
        if not taken.any():
            split.pc += 1
            return True
        if target <= split.pc:
            self._went_back(split)
        if not others.any():
            split.pc = target
            return True
        split.mask = others
        self.splits.append(Split(target, taken, spins=split.spins))
        split.pc += 1
        return False

    def _went_back(self, split: Split) -> None:
        """A loop that only polls gives its turn to others."""
        split.spins += 1
        if self.effects == 0 and self.strong_reads > 0:
            self.spun = True
        if self.effects:
            split.spins = 0
        self.polled |= self.strong_reads > 0
        self.acted |= self.effects > 0
        self.strong_reads = self.effects = 0

    def exit(self, split: Split, lanes: Array) -> bool:
        """The lanes leave the kernel. True if some of the split go on."""
        self.cta.live -= int(lanes.sum())
        self.effects += 1
        rest = split.mask & ~lanes
        self.machine.lanes_left(self)
        if rest.any():
            split.mask = rest
            split.pc += 1
            self.activate(rest)
            return True
        self.splits.remove(split)
        return False
