"""cp.async.bulk: asynchronous copies of whole spans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.allocation import Allocation, check_alignment
from tests.ptx.errors import PtxError, Site
from tests.ptx.gang import Gang
from tests.ptx.mbarrier import MBarrier
from tests.ptx.mbarrier_ops import find
from tests.ptx.memory_model import Access
from tests.ptx.number_formats import Array
from tests.ptx.ptx_types import ptx_type
from tests.ptx.spaces import locate
from tests.ptx.syntax import Instruction
from tests.ptx.topology import CLUSTER, CTA

if TYPE_CHECKING:
    from tests.ptx.program import Program

Step = Callable[[Gang], None]

U32 = ptx_type("u32")


def build(program: Program, instruction: Instruction) -> Step | None:
    """cp.async.bulk between global and shared memory; done some turns later, or when its group is waited for."""
    parts = instruction.parts
    if "commit_group" in parts:
        return _commit
    if "wait_group" in parts:
        left = program.operands.read(instruction.operands[0], U32)
        reads_only = "read" in parts
        return lambda g: _wait(g, int(left(g)[0]), reads_only=reads_only)
    if "prefetch" in parts:
        return _prefetch(program, instruction)
    known = {"cp", "async", "bulk", "global", "shared::cta", "shared::cluster", "bulk_group", "L2::cache_hint"}
    if any(p not in known and not p.startswith("mbarrier::") for p in parts):
        return None
    to_shared = parts[3].startswith("shared")
    operands = instruction.operands
    to, of = program.operands.gather_address(operands[0]), program.operands.gather_address(operands[1])
    sizes = program.operands.gather(operands[2], U32)
    barriers = program.operands.gather_address(operands[3]) if to_shared else None
    source_space = "shared" if parts[4].startswith("shared") else "global"

    def run(g: Gang) -> None:
        lanes = g.active()
        g.effects += 1
        targets, sources, amounts = to(g, lanes), of(g, lanes), sizes(g, lanes)
        for i, lane in enumerate(map(int, lanes)):
            size = int(amounts[i])
            check_alignment(np.array([targets[i], sources[i], size], np.uint64), 16)
            copy = BulkCopy(
                g,
                lane,
                g.site_of(instruction, lane),
                _span(g, source_space, int(sources[i]), size),
                _span(g, "shared" if to_shared else "global", int(targets[i]), size),
                size,
                find(g, lanes[i : i + 1], int(barriers(g, lanes)[i])) if barriers is not None else None,
            )
            g.machine.memory.check_proxy(*copy.source, size, copy.thread)
            g.machine.copies.append(copy)
            if barriers is None:
                g.bulk_groups.setdefault(lane, [[]])[-1].append(copy)

    return run


def _prefetch(program: Program, instruction: Instruction) -> Step:
    """Nothing that a thread could see, but the bytes have to exist; `Machine.prefetched` keeps which."""
    of = program.operands.gather_address(instruction.operands[0])
    sizes = program.operands.gather(instruction.operands[1], U32)

    def run(g: Gang) -> None:
        lanes = g.active()
        for source, size in zip(map(int, of(g, lanes)), map(int, sizes(g, lanes)), strict=True):
            check_alignment(np.array([source, size], np.uint64), 16)
            g.machine.prefetched.append((*_span(g, "global", source, size), size))

    return run


def _span(g: Gang, space: str, address: int, size: int) -> tuple[Allocation, int]:
    """The allocation and offset of `size` bytes, all inside."""
    first = locate(g, space, address, 16)
    locate(g, space, address + size - 16, 16)
    return first


@dataclass(eq=False)
class BulkCopy:
    """One asynchronous bulk copy. Reads count as the issuing thread's, writes as the CTA's asynchronous agent's."""

    g: Gang
    lane: int
    site: Site
    source: tuple[Allocation, int]
    target: tuple[Allocation, int]
    size: int
    barrier: MBarrier | None
    data: Array | None = None
    done: bool = False

    @property
    def thread(self) -> int:
        return int(self.g.threads[self.lane])

    def read(self) -> None:
        if self.data is None:
            memory, offset = self.source
            self.data = self.g.machine.memory.read(memory, *self._pieces(offset)).copy()

    def finish(self) -> None:
        if self.done:
            return
        self.done = True
        try:
            self._write()
        except PtxError as error:
            raise error.at(self.site) from None

    def _write(self) -> None:
        self.read()
        assert self.data is not None
        machine, agent = self.g.machine, self.g.machine.agent(self.g.cta)
        memory, offset = self.target
        offsets, access, threads = self._pieces(offset)
        machine.memory.write(memory, offsets, self.data, access, threads, writer=agent)
        if self.barrier is not None:
            self.barrier.complete_transactions(self.size, machine.memory.publish(agent, CLUSTER))

    def _pieces(self, offset: int) -> tuple[Array, Access, Array]:
        count = self.size // 16
        return offset + 16 * np.arange(count), Access(16, 16), np.full(count, self.thread)


def _commit(g: Gang) -> None:
    for lane in map(int, g.active()):
        g.bulk_groups.setdefault(lane, [[]]).append([])


def _wait(g: Gang, left: int, *, reads_only: bool) -> None:
    """All but the `left` latest groups of each lane are done (or have read their source), and their writes are seen."""
    for lane in map(int, g.active()):
        groups = g.bulk_groups.setdefault(lane, [[]])
        finished = groups[: max(len(groups) - 1 - left, 0)]
        copies = [copy for group in finished for copy in group]
        for copy in copies:
            copy.read() if reads_only else copy.finish()
        if not reads_only:
            del groups[: len(finished)]
        if copies and not reads_only:
            copied = g.machine.memory.publish(g.machine.agent(g.cta), CTA)
            g.machine.memory.take(copied, CTA, g.threads[lane : lane + 1])
