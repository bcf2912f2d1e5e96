"""Warp-level instructions with a member mask: they wait for their lanes, then exchange values inside each warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import matrix_ops, warpgroup_ops
from tests.ptx.errors import UnknownInstruction, WarpSyncError
from tests.ptx.float_ops import min_max
from tests.ptx.gang import WARP, Gang, Split
from tests.ptx.number_formats import Array
from tests.ptx.operands import Put
from tests.ptx.ptx_types import Type, ptx_type
from tests.ptx.syntax import Imm, Instruction, Operand, Pair

if TYPE_CHECKING:
    from tests.ptx.program import Program

Control = Callable[[Gang, Split], bool]
Exchange = Callable[[Gang, Array], None]

U32, PRED = ptx_type("u32"), ptx_type("pred")
ALL = 0xFFFFFFFF
_BITS = np.uint32(1) << np.arange(WARP, dtype=np.uint32)


def build(program: Program, instruction: Instruction) -> Control | None:
    """The handler of a warp-synchronous instruction, else None."""
    parts = instruction.parts
    families: dict[str, Callable[[Program, Instruction], Exchange]] = {
        "shfl": _shfl, "vote": _vote, "match": _match, "redux": _redux, "elect": _elect,
    }  # fmt: skip
    if parts[:3] == ("bar", "warp", "sync"):
        return _synchronous(program, instruction.operands[0], _warp_barrier)
    if parts[0] == "activemask":
        return _activemask(program, instruction)
    matrices = {
        "mma": matrix_ops.mma, "ldmatrix": matrix_ops.ldmatrix, "stmatrix": matrix_ops.stmatrix,
        "movmatrix": matrix_ops.movmatrix,
    }  # fmt: skip
    if parts[0] in matrices:
        return _synchronous(program, Imm(ALL), matrices[parts[0]](program, instruction))
    if parts[0] == "wgmma":
        return _synchronous(program, Imm(ALL), warpgroup_ops.build(program, instruction))
    family = families.get(parts[0])
    if family is None:
        return None
    if "sync" not in parts:
        raise UnknownInstruction(f"{'.'.join(parts)} without .sync is not modelled")
    return _synchronous(program, instruction.operands[-1], family(program, instruction))


def _synchronous(program: Program, mask: Operand, exchange: Exchange) -> Control:
    """Waits, warp by warp, until all live lanes of the member mask are here; then `exchange(gang, mask per lane)`
    runs.
    """
    everyone = isinstance(mask, Imm) and mask.value & ALL == ALL
    read = program.operands.read(mask, U32)

    def handle(g: Gang, split: Split) -> bool:
        if not (everyone and g.full):
            _gather_waiting(g, split)
            if not _wait(g, split, np.broadcast_to(read(g), g.lanes)):
                return False
        exchange(g, np.broadcast_to(read(g), g.lanes))
        split.pc += 1
        return True

    return handle


def _gather_waiting(g: Gang, split: Split) -> None:
    for other in [s for s in g.splits if s is not split and s.waiting == "warp" and s.pc == split.pc]:
        split.mask = split.mask | other.mask
        g.splits.remove(other)
    g.activate(split.mask)


def _wait(g: Gang, split: Split, members: Array) -> bool:
    """Keeps in the split the warps whose members are all here; the others wait. False if no warp is ready."""
    live = g.live_lanes()
    ready = split.mask.copy()
    for start in range(0, g.lanes, WARP):
        here = split.mask[start : start + WARP]
        if not here.any():
            continue
        bits = (np.uint64(1) << np.arange(len(here), dtype=np.uint64)).astype(np.uint64)
        wanted = np.unique(members[start : start + WARP][here])
        for mask in map(int, wanted):
            named = (bits & np.uint64(mask)) != 0
            with_mask = here & (members[start : start + WARP] == mask)
            outside = with_mask & ~named
            if outside.any():
                raise WarpSyncError(
                    f"lane {int(np.argmax(outside))} executes with member mask 0x{mask:x}, which does not name it"
                )
            if (named & live[start : start + WARP] & ~with_mask).any():
                ready[start : start + WARP] &= ~with_mask
    late = split.mask & ~ready
    if not ready.any():
        split.waiting = "warp"
        return False
    if late.any():
        g.splits.append(Split(split.pc, late, waiting="warp"))
        split.mask = ready
        g.activate(ready)
    return True


def _warps(g: Gang) -> list[slice]:
    return [slice(s, min(s + WARP, g.lanes)) for s in range(0, g.lanes, WARP) if g.mask[s : s + WARP].any()]


def _warp_barrier(g: Gang, members: Array) -> None:
    """Orders memory between the participating lanes of each warp."""
    for warp in _warps(g):
        for mask in np.unique(members[warp][g.mask[warp]]):
            part = g.mask[warp] & (members[warp] == mask)
            g.machine.memory.barrier(g.threads[warp][part])


def _shfl(program: Program, instruction: Instruction) -> Exchange:
    mode = instruction.parts[2]
    destination, value, offset, control, _ = instruction.operands
    first, second = (destination.first, destination.second) if isinstance(destination, Pair) else (destination, None)
    get, by, clamp = (program.operands.read(o, U32) for o in (value, offset, control))
    put = program.operands.write(first, U32)
    put_valid = program.operands.write(second, PRED) if second is not None else None
    if mode not in ("up", "down", "bfly", "idx"):
        raise UnknownInstruction(f"shfl.sync.{mode} is not modelled")

    def run(g: Gang, members: Array) -> None:
        lane = g.lane_id.astype(np.int64)
        step, packed = by(g).astype(np.int64) & 31, clamp(g).astype(np.int64)
        segment = packed >> 8 & 31
        top, bottom = (lane & segment) | (packed & 31 & ~segment), lane & segment
        source = {"up": lane - step, "down": lane + step, "bfly": lane ^ step, "idx": bottom | (step & ~segment)}[mode]
        valid = source >= top if mode == "up" else source <= top
        source = np.where(valid, source, lane)
        index = source + (np.arange(g.lanes) - lane)
        if not g.full or g.lanes % WARP:
            bad = g.mask & ~(g.mask & (index < g.lanes) if g.lanes % WARP == 0 else index < g.lanes)
            inside = np.minimum(index, g.lanes - 1)
            bad |= g.mask & ~g.mask[inside]
            bad |= g.mask & (members >> source.astype(np.uint32) & 1 == 0)
            if bad.any():
                at = int(np.argmax(bad))
                error = WarpSyncError(
                    f"lane {int(lane[at])} reads lane {int(source[at])}, which takes no part in the shuffle"
                )
                error.lane = int(np.count_nonzero(g.mask[:at]))
                raise error
            index = inside
        values = np.broadcast_to(get(g), g.lanes)
        put(g, values[index])
        if put_valid is not None:
            put_valid(g, np.broadcast_to(valid, g.lanes))

    return run


def _per_warp(g: Gang, members: Array, compute: Callable[[Array, slice], object], dtype: np.dtype) -> Array:
    """compute(participating lanes of a warp and mask, warp slice) broadcast to those lanes."""
    result = np.zeros(g.lanes, dtype)
    for warp in _warps(g):
        for mask in np.unique(members[warp][g.mask[warp]]):
            part = g.mask[warp] & (members[warp] == mask)
            result[warp][part] = compute(part, warp)
    return result


def _ballot(flags: Array) -> Array:
    """(…, lanes) to a word each."""
    return flags @ _BITS[: flags.shape[-1]]


def _vote(program: Program, instruction: Instruction) -> Exchange:
    mode = instruction.parts[2]
    destination, operand, _ = instruction.operands
    predicate = program.operands.predicate(operand)
    put = program.operands.write(destination, U32 if mode == "ballot" else PRED)
    votes: dict[str, Callable[[Array], object]] = {
        "all": np.all, "any": np.any, "uni": lambda p: bool(p.all() or not p.any()),
    }  # fmt: skip

    def run(g: Gang, members: Array) -> None:
        flags = np.broadcast_to(predicate(g), g.lanes)
        if mode == "ballot":
            put(g, _per_warp(g, members, lambda part, warp: _ballot(part & flags[warp]), np.dtype("u4")))
        else:
            put(g, _per_warp(g, members, lambda part, warp: votes[mode](flags[warp][part]), np.dtype(np.bool_)))

    return run


def _match(program: Program, instruction: Instruction) -> Exchange:
    mode, kind = instruction.parts[1], ptx_type(instruction.parts[-1])
    destination, value, _ = instruction.operands
    first, second = (destination.first, destination.second) if isinstance(destination, Pair) else (destination, None)
    get = program.operands.read(value, kind)
    put = program.operands.write(first, U32)
    put_all = program.operands.write(second, PRED) if second is not None else None

    def run(g: Gang, members: Array) -> None:
        values = np.broadcast_to(get(g), g.lanes)

        def equal(part: Array, warp: slice) -> object:
            mine = values[warp]
            if mode == "any":
                return _ballot(part & (mine[part][:, None] == mine))
            return _ballot(part) if (mine[part] == mine[part][0]).all() else 0

        result = _per_warp(g, members, equal, np.dtype("u4"))
        put(g, result)
        if put_all is not None:
            put_all(g, result != 0)

    return run


_REDUCE: dict[str, Callable[[Array], object]] = {
    "min": np.min, "max": np.max,
    "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce,
}  # fmt: skip


def _redux(program: Program, instruction: Instruction) -> Exchange:
    parts = instruction.parts
    name, kind = parts[2], ptx_type(parts[-1])
    destination, value, _ = instruction.operands
    get, put = program.operands.read(value, kind), program.operands.write(destination, kind)
    if kind.kind == "f":
        reduce = _float_redux(name, kind, magnitude="abs" in parts, nan="NaN" in parts)
    elif name == "add":
        reduce = lambda v: v.sum(dtype=v.dtype)  # noqa: E731
    elif name in _REDUCE:
        reduce = _REDUCE[name]
    else:
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")

    def run(g: Gang, members: Array) -> None:
        values = np.broadcast_to(get(g), g.lanes)
        put(g, _per_warp(g, members, lambda part, warp: reduce(values[warp][part]), kind.dtype))

    return run


def _float_redux(name: str, kind: Type, *, magnitude: bool, nan: bool) -> Callable[[Array], object]:
    if name not in ("min", "max"):
        raise UnknownInstruction(f"redux.sync.{name}.{kind.name} is not modelled")

    def reduce(values: Array) -> object:
        values = np.abs(values) if magnitude else values
        result = values[:1]
        for i in range(1, len(values)):
            result = min_max(result, values[i : i + 1], kind.name, smaller=name == "min", nan=nan)
        return result[0]

    return reduce


def _elect(program: Program, instruction: Instruction) -> Exchange:
    destination = instruction.operands[0]
    assert isinstance(destination, Pair)
    put, put_leader = program.operands.write(destination.first, U32), program.operands.write(destination.second, PRED)

    def run(g: Gang, members: Array) -> None:
        leader = _per_warp(g, members, lambda part, warp: np.argmax(part), np.dtype("u4"))
        put(g, leader)
        put_leader(g, leader == g.lane_id)

    return run


def _activemask(program: Program, instruction: Instruction) -> Control:
    put: Put = program.operands.write(instruction.operands[0], U32)

    def handle(g: Gang, split: Split) -> bool:
        everyone = np.full(g.lanes, ALL, np.uint32)
        put(g, _per_warp(g, everyone, lambda part, warp: _ballot(part), np.dtype("u4")))
        split.pc += 1
        return True

    return handle
