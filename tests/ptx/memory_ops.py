"""Loads, stores, atomic operations, address conversions and multimem."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import float_ops as fl
from tests.ptx import number_formats as nf
from tests.ptx.allocation import LOCAL_WINDOW, SHARED_STRIDE, SHARED_WINDOW
from tests.ptx.errors import UnknownInstruction
from tests.ptx.gang import Gang
from tests.ptx.memory_model import Access
from tests.ptx.number_formats import Array
from tests.ptx.operands import Gather
from tests.ptx.ptx_types import Type, is_type, ptx_type
from tests.ptx.spaces import SPACES, load, locate, space_of, store, words
from tests.ptx.syntax import Instruction, Operand, Vec
from tests.ptx.topology import GPU, SCOPES, SYS, WEAK

if TYPE_CHECKING:
    from tests.ptx.program import Program

Step = Callable[[Gang], None]

_PRIORITIES = ("evict_first", "evict_last", "evict_normal", "evict_unchanged", "no_allocate")
_HINTS = {
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"),
    *(f"L{level}::{priority}" for level in (1, 2) for priority in _PRIORITIES),
}
_SEMANTICS = {"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_FAMILY = {"ld", "ldu", "st", "atom", "red", "multimem"}


def is_memory(parts: tuple[str, ...]) -> bool:
    """Whether the instruction touches memory that others see: a scheduling point."""
    return parts[0] in _FAMILY and not {"param", "local"} & set(parts)


def build(program: Program, instruction: Instruction) -> Step | None:
    name = instruction.parts[0]
    if name in ("ld", "ldu"):
        return _load(program, instruction)
    if name == "st":
        return _store(program, instruction)
    if name in ("atom", "red"):
        return _atomic(program, instruction)
    if name == "multimem":
        return _multimem(program, instruction)
    if name == "cvta":
        return _cvta(program, instruction)
    if name == "mapa":
        return _mapa(program, instruction)
    if name == "isspacep":
        return _isspacep(program, instruction)
    if name in ("prefetch", "prefetchu", "applypriority", "discard"):
        return lambda g: None
    return None


def _check_modifiers(parts: tuple[str, ...], more: frozenset[str] | set[str] = frozenset()) -> None:
    known = _HINTS | _SEMANTICS | SCOPES.keys() | SPACES | _VECTORS.keys() | more
    unknown = [p for p in parts[1:] if p not in known and not is_type(p)]
    if unknown:
        raise UnknownInstruction(f"modifier .{unknown[0]} of {parts[0]} is not modelled")


def _access(parts: tuple[str, ...], kind: Type, count: int) -> Access:
    given = set(parts)
    scope = next((SCOPES[p] for p in parts if p in SCOPES), None)
    if given & {"volatile", "mmio"}:
        scope = SYS
    elif given & {"relaxed", "acquire", "release", "acq_rel"} or parts[0] in ("atom", "red"):
        scope = GPU if scope is None else scope
    else:
        scope = WEAK
    return Access(
        kind.bytes * count, kind.bytes, scope,
        acquire=bool(given & {"acquire", "acq_rel"}), release=bool(given & {"release", "acq_rel"}),
        non_coherent="nc" in given,
    )  # fmt: skip


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def _load(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    _check_modifiers(parts, {"nc"})
    kind = ptx_type(parts[-1])
    items = _elements(instruction.operands[0])
    access, space = _access(parts, kind, len(items)), space_of(parts)
    where = program.operands.gather_address(instruction.operands[1])
    puts = [program.operands.scatter(item, kind) for item in items]

    def run(g: Gang) -> None:
        lanes = g.active()
        values = load(g, space, where(g, lanes), access)
        g.strong_reads += access.scope != WEAK
        columns = values.view(kind.raw).reshape(len(lanes), -1)
        for i, put in enumerate(puts):
            put(g, lanes, np.ascontiguousarray(columns[:, i]))

    return run


def _store(program: Program, instruction: Instruction) -> Step | None:
    parts = instruction.parts
    if "async" in parts or "bulk" in parts:
        return None
    _check_modifiers(parts)
    kind = ptx_type(parts[-1])
    items = _elements(instruction.operands[1])
    access, space = _access(parts, kind, len(items)), space_of(parts)
    if space == "param":
        return lambda g: None  # an argument of a call, and calls are printf or assertion failures
    where = program.operands.gather_address(instruction.operands[0])
    sources = [program.operands.gather(item, kind) for item in items]

    def run(g: Gang) -> None:
        lanes = g.active()
        values = np.stack([source(g, lanes).view(kind.raw) for source in sources], axis=1)
        g.effects += space != "local"
        store(g, space, where(g, lanes), words(values, access.size), access)

    return run


def _narrow_add(kind: str) -> Callable[[Array, Array], Array]:
    half = kind.removesuffix("x2")
    one = np.full(1, 0x3F80 if half == "bf16" else 0x3C00, np.uint16)

    def add(a: Array, b: Array) -> Array:
        return fl.fma_narrow(half, a, one, b)

    return add if half == kind else fl.by_halves(add)


def _combine(name: str, kind: Type) -> Callable[[Array, Array], Array] | None:
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


_ATOMIC_NAMES = ("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas")


def _atomic(program: Program, instruction: Instruction) -> Step | None:
    """One lane after the other; on a vector one element after the other."""
    parts = instruction.parts
    if "async" in parts:
        return None
    _check_modifiers(parts, {*_ATOMIC_NAMES, "noftz"})
    kind = ptx_type(next(p for p in reversed(parts) if is_type(p)))
    name = next((p for p in parts if p in _ATOMIC_NAMES), "")
    combine = _combine(name, kind)
    if combine is None and name != "cas":
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")
    access, space = _access(parts, kind, 1), space_of(parts)
    operands = instruction.operands
    destination, operands = (operands[0], operands[1:]) if parts[0] == "atom" else (None, operands)
    where = program.operands.gather_address(operands[0])
    values = [program.operands.gather(item, kind) for item in _elements(operands[1])]
    swap = program.operands.gather(operands[2], kind) if name == "cas" else None
    puts = [program.operands.scatter(item, kind) for item in _elements(destination)] if destination is not None else []

    def run(g: Gang) -> None:
        lanes = g.active()
        addresses = where(g, lanes)
        for i, value in enumerate(values):
            given = value(g, lanes)
            swaps = swap(g, lanes) if swap is not None else given
            olds = np.zeros(len(lanes), kind.dtype)
            for n in range(len(lanes)):
                lane_address = int(addresses[n]) + i * kind.bytes
                olds[n] = _update(
                    g, int(lanes[n]), space, lane_address, access, kind, combine, given[n : n + 1], swaps[n : n + 1]
                )
            if puts:
                puts[i](g, lanes, olds)
        g.strong_reads += 1

    return run


def _update(
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


def _multimem(program: Program, instruction: Instruction) -> Step:
    """ld_reduce, st and red on a multicast object: every member in the order of the group."""
    parts = instruction.parts
    action = parts[1]
    _check_modifiers(parts[1:], {*_ATOMIC_NAMES, "acc::f32", "acc::f16", action})
    kind = ptx_type(next(p for p in reversed(parts) if is_type(p)))
    loads = action == "ld_reduce"
    address, data = (instruction.operands[1], instruction.operands[0]) if loads else instruction.operands[:2]
    items = _elements(data)
    base = _access(parts[1:], kind, len(items))
    scope = base.scope if base.scope != WEAK or "weak" in parts or action != "red" else GPU
    access = Access(base.size, base.element, scope, base.acquire, base.release)
    where = program.operands.gather_address(address)
    name = next((p for p in parts if p in _ATOMIC_NAMES), "")
    if loads:
        return _multimem_load(program, where, items, kind, name, access, wide="acc::f32" in parts)
    sources = [program.operands.gather(item, kind) for item in items]
    combine = _combine(name, kind) if action == "red" else None
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
                    _update(
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


def _multimem_load(
    program: Program, where: Gather, items: tuple[Operand, ...], kind: Type, name: str, access: Access, *, wide: bool
) -> Step:
    """Sums (or min, max, and, or, xor) over the members; .acc::f32 sums packed 16-bit floats in f32 and rounds once."""
    combine = _combine(name, kind)
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


def _cvta(program: Program, instruction: Instruction) -> Step:
    """Between the generic and another address space. Local, global and constant addresses are the same in both."""
    parts = instruction.parts
    kind, space = ptx_type(parts[-1]), space_of(parts)
    get = program.operands.read(instruction.operands[1], kind)
    put = program.operands.write(instruction.operands[0], kind)
    if space != "shared":
        return lambda g: put(g, get(g))
    if "to" in parts:
        mask = np.uint64(SHARED_STRIDE - 1)
        return lambda g: put(g, (get(g).astype(np.uint64) & mask).astype(kind.raw))
    return lambda g: put(g, get(g).astype(np.uint64) + np.uint64(SHARED_WINDOW + g.cta.uid * SHARED_STRIDE))


def _mapa(program: Program, instruction: Instruction) -> Step:
    """The address of the same shared variable in another CTA of the cluster."""
    parts = instruction.parts
    kind = ptx_type(parts[-1])
    get = program.operands.read(instruction.operands[1], kind)
    rank = program.operands.read(instruction.operands[2], ptx_type("u32"))
    put = program.operands.write(instruction.operands[0], kind)
    mask = kind.raw.type(SHARED_STRIDE - 1)
    if "shared::cluster" in parts:
        return lambda g: put(g, (get(g) & mask) | ((rank(g).astype(kind.raw) + kind.raw.type(1)) << kind.raw.type(24)))

    def generic(g: Gang) -> None:
        owners = np.array([g.cta.peer(int(r)).uid for r in np.broadcast_to(rank(g), g.lanes)], np.uint64)
        put(g, (get(g) & mask) + owners * np.uint64(SHARED_STRIDE) + np.uint64(SHARED_WINDOW))

    return generic


def _isspacep(program: Program, instruction: Instruction) -> Step:
    space = space_of(instruction.parts)
    get = program.operands.read(instruction.operands[1], ptx_type("u64"))
    put = program.operands.write(instruction.operands[0], ptx_type("pred"))
    shared, local = np.uint64(SHARED_WINDOW), np.uint64(LOCAL_WINDOW)

    def run(g: Gang) -> None:
        address = get(g)
        kinds = {
            "shared": (address >= shared) & (address < local),
            "local": address >= local,
            "global": address < shared,
        }
        put(g, kinds[space])

    return run
