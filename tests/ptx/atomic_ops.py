"""Atomic operations: atom and red."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import float_ops as fl
from tests.ptx import number_formats as nf
from tests.ptx.errors import UnknownInstruction
from tests.ptx.gang import Gang
from tests.ptx.memory_model import Access
from tests.ptx.number_formats import Array
from tests.ptx.opcode import access_of, check_modifiers, elements
from tests.ptx.ptx_types import Type, is_type, ptx_type
from tests.ptx.spaces import locate, space_of
from tests.ptx.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptx.program import Program

Step = Callable[[Gang], None]

ATOMIC_NAMES = ("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas")


def _narrow_add(kind: str) -> Callable[[Array, Array], Array]:
    half = kind.removesuffix("x2")
    one = np.full(1, 0x3F80 if half == "bf16" else 0x3C00, np.uint16)

    def add(a: Array, b: Array) -> Array:
        return fl.fma_narrow(half, a, one, b)

    return add if half == kind else fl.by_halves(add)


def combination(name: str, kind: Type) -> Callable[[Array, Array], Array] | None:
    """old, operand -> new for one atomic operation, on one-element arrays."""
    if kind.kind == "x" or kind.name == "f16":
        half = kind.name.removesuffix("x2")
        if half not in ("bf16", "f16"):
            return None
        if name == "add":
            return lambda a, b: _narrow_add(kind.name)(a.view(kind.raw), b.view(kind.raw)).view(kind.dtype)
        if name in ("min", "max") and kind.kind == "x":
            pick = _narrow_min_max(half, smaller=name == "min")
            return pick if half == kind.name else fl.by_halves(pick)
        return None
    table: dict[str, Callable[[Array, Array], Array]] = {
        "add": lambda a, b: a + b,
        "min": np.minimum,
        "max": np.maximum,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "exch": lambda a, b: b,
        "inc": lambda a, b: np.where(a >= b, a.dtype.type(0), a + a.dtype.type(1)),
        "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - a.dtype.type(1)),
    }
    return table.get(name)


def _narrow_min_max(half: str, *, smaller: bool) -> Callable[[Array, Array], Array]:
    def pick(a: Array, b: Array) -> Array:
        wide = fl.min_max(fl.comparable(a, half), fl.comparable(b, half), "f32", smaller=smaller, nan=False)
        return nf.f32_to_bf16(wide) if half == "bf16" else wide.astype(np.float16).view(np.uint16)

    return pick


def build(program: Program, instruction: Instruction) -> Step | None:
    """One lane after the other; on a vector one element after the other."""
    parts = instruction.parts
    if "async" in parts:
        return None
    check_modifiers(parts, {*ATOMIC_NAMES, "noftz"})
    kind = ptx_type(next(p for p in reversed(parts) if is_type(p)))
    name = next((p for p in parts if p in ATOMIC_NAMES), "")
    combine = combination(name, kind)
    if combine is None and name != "cas":
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")
    access, space = access_of(parts, kind, 1), space_of(parts)
    operands = instruction.operands
    destination, operands = (operands[0], operands[1:]) if parts[0] == "atom" else (None, operands)
    where = program.operands.gather_address(operands[0])
    values = [program.operands.gather(item, kind) for item in elements(operands[1])]
    swap = program.operands.gather(operands[2], kind) if name == "cas" else None
    puts = [program.operands.scatter(item, kind) for item in elements(destination)] if destination is not None else []

    def run(g: Gang) -> None:
        lanes = g.active()
        addresses = where(g, lanes)
        for i, value in enumerate(values):
            given = value(g, lanes)
            swaps = swap(g, lanes) if swap is not None else given
            olds = np.zeros(len(lanes), kind.dtype)
            for n in range(len(lanes)):
                lane_address = int(addresses[n]) + i * kind.bytes
                olds[n] = update(
                    g, int(lanes[n]), space, lane_address, access, kind, combine, given[n : n + 1], swaps[n : n + 1]
                )
            if puts:
                puts[i](g, lanes, olds)
        g.strong_reads += 1

    return run


def update(
    g: Gang,
    lane: int,
    space: str,
    address: int,
    access: Access,
    kind: Type,
    combine: Callable[[Array, Array], Array] | None,
    value: Array,
    swap: Array,
) -> object:
    """One lane's atomic operation; returns the old value."""
    memory, offset = locate(g, space, address, kind.bytes)
    thread = int(g.threads[lane])
    raw, views = g.machine.memory.read_latest(memory, offset, access, thread)
    old = np.frombuffer(raw, kind.dtype)
    if combine is None:
        new = swap if old.view(kind.raw)[0] == value.view(kind.raw)[0] else old
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            new = combine(old, value)
    new_bytes = new.astype(kind.dtype).tobytes()
    g.machine.memory.write_atomic(memory, offset, new_bytes, access, thread, views)
    g.effects += new_bytes != raw
    return old[0]
