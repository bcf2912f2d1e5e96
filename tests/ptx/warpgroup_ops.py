"""wgmma: asynchronous products of a warpgroup, of which each warp's part is modelled by itself.

A product is done when its group is waited for, not earlier: so whoever frees shared memory too soon races with it, and
sums that are read too soon are NaN. Operands in registers may not change until then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.allocation import Allocation
from tests.ptx.errors import UnknownInstruction, WarpSyncError
from tests.ptx.gang import WARP, Gang
from tests.ptx.matrix_ops import a_fragment, decode, whole_warps
from tests.ptx.memory_model import Access
from tests.ptx.number_formats import Array
from tests.ptx.opcode import elements
from tests.ptx.ptx_types import ptx_type
from tests.ptx.spaces import load, locate
from tests.ptx.syntax import Instruction, Reg, Vec

if TYPE_CHECKING:
    from tests.ptx.program import Program

Exchange = Callable[[Gang, Array], None]

U32, B64, PRED = ptx_type("u32"), ptx_type("b64"), ptx_type("pred")
CELLS = 2
"""Of 16 bytes, in depth."""
PER_WORD = {"bf16": 2, "e4m3": 4}
POISON = 0x7FC0DEAD
"""A NaN: what sums look like while their product is under way."""
_CELL = Access(16, 16)


@dataclass(eq=False)
class Product:
    """One warp's part of one product. Of several under way with the same sums only the first knows them."""

    lanes: Array
    sums: list[int]
    """Register rows."""
    left: list[int]
    operand: Array
    """u4 [4, 32]: what the rows `left` held when it began."""
    right: int
    transposed: bool
    known: Array | None
    """f4 [sums, 32]."""
    kind: str

    def finish(self, g: Gang, later: list[Product]) -> None:
        if not np.array_equal(g.u4[self.left][:, self.lanes], self.operand):
            raise WarpSyncError("an operand's register was written while its wgmma was under way")
        if (g.u4[self.sums][:, self.lanes] != POISON).any():
            raise WarpSyncError("a sum's register was written while its wgmma was under way")
        assert self.known is not None
        columns = 2 * len(self.sums)
        per_word = PER_WORD[self.kind]
        left = a_fragment(decode(np.ascontiguousarray(self.operand.T), self.kind), 8 * per_word, per_word)
        right = _right_operand(g, self.right, columns, self.transposed, int(self.lanes[0]), self.kind)
        total = _sum_matrix(self.known.astype(np.float64)) + left @ right
        registers = _sum_registers(total.astype(np.float32))
        follower = next((product for product in later if product.sums == self.sums), None)
        if follower is not None:
            if follower.known is None:
                follower.known = registers
        else:
            g.u4[np.ix_(self.sums, self.lanes)] = registers.view(np.uint32)


@dataclass
class Pipeline:
    """What a warp has under way."""

    groups: list[list[Product]]
    fenced: bool = False

    def products(self) -> list[Product]:
        return [product for group in self.groups for product in group]


def build(program: Program, instruction: Instruction) -> Exchange:
    """Of `wgmma`, which all lanes of a warp execute together."""
    parts = instruction.parts
    if parts[1] == "fence":
        return _fence
    if parts[1] == "commit_group":
        return _commit
    if parts[1] == "wait_group":
        left = program.operands.read(instruction.operands[0], U32)
        return lambda g, members: _wait(g, int(left(g)[0]))
    if parts[1] == "mma_async":
        return _multiply(program, instruction)
    raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")


def _pipelines(g: Gang, name: str) -> list[tuple[Array, Pipeline]]:
    """Lanes and pipeline of each warp that is here."""
    return [
        (np.arange(start, start + WARP), g.pipelines.setdefault(start, Pipeline([[]])))
        for start in whole_warps(g, name)
    ]


def _fence(g: Gang, members: Array) -> None:
    for _, pipeline in _pipelines(g, "wgmma.fence"):
        pipeline.fenced = True


def _commit(g: Gang, members: Array) -> None:
    for _, pipeline in _pipelines(g, "wgmma.commit_group"):
        pipeline.groups.append([])
        pipeline.fenced = False


def _wait(g: Gang, left: int) -> None:
    for _, pipeline in _pipelines(g, "wgmma.wait_group"):
        while len(pipeline.groups) - 1 > left:
            group = pipeline.groups.pop(0)
            while group:
                product = group.pop(0)
                product.finish(g, group + pipeline.products())
    g.effects += 1


