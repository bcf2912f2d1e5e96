"""mbarrier instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.errors import BarrierError, UnknownInstruction
from tests.ptx.gang import Gang
from tests.ptx.mbarrier import MBarrier
from tests.ptx.memory_model import Access
from tests.ptx.number_formats import Array
from tests.ptx.ptx_types import ptx_type
from tests.ptx.spaces import locate
from tests.ptx.syntax import Addr, Instruction, Operand, Sink
from tests.ptx.topology import CLUSTER, CTA

if TYPE_CHECKING:
    from tests.ptx.program import Program

Step = Callable[[Gang], None]

U32, U64, PRED = ptx_type("u32"), ptx_type("u64"), ptx_type("pred")
_WORD = Access(8, 8, CLUSTER)


def build(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    action = parts[1]
    if "noComplete" in parts or action not in _MBARRIER:
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")
    return _MBARRIER[action](program, instruction)


def find(g: Gang, lanes: Array, address: int) -> MBarrier:
    """The mbarrier at an address, for `lanes` to use; its initialisation must be ordered before."""
    memory, offset = locate(g, "shared", address, 8)
    barrier = g.machine.mbarriers.get((id(memory), offset))
    if barrier is None:
        raise BarrierError(f"no mbarrier was initialised at offset {offset} of {memory.name}")
    g.machine.memory.use(memory, offset, _WORD, g.threads[lanes])
    return barrier


def _init(program: Program, instruction: Instruction) -> Step:
    where = program.operands.gather_address(instruction.operands[0])
    counts = program.operands.gather(instruction.operands[1], U32)

    def run(g: Gang) -> None:
        lanes = g.active()
        for lane, address, count in zip(lanes, where(g, lanes), counts(g, lanes), strict=True):
            memory, offset = locate(g, "shared", int(address), 8)
            g.machine.mbarriers[id(memory), offset] = MBarrier(int(count))
            g.machine.memory.write(
                memory, np.array([offset]), np.array([count], np.uint64), Access(8, 8), g.threads[lane : lane + 1]
            )
        g.effects += 1

    return run


def _invalidate(program: Program, instruction: Instruction) -> Step:
    where = program.operands.gather_address(instruction.operands[0])

    def run(g: Gang) -> None:
        lanes = g.active()
        for address in where(g, lanes):
            memory, offset = locate(g, "shared", int(address), 8)
            g.machine.mbarriers.pop((id(memory), offset), None)

    return run


def _arrive(program: Program, instruction: Instruction) -> Step:
    """arrive and arrive.expect_tx: a release at CTA scope (cluster if named); one arrival, or as many as are given."""
    parts, operands = instruction.parts, list(instruction.operands)
    scope = CLUSTER if "cluster" in parts or "shared::cluster" in parts else CTA
    destination: Operand = Sink()
    if not isinstance(operands[0], Addr):
        destination = operands.pop(0)
    where = program.operands.gather_address(operands[0])
    number = program.operands.gather(operands[1], U32) if len(operands) > 1 else None
    put = program.operands.scatter(destination, U64)
    expects = "expect_tx" in parts

    def run(g: Gang) -> None:
        lanes = g.active()
        numbers = number(g, lanes) if number is not None else np.ones(len(lanes), np.uint32)
        phases = np.zeros(len(lanes), np.uint64)
        for i, (lane, address) in enumerate(zip(map(int, lanes), where(g, lanes), strict=True)):
            barrier = find(g, lanes[i : i + 1], int(address))
            if expects:
                barrier.expect(int(numbers[i]))
            views = g.machine.memory.publish(int(g.threads[lane]), scope)
            phases[i] = barrier.arrive(1 if expects else int(numbers[i]), views)
        g.effects += 1
        put(g, lanes, phases)

    return run


def _transactions(program: Program, instruction: Instruction) -> Step:
    where = program.operands.gather_address(instruction.operands[0])
    sizes = program.operands.gather(instruction.operands[1], U32)
    completes = instruction.parts[1] == "complete_tx"

    def run(g: Gang) -> None:
        lanes = g.active()
        for i, (address, size) in enumerate(zip(where(g, lanes), sizes(g, lanes), strict=True)):
            barrier = find(g, lanes[i : i + 1], int(address))
            if completes:
                barrier.complete_transactions(int(size), {})
            else:
                barrier.expect(int(size))
        g.effects += 1

    return run


def _wait(program: Program, instruction: Instruction) -> Step:
    """test_wait and try_wait: true once the phase (by state or by parity) is complete; then an acquire."""
    parts, operands = instruction.parts, instruction.operands
    put = program.operands.write(operands[0], PRED)
    where = program.operands.gather_address(operands[1])
    parity = "parity" in parts
    phase = program.operands.gather(operands[2], U32 if parity else U64)
    scope = CLUSTER if "cluster" in parts else CTA

    def run(g: Gang) -> None:
        lanes = g.active()
        done = np.zeros(g.lanes, np.bool_)
        addresses, phases = where(g, lanes), phase(g, lanes)
        for address in dict.fromkeys(addresses.tolist()):
            here = addresses == address
            barrier, users, wanted = find(g, lanes[here], address), lanes[here], phases[here]
            done[users] = barrier.phase & 1 != wanted & 1 if parity else barrier.phase > wanted
            through = users[done[users]]
            if len(through):
                g.machine.memory.take(barrier.released, scope, g.threads[through])
        g.strong_reads += 1
        put(g, done)

    return run


_MBARRIER: dict[str, Callable[[Program, Instruction], Step]] = {
    "init": _init,
    "inval": _invalidate,
    "arrive": _arrive,
    "expect_tx": _transactions,
    "complete_tx": _transactions,
    "test_wait": _wait,
    "try_wait": _wait,
}
