"""multimem: loads, stores and reductions on a multicast object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import float_ops as fl
from tests.ptx import number_formats as nf
from tests.ptx.atomic_ops import ATOMIC_NAMES, combination, update
from tests.ptx.errors import UnknownInstruction
from tests.ptx.gang import Gang
from tests.ptx.memory_model import Access
from tests.ptx.number_formats import Array
from tests.ptx.opcode import access_of, check_modifiers, elements
from tests.ptx.operands import Gather
from tests.ptx.ptx_types import Type, is_type, ptx_type
from tests.ptx.spaces import words
from tests.ptx.syntax import Instruction, Operand
from tests.ptx.topology import GPU, WEAK

if TYPE_CHECKING:
    from tests.ptx.program import Program

Step = Callable[[Gang], None]


def build(program: Program, instruction: Instruction) -> Step:
    """ld_reduce, st and red on a multicast object: every member in the order of the group."""
    parts = instruction.parts
    action = parts[1]
    check_modifiers(parts[1:], {*ATOMIC_NAMES, "acc::f32", "acc::f16", action})
    kind = ptx_type(next(p for p in reversed(parts) if is_type(p)))
    loads = action == "ld_reduce"
    address, data = (instruction.operands[1], instruction.operands[0]) if loads else instruction.operands[:2]
    items = elements(data)
    base = access_of(parts[1:], kind, len(items))
    scope = base.scope if base.scope != WEAK or "weak" in parts or action != "red" else GPU
    access = Access(base.size, base.element, scope, base.acquire, base.release)
    where = program.operands.gather_address(address)
    name = next((p for p in parts if p in ATOMIC_NAMES), "")
    if loads:
        return _load_reduce(program, where, items, kind, name, access, wide="acc::f32" in parts)
    sources = [program.operands.gather(item, kind) for item in items]
    combine = combination(name, kind) if action == "red" else None
    if action not in ("st", "red") or (action == "red" and combine is None):
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")

    def run(g: Gang) -> None:
        lanes = g.active()
        g.effects += 1
        columns = [source(g, lanes) for source in sources]
        for n, lane in enumerate(map(int, lanes)):
            multicast, offset = g.machine.addresses.find_multicast(int(where(g, lanes)[n]), access.size)
            for member in multicast.members:
                if combine is None:
                    value = words(np.stack([c[n : n + 1].view(kind.raw) for c in columns], axis=1), access.size)
                    g.machine.memory.write(member, np.array([offset]), value, access, g.threads[lane : lane + 1])
                    continue
                for i, column in enumerate(columns):
                    one = Access(kind.bytes, kind.bytes, access.scope, access.acquire, access.release)
                    update(
                        g,
                        lane,
                        "global",
                        member.base + offset + i * kind.bytes,
                        one,
                        kind,
                        combine,
                        column[n : n + 1],
                        column[n : n + 1],
                    )

    return run


def _load_reduce(
    program: Program, where: Gather, items: tuple[Operand, ...], kind: Type, name: str, access: Access, *, wide: bool
) -> Step:
    """Sums (or min, max, and, or, xor) over the members; .acc::f32 sums packed 16-bit floats in f32 and rounds once."""
    combine = combination(name, kind)
    if combine is None:
        raise UnknownInstruction(f"multimem.ld_reduce.{name}.{kind.name} is not modelled")
    puts = [program.operands.scatter(item, kind) for item in items]

    def run(g: Gang) -> None:
        lanes = g.active()
        addresses = where(g, lanes)
        results = np.zeros((len(lanes), len(items)), kind.raw)
        for n, lane in enumerate(map(int, lanes)):
            multicast, offset = g.machine.addresses.find_multicast(int(addresses[n]), access.size)
            rows = [
                g.machine.memory.read(m, np.array([offset]), access, g.threads[lane : lane + 1])
                .view(kind.raw)
                .reshape(1, -1)
                for m in multicast.members
            ]
            results[n] = _reduce_rows(rows, kind, combine, wide=wide and name == "add")
        g.strong_reads += access.scope != WEAK
        for i, put in enumerate(puts):
            put(g, lanes, np.ascontiguousarray(results[:, i]))

    return run


def _reduce_rows(rows: list[Array], kind: Type, combine: Callable[[Array, Array], Array], *, wide: bool) -> Array:
    if not wide:
        total = rows[0][0].view(kind.dtype)
        for row in rows[1:]:
            total = combine(total, row[0].view(kind.dtype))
        return total.view(kind.raw)
    half = kind.name.removesuffix("x2")
    lanes = [fl.comparable(row.view(np.uint16), half) for row in rows]
    total32 = lanes[0]
    for lane in lanes[1:]:
        total32 = total32 + lane
    narrow = nf.f32_to_bf16(total32) if half == "bf16" else total32.astype(np.float16).view(np.uint16)
    return np.ascontiguousarray(narrow).view(kind.raw)[0]
