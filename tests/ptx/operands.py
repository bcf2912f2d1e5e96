"""Operand access: closures that read an operand as a typed array of a gang's lanes, and that write results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.ptx.errors import PtxSyntaxError, UnknownInstruction
from tests.ptx.gang import WARP, Gang
from tests.ptx.number_formats import Array
from tests.ptx.ptx_types import Type, ptx_type
from tests.ptx.syntax import Addr, Imm, Neg, Not, Operand, Reg, Sink, Special, Sym

Get = Callable[[Gang], Array]
Put = Callable[[Gang, Array], None]
Scatter = Callable[[Gang, Array, Array], None]
Gather = Callable[[Gang, Array], Array]

_READ_ROW: dict[str, Callable[[int], Get]] = {
    "u2": lambda i: lambda g: g.u2[i],
    "u4": lambda i: lambda g: g.u4[i],
    "u8": lambda i: lambda g: g.u8[i],
    "i2": lambda i: lambda g: g.s2[i],
    "i4": lambda i: lambda g: g.s4[i],
    "i8": lambda i: lambda g: g.s8[i],
    "f2": lambda i: lambda g: g.f2[i],
    "f4": lambda i: lambda g: g.f4[i],
    "f8": lambda i: lambda g: g.f8[i],
}


@dataclass(frozen=True)
class Slot:
    """Where a register lives: row `index` of the gang's matrix `file` (p, u2, u4 or u8)."""

    file: str
    index: int

    @property
    def bytes(self) -> int:
        return 0 if self.file == "p" else int(self.file[1])


def allocate_registers(registers: dict[str, str]) -> tuple[dict[str, Slot], dict[str, int]]:
    """(name -> slot, rows of each matrix)."""
    counts = {"p": 0, "u2": 0, "u4": 0, "u8": 0}
    slots = {}
    for name, kind in registers.items():
        declared = ptx_type(kind)
        file = "p" if declared.kind == "p" else f"u{max(declared.bytes, 2)}"
        slots[name] = Slot(file, counts[file])
        counts[file] += 1
    return slots, counts


