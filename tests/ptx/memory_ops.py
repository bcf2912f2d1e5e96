"""Loads, stores and address conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import atomic_ops, multimem_ops, network_ops
from tests.ptx.allocation import LOCAL_WINDOW, SHARED_STRIDE, SHARED_WINDOW
from tests.ptx.gang import Gang
from tests.ptx.opcode import access_of, check_modifiers, elements
from tests.ptx.ptx_types import ptx_type
from tests.ptx.spaces import load, space_of, store, words
from tests.ptx.syntax import Instruction
from tests.ptx.topology import WEAK

if TYPE_CHECKING:
    from tests.ptx.program import Program

Step = Callable[[Gang], None]

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
        return atomic_ops.build(program, instruction)
    if name == "multimem":
        return multimem_ops.build(program, instruction)
    if name == "cvta":
        return _cvta(program, instruction)
    if name == "mapa":
        return _mapa(program, instruction)
    if name == "isspacep":
        return _isspacep(program, instruction)
    if name in ("prefetch", "prefetchu", "applypriority", "discard"):
        return lambda g: None
    return None


def _load(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    check_modifiers(parts, {"nc"})
    kind = ptx_type(parts[-1])
    items = elements(instruction.operands[0])
    access, space = access_of(parts, kind, len(items)), space_of(parts)
    where = program.operands.gather_address(instruction.operands[1])
    puts = [program.operands.scatter(item, kind) for item in items]

    def run(g: Gang) -> None:
        lanes = g.active()
        values = load(g, space, where(g, lanes), access, lanes)
        g.strong_reads += access.scope != WEAK
        columns = values.view(kind.raw).reshape(len(lanes), -1)
        for i, put in enumerate(puts):
            put(g, lanes, np.ascontiguousarray(columns[:, i]))

    return run


def _store(program: Program, instruction: Instruction) -> Step | None:
    parts = instruction.parts
    if "async" in parts or "bulk" in parts:
        return None
    check_modifiers(parts)
    kind = ptx_type(parts[-1])
    items = elements(instruction.operands[1])
    access, space = access_of(parts, kind, len(items)), space_of(parts)
    if space == "param":
        return network_ops.store_argument(program, instruction)
    where = program.operands.gather_address(instruction.operands[0])
    sources = [program.operands.gather(item, kind) for item in items]

    def run(g: Gang) -> None:
        lanes = g.active()
        values = np.stack([source(g, lanes).view(kind.raw) for source in sources], axis=1)
        g.effects += space != "local"
        store(g, space, where(g, lanes), words(values, access.size), access, lanes)

    return run


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
