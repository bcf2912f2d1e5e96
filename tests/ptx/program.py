"""A kernel made ready to run: one closure per instruction."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np

from tests.ptx import async_ops, control_ops, memory_ops
from tests.ptx.allocation import LOCAL_WINDOW, PARAM_WINDOW
from tests.ptx.errors import PtxError, UnknownInstruction
from tests.ptx.gang import Gang, Split
from tests.ptx.number_formats import Array
from tests.ptx.operands import Operands, Put, allocate_registers
from tests.ptx.operation import Operation
from tests.ptx.operations import resolve
from tests.ptx.ptx_types import is_type, ptx_type
from tests.ptx.syntax import Instruction, Kernel, Module, Operand, Pair, Variable, Vec

Step = Callable[[Gang], None]
Control = Callable[[Gang, Split], bool]


class Program:
    """`steps[i]` runs instruction i on a gang's active lanes; `control[i]`, where there is one, moves the split too."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        slots, self.register_counts = allocate_registers(kernel.registers)
        self.param_offsets, self.param_size = _layout(kernel.params)
        variables = [*module.variables, *kernel.variables]
        self.shared_offsets, self.shared_size = _layout([v for v in variables if v.space == "shared" and v.size])
        self.extern_shared = [v for v in variables if v.space == "shared" and not v.size]
        self.local_offsets, self.local_size = _layout([v for v in variables if v.space == "local"])
        self.constants = [v for v in variables if v.space in ("global", "const")]
        self.operands = Operands(slots, self._symbols())
        self.targets = set(kernel.labels.values())
        self.steps: list[Step] = []
        self.control: list[Control | None] = []
        self.is_memory: list[bool] = []
        for built in map(self._build, kernel.instructions):
            for column, value in zip((self.steps, self.control, self.is_memory), built, strict=True):
                column.append(value)
        self.control.append(control_ops.fall_off_the_end)
        self.is_memory.append(False)

    def replaced(self, index: int, instruction: Instruction) -> Program:
        """The same kernel with another instruction at `index`."""
        other = copy.copy(self)
        instructions = [*self.kernel.instructions]
        instructions[index] = instruction
        other.kernel = dataclasses.replace(self.kernel, instructions=instructions)
        other.steps, other.control, other.is_memory = [*self.steps], [*self.control], [*self.is_memory]
        other.steps[index], other.control[index], other.is_memory[index] = other._build(instruction)
        return other

    def dynamic_shared_base(self) -> int:
        align = max((v.align for v in self.extern_shared), default=1)
        return -(-self.shared_size // align) * align

    def _symbols(self) -> dict[str, Callable[[Gang], object]]:
        symbols: dict[str, Callable[[Gang], object]] = {}
        for name, offset in self.param_offsets.items():
            symbols[name] = _constant(PARAM_WINDOW + offset)
        for name, offset in self.shared_offsets.items():
            symbols[name] = _constant(offset)
        for variable in self.extern_shared:
            symbols[variable.name] = lambda g: self.dynamic_shared_base()
        for name, offset in self.local_offsets.items():
            symbols[name] = self._local_address(offset)
        for variable in self.constants:
            symbols[variable.name] = _allocated(variable.name)
        return symbols

    def _local_address(self, offset: int) -> Callable[[Gang], object]:
        return lambda g: np.uint64(LOCAL_WINDOW + offset) + (np.arange(g.lanes) * self.local_size).astype(np.uint64)

    def _build(self, instruction: Instruction) -> tuple[Step, Control | None, bool]:
        """Step, control, and whether it is a scheduling point."""
        name = ".".join(instruction.parts)
        try:
            control = control_ops.build(self, instruction)
            step = None if control else self._step(instruction)
        except PtxError as error:
            error.args = (f"{self.kernel.short_name()}:{instruction.line}: `{instruction.text}`: {error}",)
            raise
        if control is None and step is None:
            raise UnknownInstruction(
                f"{self.kernel.short_name()}:{instruction.line}: `{instruction.text}`: {name} is not modelled"
            )
        if step is not None and instruction.guard is not None:
            step = self._guarded(step, instruction)
        touches = memory_ops.is_memory(instruction.parts) or async_ops.is_async(instruction.parts)
        return step or _unreachable, control, control is None and touches

    def _guarded(self, step: Step, instruction: Instruction) -> Step:
        guard = instruction.guard
        assert guard is not None
        row, negated = self.operands.slots[guard.register].index, guard.negated

        def run(g: Gang) -> None:
            outer, full = g.mask, g.full
            mask = outer & (~g.p[row] if negated else g.p[row])
            if mask.any():
                g.activate(mask)
                step(g)
                g.mask, g.full = outer, full

        return run

    def _step(self, instruction: Instruction) -> Step | None:
        if instruction.parts[0] == "mov":
            return self._mov(instruction)
        for family in (memory_ops.build, async_ops.build):
            step = family(self, instruction)
            if step is not None:
                return step
        operation = resolve(instruction.parts)
        return None if operation is None else self._pure(instruction, operation)

    def _pure(self, instruction: Instruction, operation: Operation) -> Step:
        """destination ← function(sources)"""
        destination, *sources = instruction.operands
        kinds = operation.sources
        if operation.variadic and len(sources) > len(kinds):
            kinds = (*kinds, *(kinds[-1],) * (len(sources) - len(kinds)))
        if len(sources) != len(kinds):
            raise UnknownInstruction(f"{len(sources)} source operands, {len(kinds)} expected")
        reads = [self.operands.read(o, k) for o, k in zip(sources, kinds, strict=True)]
        if len(operation.results) == 2:
            return self._pure_pair(destination, operation, reads)
        function = cast(Callable[..., Array], operation.function)
        put = self.operands.write(destination, operation.results[0])
        if len(reads) == 1:
            (a,) = reads
            return lambda g: put(g, function(a(g)))
        if len(reads) == 2:
            a, b = reads
            return lambda g: put(g, function(a(g), b(g)))
        return lambda g: put(g, function(*(r(g) for r in reads)))

    def _pure_pair(self, destination: Operand, operation: Operation, reads: list[Callable[[Gang], Array]]) -> Step:
        outputs = (destination.first, destination.second) if isinstance(destination, Pair) else (destination,)
        puts: list[Put] = [self.operands.write(o, k) for o, k in zip(outputs, operation.results, strict=False)]

        def run(g: Gang) -> None:
            for put, value in zip(puts, operation.function(*(r(g) for r in reads)), strict=False):
                put(g, value)

        return run

    def _mov(self, instruction: Instruction) -> Step | None:
        destination, source = instruction.operands
        kinds = [ptx_type(p) for p in instruction.parts[1:] if is_type(p)]
        if len(kinds) != 1:
            return None
        kind = kinds[0]
        if isinstance(destination, Vec):
            return self._unpack(destination, source, kind.bits)
        if isinstance(source, Vec):
            return self._pack(destination, source, kind.bits)
        put, get = self.operands.write(destination, kind), self.operands.read(source, kind)
        return lambda g: put(g, get(g))

    def _unpack(self, destination: Vec, source: Operand, bits: int) -> Step:
        part = bits // len(destination.items)
        whole, piece = ptx_type(f"b{bits}"), ptx_type(f"b{part}")
        get = self.operands.read(source, whole)
        puts = [self.operands.write(item, piece) for item in destination.items]

        def run(g: Gang) -> None:
            value = get(g)
            for i, put in enumerate(puts):
                put(g, (value >> value.dtype.type(i * part)).astype(piece.raw))

        return run

    def _pack(self, destination: Operand, source: Vec, bits: int) -> Step:
        part = bits // len(source.items)
        whole, piece = ptx_type(f"b{bits}"), ptx_type(f"b{part}")
        gets = [self.operands.read(item, piece) for item in source.items]
        put = self.operands.write(destination, whole)

        def run(g: Gang) -> None:
            value = gets[0](g).astype(whole.raw)
            for i, get in enumerate(gets[1:], 1):
                value = value | (get(g).astype(whole.raw) << whole.raw.type(i * part))
            put(g, value)

        return run


def _constant(value: int) -> Callable[[Gang], object]:
    return lambda g: value


def _allocated(name: str) -> Callable[[Gang], object]:
    return lambda g: g.launch.constants[name].base


def _unreachable(g: Gang) -> None:
    raise AssertionError("a control instruction has no step")


def _layout(variables: list[Variable]) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for variable in variables:
        end = -(-end // variable.align) * variable.align
        offsets[variable.name] = end
        end += variable.size
    return offsets, end
