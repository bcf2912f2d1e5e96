"""Tensor core products of a warpgroup on Hopper: asynchronous, the left operand in registers, the right one in shared
memory.

A warpgroup is 4 whole warps, the first of which has a number that 4 divides. All of them execute each of these
functions. Warp w's part of the 64-row left operand is rows 16w … 16w + 15, in the fragments of `warp_matrix`, and so
are its sums, 8 columns after 8 columns.

Registers of a product that is under way belong to it: its operands and sums may be touched only after `await_products`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels.dsl import Float32, T, Uint32, dsl_user_op, ir, llvm
from rose_dist.kernels.inline_asm import asm as _asm

CELL_BYTES = 16
"""8 bf16 of the right operand: what is contiguous in shared memory."""


def descriptor(address: Any, deeper: int) -> Any:
    """The lower half of the descriptor of a right operand that lies at a shared address, in cells: the next 8 of its
    depth (e4m3: 16) come `deeper` cells after the first.
    """
    # PTX ISA, matrix descriptor, no swizzle: address / 16 in 14 bits, then from bit 16 that distance / 16.
    return ((Uint32(address) & Uint32(0x3FFFF)) >> Uint32(4)) | Uint32(deeper << 16)


def further(low: Any, cells: Any) -> Any:
    """Of the operand that starts so many cells later."""
    return low + Uint32(cells)  # shared memory ends below 2^18 bytes: nothing is carried out of the address


@dataclass(frozen=True)
class RightOperand:
    """16 deep, in shared memory, in cells of 16 bytes: a cell is 8 bf16 of one column, or `transposed` of one row.
    Cells of 8 neighbouring columns, or rows, follow one another.
    """

    low: Any
    """From `descriptor`."""
    beside: int = 8
    """Cells from 8 columns to the next 8."""
    transposed: bool = False


@dsl_user_op
def multiply_add_async(sums: Any, left: Any, right: RightOperand, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """Start left · right + sums: fp32 [64, n] from bf16 [64, 16] and [16, n], n twice the number of a thread's `sums`.

    left: 4 words of pairs.
    """
    tied = [Float32(value) for value in sums]
    return _multiply(len(tied), tied, left, right, loc, ip)


@dsl_user_op
def multiply_async(count: int, left: Any, right: RightOperand, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """Start left · right, of which a thread has `count` sums."""
    return _multiply(count, [], left, right, loc, ip)


def _multiply(count: int, sums: list[Any], left: Any, right: RightOperand, loc: Any, ip: Any) -> list[Any]:
    struct = ir.Type.parse(f"!llvm.struct<({','.join(['f32'] * count)})>")
    places = ", ".join(f"${i}" for i in range(count))
    text = (
        f"{{ .reg .pred add; .reg .b64 right; setp.ne.b32 add, {int(bool(sums))}, 0; "
        f"mov.b64 right, {{${count + 4}, {right.beside}}}; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.bf16.bf16 {{{places}}}, "
        f"{{${count}, ${count + 1}, ${count + 2}, ${count + 3}}}, right, add, 1, 1, {int(right.transposed)}; }}"
    )
    constraints = ",".join(["=f"] * count + ["r"] * 5 + [str(i) for i in range(len(sums))])
    operands = [*(Uint32(word) for word in left), Uint32(right.low), *sums]
    return _floats(_asm(text, constraints, struct, *operands, loc=loc, ip=ip), count, loc, ip)


@dsl_user_op
def multiply_add_e4m3_async(
    sums: Any, left: Any, right: Any, cells: int, *, loc: Any = None, ip: Any = None
) -> list[Any]:
    """Start left · right + sums: fp32 [64, n] from e4m3 [64, 32] and [32, n], n twice the number of a thread's `sums`.

    left: 4 words, lane 4g + q's of rows g, g + 8, g and g + 8 of its warp's, from columns 4q, 4q, 4q + 16 and 4q + 16
    on; right: from `descriptor`; 8 columns have `cells` of 16 in depth. The tensor core keeps about 14 bits of a sum.
    """
    count = len(sums)
    struct = ir.Type.parse(f"!llvm.struct<({','.join(['f32'] * count)})>")
    places = ", ".join(f"${i}" for i in range(count))
    text = (
        "{ .reg .pred add; .reg .b64 right; setp.ne.b32 add, 1, 0; "
        f"mov.b64 right, {{${count + 4}, {cells * 8}}}; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k32.f32.e4m3.e4m3 {{{places}}}, "
        f"{{${count}, ${count + 1}, ${count + 2}, ${count + 3}}}, right, add, 1, 1; }}"
    )
    constraints = ",".join(["=f"] * count + ["r"] * 5 + [str(i) for i in range(count)])
    operands = [*(Uint32(word) for word in left), Uint32(right), *(Float32(value) for value in sums)]
    return _floats(_asm(text, constraints, struct, *operands, loc=loc, ip=ip), count, loc, ip)


@dsl_user_op
def fence_products(*, loc: Any = None, ip: Any = None) -> None:
    """Registers written before it may be operands and sums of products after it."""
    _asm("wgmma.fence.sync.aligned;", "", None, loc=loc, ip=ip)


@dsl_user_op
def commit_products(*, loc: Any = None, ip: Any = None) -> None:
    """The products since the last commit become a group."""
    _asm("wgmma.commit_group.sync.aligned;", "", None, loc=loc, ip=ip)


@dsl_user_op
def await_products(left: int, *, loc: Any = None, ip: Any = None) -> None:
    """Until all groups but the last `left` are done: what they read is free."""
    _asm(f"wgmma.wait_group.sync.aligned {left};", "", None, loc=loc, ip=ip)


@dsl_user_op
def await_sums(sums: Any, left: int = 0, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """Until all groups but the last `left` are done; the sums, which the compiler can't read any earlier."""
    count = len(sums)
    struct = ir.Type.parse(f"!llvm.struct<({','.join(['f32'] * count)})>")
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)])
    operands = [Float32(value) for value in sums]
    text = f"wgmma.wait_group.sync.aligned {left};"
    return _floats(_asm(text, constraints, struct, *operands, loc=loc, ip=ip), count, loc, ip)


def _floats(struct: Any, count: int, loc: Any, ip: Any) -> list[Any]:
    return [Float32(llvm.extractvalue(T.f32(), struct, [i], loc=loc, ip=ip)) for i in range(count)]