_SPECIALS: dict[str, Callable[[Gang], object]] = {
    "laneid": lambda g: g.lane_id,
    "warpid": lambda g: g.thread_in_cta // WARP,
    "nwarpid": lambda g: -(-g.cta.threads // WARP),
    "smid": lambda g: g.cta.linear % 132,
    "nsmid": lambda g: 132,
    "gridid": lambda g: 1,
    "clock": lambda g: g.machine.now,
    "clock64": lambda g: g.machine.now,
    "clock_hi": lambda g: g.machine.now >> 32,
    "globaltimer": lambda g: g.machine.now,
    "globaltimer_lo": lambda g: g.machine.now,
    "globaltimer_hi": lambda g: g.machine.now >> 32,
    "lanemask_eq": lambda g: 1 << g.lane_id,
    "lanemask_lt": lambda g: (1 << g.lane_id) - 1,
    "lanemask_le": lambda g: (2 << g.lane_id) - 1,
    "lanemask_gt": lambda g: ~((2 << g.lane_id) - 1),
    "lanemask_ge": lambda g: ~((1 << g.lane_id) - 1),
    "dynamic_smem_size": lambda g: g.launch.dynamic_shared,
    "total_smem_size": lambda g: g.cta.shared.size,
    "cluster_ctarank": lambda g: g.cta.rank_in_cluster(),
    "cluster_nctarank": lambda g: g.launch.cluster_size,
    "is_explicit_cluster": lambda g: g.launch.cluster_size > 1,
}


def _by_axis(name: str, axis: int) -> Callable[[Gang], object] | None:
    def tid(g: Gang) -> object:
        bx, by, _ = g.launch.block
        return (g.thread_in_cta % bx, g.thread_in_cta // bx % by, g.thread_in_cta // (bx * by))[axis]

    return {
        "tid": tid,
        "ntid": lambda g: g.launch.block[axis],
        "ctaid": lambda g: g.cta.index[axis],
        "nctaid": lambda g: g.launch.grid[axis],
        "clusterid": lambda g: g.cta.index[axis] // g.launch.cluster[axis],
        "nclusterid": lambda g: g.launch.grid[axis] // g.launch.cluster[axis],
        "cluster_ctaid": lambda g: g.cta.index[axis] % g.launch.cluster[axis],
        "cluster_nctaid": lambda g: g.launch.cluster[axis],
    }.get(name)


def _special(name: str) -> Callable[[Gang], object]:
    base, _, axis = name.partition(".")
    read = _by_axis(base, "xyz".index(axis)) if axis else _SPECIALS.get(base)
    if read is None:
        raise UnknownInstruction(f"special register %{name} is not modelled")
    return read


class Operands:
    """Reads and writes the operands of one kernel."""

    def __init__(self, slots: dict[str, Slot], addresses: dict[str, Callable[[Gang], object]]) -> None:
        self.slots = slots
        self.addresses = addresses

    def slot(self, register: Reg) -> Slot:
        return self.slots[register.name]

    def predicate(self, operand: Operand) -> Get:
        if isinstance(operand, Not):
            index = self.slot(operand.operand).index
            return lambda g: ~g.p[index]
        if isinstance(operand, Reg):
            index = self.slot(operand).index
            return lambda g: g.p[index]
        if isinstance(operand, Imm):
            value = np.array([bool(operand.value)])
            return lambda g: value
        raise PtxSyntaxError(f"no predicate: {operand}")

    def read(self, operand: Operand, kind: Type) -> Get:
        """The operand as an array of `kind`'s dtype: one element per lane, or a single one for a literal."""
        if kind.kind == "p":
            return self.predicate(operand)
        if isinstance(operand, Reg):
            return self._read_register(self.slot(operand), kind)
        if isinstance(operand, Neg):
            inner = self.read(operand.operand, kind)
            return lambda g: -inner(g)
        if isinstance(operand, Imm):
            constant = literal(operand, kind)
            return lambda g: constant
        if isinstance(operand, Special):
            return _as_array(_special(operand.name), kind)
        if isinstance(operand, Sym):
            return _as_array(self.symbol(operand.name), kind)
        raise PtxSyntaxError(f"no value of type .{kind.name}: {operand}")

    def symbol(self, name: str) -> Callable[[Gang], object]:
        if name not in self.addresses:
            raise PtxSyntaxError(f"unknown symbol {name}")
        return self.addresses[name]

    def _read_register(self, slot: Slot, kind: Type) -> Get:
        if slot.file == "p":
            raise PtxSyntaxError(f"a predicate register is read as .{kind.name}")
        if slot.bytes == kind.bytes:
            return _READ_ROW[f"{kind.dtype.kind}{kind.bytes}"](slot.index)
        if slot.bytes < kind.bytes:
            raise PtxSyntaxError(f"a {8 * slot.bytes}-bit register is read as .{kind.name}")
        whole = _READ_ROW[slot.file](slot.index)
        return lambda g: whole(g).astype(kind.raw).view(kind.dtype)

    def write(self, operand: Operand, kind: Type) -> Put:
        """Writes an array of `kind`'s width; a wider register is zero- or sign-extended."""
        if isinstance(operand, Sink):
            return lambda g, value: None
        if not isinstance(operand, Reg):
            raise PtxSyntaxError(f"no register: {operand}")
        slot = self.slot(operand)
        index, file = slot.index, slot.file
        if file == "p":
            return lambda g, value: g.put(g.p[index], value)
        if slot.bytes < kind.bytes:
            raise PtxSyntaxError(f"a {8 * slot.bytes}-bit register can't hold .{kind.name}")
        wide = np.dtype(file)
        if slot.bytes > kind.bytes:
            signed = np.dtype(f"i{slot.bytes}")

            def extend(g: Gang, value: Array) -> None:
                wider = value.astype(signed).view(wide) if kind.kind == "s" else value.view(kind.raw).astype(wide)
                g.put(getattr(g, file)[index], wider)

            return extend
        if file == "u4":
            return lambda g, value: g.put(g.u4[index], value.view(np.uint32))
        if file == "u8":
            return lambda g, value: g.put(g.u8[index], value.view(np.uint64))
        return lambda g, value: g.put(g.u2[index], value.view(np.uint16))

    def scatter(self, operand: Operand, kind: Type) -> Scatter:
        """Writes one value per given lane, extended like `write`."""
        if isinstance(operand, Sink):
            return lambda g, lanes, values: None
        if not isinstance(operand, Reg):
            raise PtxSyntaxError(f"no register: {operand}")
        slot = self.slot(operand)
        index, file, size = slot.index, slot.file, slot.bytes
        if size < kind.bytes:
            raise PtxSyntaxError(f"a {8 * size}-bit register can't hold .{kind.name}")
        wide, signed = np.dtype(file), np.dtype(f"i{size}")

        def run(g: Gang, lanes: Array, values: Array) -> None:
            if size > kind.bytes:
                values = (
                    values.view(kind.dtype).astype(signed).view(wide)
                    if kind.kind == "s"
                    else values.view(kind.raw).astype(wide)
                )
            getattr(g, file)[index, lanes] = values.view(wide)

        return run

    def gather(self, operand: Operand, kind: Type) -> Gather:
        """One value per given lane."""
        get = self.read(operand, kind)

        def run(g: Gang, lanes: Array) -> Array:
            values = get(g)
            return values[lanes] if len(values) == g.lanes else np.repeat(values, len(lanes))

        return run

    def gather_address(self, operand: Operand) -> Gather:
        get = self.address(operand)

        def run(g: Gang, lanes: Array) -> Array:
            values = get(g)
            return values[lanes] if len(values) == g.lanes else np.repeat(values, len(lanes))

        return run

    def address(self, operand: Operand) -> Get:
        """[base + offset] as u64 per lane (or one element). A 32-bit base wraps at 32 bits, as shared addresses do."""
        if not isinstance(operand, Addr):
            raise PtxSyntaxError(f"no address: {operand}")
        base, offset = operand.base, operand.offset
        if isinstance(base, Reg) and self.slot(base).bytes == 4:
            narrow = self.read(base, ptx_type("u32"))
            step = np.array([offset & 0xFFFFFFFF], np.uint32)
            return lambda g: (narrow(g) + step).astype(np.uint64)
        wide = self.read(base, ptx_type("u64"))
        if not offset:
            return wide
        shift = np.array([offset & (2**64 - 1)], np.uint64)
        return lambda g: wide(g) + shift


def literal(operand: Imm, kind: Type) -> Array:
    """A literal as a one-element array of the type: float patterns are converted between widths, integers wrapped."""
    if operand.float_bits:
        number = np.array([operand.value], np.dtype(f"u{operand.float_bits // 8}")).view(
            np.dtype(f"f{operand.float_bits // 8}")
        )
        if kind.kind == "f":
            return number.astype(kind.dtype)
        if operand.float_bits == kind.bits:
            return number.view(kind.dtype)
        raise PtxSyntaxError(f"a {operand.float_bits}-bit float literal is used as .{kind.name}")
    raw = np.array([operand.value & ((1 << kind.bits) - 1)], kind.raw)
    return raw.view(kind.dtype)


def _as_array(read: Callable[[Gang], object], kind: Type) -> Get:
    def get(g: Gang) -> Array:
        value = read(g)
        if isinstance(value, np.ndarray):
            return value.astype(kind.raw).view(kind.dtype)
        return np.array([int(value) & ((1 << kind.bits) - 1)], kind.raw).view(kind.dtype)  # type: ignore[call-overload]

    return get