def _multiply(program: Program, instruction: Instruction) -> Exchange:
    """wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16 or k32.f32.e4m3.e4m3 with the left operand in registers. Sums
    in f64, rounded once: a tensor core keeps fewer bits of e4m3's.
    """
    parts, operands = instruction.parts, instruction.operands
    kind = parts[-1]
    shape = re.fullmatch(rf"m64n(\d+)k{8 * PER_WORD.get(kind, 0)}", parts[4])
    if shape is None or parts[5:] != ("f32", kind, kind) or not isinstance(operands[1], Vec):
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")
    sums, left = (_rows(program, vector) for vector in (elements(operands[0]), elements(operands[1])))
    if 2 * len(sums) != int(shape[1]) or len(left) != 4 or len(set(sums)) != len(sums):
        raise UnknownInstruction(f"{len(sums)} sums and {len(left)} words of an operand for {parts[4]}")
    factors = [int(program.operands.read(o, U32)(None)[0]) for o in operands[4:]]  # type: ignore[arg-type]
    # Only what is 16 bits wide can be transposed.
    transposed = factors.pop() if kind == "bf16" else 0
    if factors != [1, 1]:
        raise UnknownInstruction("wgmma with negated operands is not modelled")
    right, adds = program.operands.read(operands[2], B64), program.operands.read(operands[3], PRED)

    def run(g: Gang, members: Array) -> None:
        g.effects += 1
        descriptors, added = np.broadcast_to(right(g), g.lanes), np.broadcast_to(adds(g), g.lanes)
        for lanes, pipeline in _pipelines(g, "wgmma.mma_async"):
            if not pipeline.fenced:
                raise WarpSyncError("wgmma.mma_async without a wgmma.fence since the last commit_group")
            if len(set(descriptors[lanes])) > 1 or len(set(added[lanes])) > 1:
                raise WarpSyncError("a wgmma's descriptor and scale must be the same in all lanes")
            known = None
            if not added[lanes[0]]:
                known = np.zeros((len(sums), WARP), np.float32)
            elif not any(product.sums == sums for product in pipeline.products()):
                known = g.u4[np.ix_(sums, lanes)].view(np.float32)
            operand = g.u4[np.ix_(left, lanes)]
            right_operand = int(descriptors[lanes[0]])
            product = Product(lanes, sums, left, operand, right_operand, bool(transposed), known, kind)
            pipeline.groups[-1].append(product)
            g.u4[np.ix_(sums, lanes)] = POISON

    return run


def _rows(program: Program, registers: tuple[object, ...]) -> list[int]:
    slots = [program.operands.slot(register) for register in registers if isinstance(register, Reg)]
    if len(slots) != len(registers) or any(slot.file != "u4" for slot in slots):
        raise UnknownInstruction("wgmma takes 32-bit registers")
    return [slot.index for slot in slots]


def _right_operand(g: Gang, descriptor: int, columns: int, transposed: bool, lane: int, kind: str) -> Array:
    """f8 [depth, columns] in cells of half the depth, or transposed of 8 columns; no swizzle."""
    start, depth_step, column_step = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    if descriptor >> 46:
        raise UnknownInstruction("a wgmma descriptor with a swizzle or an offset is not modelled")
    # Eight cells that follow one another, [8 in depth, 8 columns] either way.
    blocks = start + np.arange(CELLS)[:, None] * depth_step + np.arange(columns // 8) * column_step
    addresses = (blocks[..., None] + np.arange(8) * 16).reshape(-1).astype(np.uint64)
    cells = load(g, "shared", addresses, _CELL, np.full(len(addresses), lane))
    for address in blocks.reshape(-1):
        memory, offset = _group_of_cells(g, int(address))
        g.machine.memory.check_proxy(memory, offset, 128, int(g.threads[lane]))
    values = decode(np.ascontiguousarray(cells).view(np.uint32).reshape(len(addresses), 4), kind)
    values = values.reshape(CELLS, columns // 8, 8, -1)
    order = (0, 2, 1, 3) if transposed else (0, 3, 1, 2)
    return values.transpose(order).reshape(-1, columns)


def _group_of_cells(g: Gang, address: int) -> tuple[Allocation, int]:
    return locate(g, "shared", address, 16)


def _sum_matrix(registers: Array) -> Array:
    """[sums, 32 lanes] to [16, columns]: as mma's, 8 columns after 8 columns."""
    groups = registers.reshape(-1, 2, 2, 8, 4)  # 8 columns, upper or lower row, neighbour, lane / 4, lane % 4
    return groups.transpose(1, 3, 0, 4, 2).reshape(16, -1)


def _sum_registers(matrix: Array) -> Array:
    groups = matrix.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(groups).reshape(-1, WARP)
