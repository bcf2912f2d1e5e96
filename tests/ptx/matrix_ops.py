"""mma.sync, ldmatrix, stmatrix and movmatrix: warp-wide matrix fragments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import number_formats as nf
from tests.ptx.errors import UnknownInstruction, WarpSyncError
from tests.ptx.gang import WARP, Gang
from tests.ptx.memory_model import Access
from tests.ptx.number_formats import MINI_FLOATS, Array
from tests.ptx.opcode import elements
from tests.ptx.ptx_types import ptx_type
from tests.ptx.spaces import load, store, words
from tests.ptx.syntax import Instruction

if TYPE_CHECKING:
    from tests.ptx.program import Program

Exchange = Callable[[Gang, Array], None]

B32 = ptx_type("b32")
_ROW = Access(16, 2)
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_SHAPES = {"m16n8k4": 4, "m16n8k8": 8, "m16n8k16": 16, "m16n8k32": 32}


def decode(raw: Array, kind: str) -> Array:
    """Elements of packed registers (…, registers) u4 -> (…, registers * 32 / bits) f64."""
    bits = _BITS[kind]
    parts = np.ascontiguousarray(raw).view(np.dtype(f"u{bits // 8}"))
    if kind == "bf16":
        return nf.bf16_to_f32(parts).astype(np.float64)
    if kind in ("f16", "tf32"):
        return parts.view(np.float16 if kind == "f16" else np.float32).astype(np.float64)
    if kind in MINI_FLOATS:
        return MINI_FLOATS[kind].decode(parts).astype(np.float64)
    return parts.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)


def mma(program: Program, instruction: Instruction) -> Exchange:
    """mma.sync.aligned.m16n8kK.row.col: sums in f64, rounded once (PTX specifies neither order nor width)."""
    parts = instruction.parts
    depth = next((d for name, d in _SHAPES.items() if name in parts), None)
    kinds = parts[-4:]
    if depth is None or parts[4:6] != ("row", "col") or kinds[1] not in _BITS or kinds[2] not in _BITS:
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")
    result, of_a, of_b = kinds[0], kinds[1], kinds[2]
    if result not in ("f32", "s32") or kinds[3] != result:
        raise UnknownInstruction(f"mma with .{result} accumulators is not modelled")
    puts = [program.operands.write(o, B32) for o in elements(instruction.operands[0])]
    reads = [[program.operands.read(o, B32) for o in elements(operand)] for operand in instruction.operands[1:4]]
    per_lane = 32 // _BITS[of_a]

    def run(g: Gang, members: Array) -> None:
        warps = whole_warps(g, "mma")
        a, b, c = (np.stack([np.broadcast_to(r(g), g.lanes) for r in reads_of], axis=1) for reads_of in reads)
        outputs = np.zeros((g.lanes, 4), np.uint32)
        for start in warps:
            warp = slice(start, start + WARP)
            left = a_fragment(decode(a[warp], of_a), depth, per_lane)
            right = _b_fragment(decode(b[warp], of_b), depth, per_lane)
            accumulator = c[warp].view(np.float32 if result == "f32" else np.int32).astype(np.float64)
            total = left @ right + _c_matrix(accumulator)
            rounded = total.astype(np.float32) if result == "f32" else total.astype(np.int64).astype(np.int32)
            outputs[warp] = _c_fragment(rounded).view(np.uint32)
        for i, put in enumerate(puts):
            put(g, np.ascontiguousarray(outputs[:, i]))

    return run


def whole_warps(g: Gang, name: str) -> list[int]:
    """First lanes of the warps that are here, each of which must be here as a whole."""
    if g.lanes % WARP:
        raise WarpSyncError(f"{name} needs all lanes of its warp")
    here = g.mask.reshape(-1, WARP)
    if (here.any(1) != here.all(1)).any():
        raise WarpSyncError(f"{name} needs all lanes of its warp")
    return [int(warp) * WARP for warp in np.flatnonzero(here.all(1))]


def _row_lanes(g: Gang, name: str, count: int) -> tuple[Array, Array]:
    """Lanes of the warps that are here [warps, 32], and those of them that give an address [warps * 8 * count]."""
    lanes = np.array(whole_warps(g, name))[:, None] + np.arange(WARP)
    return lanes, lanes[:, : 8 * count].reshape(-1)


def a_fragment(values: Array, depth: int, per_lane: int) -> Array:
    """(32 lanes, registers * per_lane) -> (16, depth): lane l holds columns of rows l/4 and l/4 + 8."""
    parts = values.reshape(8, 4, -1, 2, per_lane)  # lane / 4, lane % 4, half of the depth, upper or lower row, element
    return parts.transpose(3, 0, 2, 1, 4).reshape(16, depth)


def _b_fragment(values: Array, depth: int, per_lane: int) -> Array:
    """(32 lanes, registers * per_lane) -> (depth, 8): lane l holds column l/4."""
    parts = values.reshape(8, 4, -1, per_lane)  # lane / 4, lane % 4, register, element
    return parts.transpose(2, 1, 3, 0).reshape(depth, 8)


def _c_matrix(values: Array) -> Array:
    """(32 lanes, 4) -> (16, 8): lane l holds columns 2(l%4) and the next, of rows l/4 and l/4 + 8."""
    return values.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)


def _c_fragment(matrix: Array) -> Array:
    return np.ascontiguousarray(matrix.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3)).reshape(32, 4)


def ldmatrix(program: Program, instruction: Instruction) -> Exchange:
    """8x8 matrices of 16-bit elements: lane 8m + r gives the address of row r of matrix m."""
    parts = instruction.parts
    count, transposed = _matrix_form(parts)
    puts = [program.operands.write(o, B32) for o in elements(instruction.operands[0])]
    where = program.operands.gather_address(instruction.operands[1])

    def run(g: Gang, members: Array) -> None:
        warps, lanes = _row_lanes(g, "ldmatrix", count)
        rows = load(g, "shared", where(g, lanes), _ROW, lanes).view(np.uint16).reshape(-1, count, 8, 8)
        rows = rows.transpose(0, 1, 3, 2) if transposed else rows
        pairs = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, count, WARP)
        for i, put in enumerate(puts):
            values = np.zeros(g.lanes, np.uint32)
            values[warps] = pairs[:, i]
            put(g, values)

    return run


def stmatrix(program: Program, instruction: Instruction) -> Exchange:
    parts = instruction.parts
    count, transposed = _matrix_form(parts)
    reads = [program.operands.read(o, B32) for o in elements(instruction.operands[1])]
    where = program.operands.gather_address(instruction.operands[0])

    def run(g: Gang, members: Array) -> None:
        warps, lanes = _row_lanes(g, "stmatrix", count)
        pairs = np.stack([np.broadcast_to(r(g), g.lanes)[warps] for r in reads], axis=1)
        rows = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, count, 8, 8)
        rows = np.ascontiguousarray(rows.transpose(0, 1, 3, 2) if transposed else rows)
        g.effects += 1
        store(g, "shared", where(g, lanes), words(rows.view(np.uint8).reshape(-1, 16), 16), _ROW, lanes)

    return run


def movmatrix(program: Program, instruction: Instruction) -> Exchange:
    """An 8x8 matrix of 16-bit elements transposed: lane l holds elements 2(l%4) and the next of row l/4."""
    if instruction.parts != ("movmatrix", "sync", "aligned", "m8n8", "trans", "b16"):
        raise UnknownInstruction(f"{'.'.join(instruction.parts)} is not modelled")
    put, read = (
        program.operands.write(instruction.operands[0], B32),
        program.operands.read(instruction.operands[1], B32),
    )

    def run(g: Gang, members: Array) -> None:
        lanes = np.array(whole_warps(g, "movmatrix"))[:, None] + np.arange(WARP)
        pairs = np.ascontiguousarray(np.broadcast_to(read(g), g.lanes)[lanes]).astype(np.uint32)
        rows = pairs.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        values = np.zeros(g.lanes, np.uint32)
        values[lanes] = np.ascontiguousarray(rows).reshape(-1, 64).view(np.uint32)
        put(g, values)

    return run


def _matrix_form(parts: tuple[str, ...]) -> tuple[int, bool]:
    count = next((int(p[1:]) for p in parts if p in ("x1", "x2", "x4")), 0)
    if not count or "m8n8" not in parts or parts[-1] != "b16":
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")
    return count, "trans" in parts
