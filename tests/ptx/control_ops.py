"""Branches, exits, CTA barriers, waits and fences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import network_ops, warp_ops
from tests.ptx.errors import BarrierError, PtxSyntaxError, Trap, UnknownInstruction
from tests.ptx.gang import WARP, Barrier, Cta, Gang, Split
from tests.ptx.ptx_types import ptx_type
from tests.ptx.syntax import Instruction, Sym
from tests.ptx.topology import SCOPES

if TYPE_CHECKING:
    from tests.ptx.program import Program

Control = Callable[[Gang, Split], bool]
Builder = Callable[["Program", Instruction], "Control | None"]

U32 = ptx_type("u32")


def build(program: Program, instruction: Instruction) -> Control | None:
    """The handler of an instruction that blocks, moves or ends lanes, or orders memory; else None."""
    if instruction.parts[0] == "bra":
        return _branch(program, instruction)
    builder = _BUILDERS.get(instruction.parts[0])
    if instruction.parts[:2] == ("bar", "warp"):
        builder = warp_ops.build
    control = (builder or warp_ops.build)(program, instruction)
    if control is None:
        if builder is not None and instruction.parts[0] not in ("barrier", "fence"):
            raise UnknownInstruction(f"{'.'.join(instruction.parts)} is not modelled")
        return None
    return control if instruction.guard is None else _guarded(program, instruction, control)


def fall_off_the_end(g: Gang, split: Split) -> bool:
    return g.exit(split, split.mask)


def _guarded(program: Program, instruction: Instruction, control: Control) -> Control:
    """Lanes whose guard is false go on without the instruction."""
    guard = instruction.guard
    assert guard is not None
    row, negated = program.operands.slots[guard.register].index, guard.negated

    def handle(g: Gang, split: Split) -> bool:
        chosen = split.mask & (~g.p[row] if negated else g.p[row])
        if not chosen.any():
            split.pc += 1
            return True
        others = split.mask & ~chosen
        if others.any():
            g.splits.append(Split(split.pc + 1, others, spins=split.spins))
            split.mask = chosen
            g.activate(chosen)
        return control(g, split)

    return handle


def _branch(program: Program, instruction: Instruction) -> Control:
    target = instruction.operands[-1]
    if not isinstance(target, Sym) or target.name not in program.kernel.labels:
        raise PtxSyntaxError(f"branch to an unknown label {target}")
    to = program.kernel.labels[target.name]
    guard = instruction.guard
    if guard is None:
        return lambda g, split: g.branch(split, split.mask, to)
    row, negated = program.operands.slots[guard.register].index, guard.negated
    return lambda g, split: g.branch(split, split.mask & (~g.p[row] if negated else g.p[row]), to)


def _indexed_branch(program: Program, instruction: Instruction) -> Control:
    """brx.idx through a table of labels."""
    table = instruction.operands[1]
    if not isinstance(table, Sym) or table.name not in program.kernel.branch_targets:
        raise PtxSyntaxError(f"no table of branch targets: {table}")
    targets = [program.kernel.labels[label] for label in program.kernel.branch_targets[table.name]]
    index = program.operands.read(instruction.operands[0], U32)

    def handle(g: Gang, split: Split) -> bool:
        chosen = np.broadcast_to(index(g), g.lanes)
        wanted = np.unique(chosen[split.mask])
        mask = split.mask
        for value in wanted[1:]:
            g.splits.append(Split(targets[int(value)], mask & (chosen == value)))
        split.mask = mask & (chosen == wanted[0])
        split.pc = targets[int(wanted[0])]
        return len(wanted) == 1

    return handle


def _leave(program: Program, instruction: Instruction) -> Control:
    return lambda g, split: g.exit(split, split.mask)


def _trap(program: Program, instruction: Instruction) -> Control:
    def handle(g: Gang, split: Split) -> bool:
        raise Trap("the kernel executed trap")

    return handle


def _call(program: Program, instruction: Instruction) -> Control:
    names = [o.name for o in instruction.operands if isinstance(o, Sym)]
    if "vprintf" in names:
        return _next
    if "__assertfail" in names:
        return _trap(program, instruction)
    if network_ops.PUT_SIGNAL in names:
        return network_ops.put_signal(program, instruction)
    raise UnknownInstruction(f"a call of {names} is not modelled")


def _next(g: Gang, split: Split) -> bool:
    split.pc += 1
    return True


def _nanosleep(program: Program, instruction: Instruction) -> Control:
    """Gives the turn away; the clock moves by the least that was asked for."""
    duration = program.operands.read(instruction.operands[0], U32)

    def handle(g: Gang, split: Split) -> bool:
        split.pc += 1
        g.machine.now += int(np.broadcast_to(duration(g), g.lanes)[split.mask].min())
        g.spun = g.effects == 0
        return True

    return handle


def _fence(program: Program, instruction: Instruction) -> Control | None:
    """fence.{acq_rel,sc,acquire,release}.scope, membar. fence.proxy.* are built with the asynchronous copies."""
    parts = instruction.parts
    if "proxy" in parts[1] or parts[1] == "mbarrier_init":
        return None
    if parts[0] == "membar":
        scope = {"cta": "cta", "gl": "gpu", "sys": "sys"}.get(parts[1])
        kind = "sc"
    else:
        kind = next((p for p in parts if p in ("acq_rel", "sc", "acquire", "release")), "acq_rel")
        scope = next((p for p in parts if p in SCOPES), None)
    if scope is None or any("sync_restrict" in p for p in parts):
        return None
    acquire, release = kind != "release", kind != "acquire"
    level = SCOPES[scope]

    def handle(g: Gang, split: Split) -> bool:
        g.machine.memory.fence(g.threads[split.mask], level, acquire=acquire, release=release, sequential=kind == "sc")
        split.pc += 1
        return True

    return handle


def _barrier(program: Program, instruction: Instruction) -> Control | None:
    """bar.sync, bar.arrive, bar.red and their barrier{.cta} forms."""
    parts = [p for p in instruction.parts if p not in ("cta",)]
    if "cluster" in parts:
        return _cluster_barrier(instruction)
    action = parts[1]
    if action not in ("sync", "arrive"):
        return None
    operands = [*instruction.operands]
    read_id = program.operands.read(operands[0], U32)
    read_count = program.operands.read(operands[1], U32) if len(operands) > 1 else None
    aligned = parts[0] == "bar" or "aligned" in parts

    def handle(g: Gang, split: Split) -> bool:
        number = _uniform(g, split, read_id(g), "barrier number")
        count = _uniform(g, split, read_count(g), "thread count") if read_count is not None else 0
        if count % WARP:
            raise BarrierError(f"the thread count {count} of barrier {number} is no multiple of {WARP}")
        barrier = g.cta.barriers.setdefault(number, Barrier())
        if aligned:
            _check_aligned(g, split, barrier, number)
        _arrive(g, split, barrier, number, count)
        if action == "sync":
            barrier.waiting.append((g, split))
            split.waiting = f"barrier {number}"
        else:
            split.pc += 1
        complete(g.cta, barrier)
        return not split.waiting

    return handle


def _uniform(g: Gang, split: Split, values: np.ndarray, what: str) -> int:
    chosen = np.unique(np.broadcast_to(values, g.lanes)[split.mask])
    if len(chosen) > 1:
        raise BarrierError(f"the {what} differs between lanes: {chosen.tolist()}")
    return int(chosen[0])


def _check_aligned(g: Gang, split: Split, barrier: Barrier, number: int) -> None:
    """All lanes of a warp must meet at the same bar instruction."""
    for warp in np.unique(g.thread_in_cta[split.mask] // WARP):
        pc = barrier.warp_pc.setdefault(int(warp), split.pc)
        if pc != split.pc:
            raise BarrierError(f"lanes of warp {int(warp)} wait at different instructions for barrier {number}")


def _arrive(g: Gang, split: Split, barrier: Barrier, number: int, count: int) -> None:
    if barrier.count not in (0, count) and barrier.arrived:
        raise BarrierError(f"barrier {number} is used with {barrier.count} and with {count} threads at once")
    barrier.count = count
    barrier.arrived.append(g.threads[split.mask])
    if count and sum(map(len, barrier.arrived)) > count:
        raise BarrierError(f"more than {count} threads arrive at barrier {number}")


def complete(cta: Cta, barrier: Barrier) -> None:
    """Opens the barrier if everybody is there: `count` threads, or all that are still in the kernel."""
    arrived = sum(map(len, barrier.arrived))
    if not arrived or arrived < (barrier.count or cta.live):
        return
    cta.launch.machine.memory.barrier(np.concatenate(barrier.arrived))
    if barrier.then is not None:
        barrier.then()
        barrier.then = None
    for gang, split in barrier.waiting:
        split.waiting = ""
        split.pc += 1
        gang.effects += 1
    barrier.arrived.clear()
    barrier.waiting.clear()
    barrier.warp_pc.clear()
    barrier.count = 0


def _cluster_barrier(instruction: Instruction) -> Control:
    """barrier.cluster.arrive / wait over all threads of the cluster."""
    waits = "wait" in instruction.parts

    def handle(g: Gang, split: Split) -> bool:
        barrier = g.launch.cluster_barrier(g.cta)
        threads = g.threads[split.mask]
        if waits:
            if not barrier.passed(threads):
                split.waiting = "barrier cluster"
                barrier.waiting.append((g, split))
                return False
            split.pc += 1
            return True
        barrier.arrive(threads)
        split.pc += 1
        return True

    return handle


def _griddepcontrol(program: Program, instruction: Instruction) -> Control | None:
    action = instruction.parts[1]
    if action == "launch_dependents":

        def launch(g: Gang, split: Split) -> bool:
            g.launch.allow_dependents(g.cta, g.threads[split.mask])
            g.fuel = 0
            split.pc += 1
            return True

        return launch
    if action != "wait":
        return None

    def wait(g: Gang, split: Split) -> bool:
        if not g.launch.predecessor_done():
            split.waiting = "grid"
            return False
        g.launch.see_predecessor(g.threads[split.mask])
        split.pc += 1
        return True

    return wait


def _ignored(program: Program, instruction: Instruction) -> Control:
    """Performance hints: setmaxnreg, pmevent."""
    return _next


_BUILDERS: dict[str, Builder] = {
    "brx": _indexed_branch,
    "ret": _leave,
    "exit": _leave,
    "trap": _trap,
    "brkpt": _trap,
    "call": _call,
    "nanosleep": _nanosleep,
    "fence": _fence,
    "membar": _fence,
    "bar": _barrier,
    "barrier": _barrier,
    "griddepcontrol": _griddepcontrol,
    "setmaxnreg": _ignored,
    "pmevent": _ignored,
}
