"""Tensor core products of a warp, and copies from global into shared memory that take no registers.

Addresses in shared memory are u32, in global memory `Int64`. Fragments are those of PTX's `mma.m16n8k16`: lane 4g + j
holds, as pairs of bf16 or fp16,

    a  (16x16)  rows g, g + 8, g, g + 8 at columns 2j, 2j, 2j + 8, 2j + 8 and the next
    b  (16x8)   column g at rows 2j and 2j + 8 and the next
    c  (16x8)   row g at columns 2j and the next, row g + 8 at the same (fp32)
"""

from __future__ import annotations

from typing import Any

from rose_dist.kernels.dsl import Float32, Int64, T, Uint32, dsl_user_op, ir, llvm
from rose_dist.kernels.inline_asm import asm as _asm
from rose_dist.kernels.ptx import LEAVES_FIRST


@dsl_user_op
def multiply_add(c: Any, a: Any, b: Any, kind: str, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """a · b + c: four fp32 from four fp32 and four and two words of pairs of `kind`, "bf16" or "f16". All lanes of the
    warp must arrive.
    """
    struct = ir.Type.parse("!llvm.struct<(f32,f32,f32,f32)>")
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    operands = [*(Uint32(word) for word in (*a, *b)), *(Float32(value) for value in c)]
    sums = _asm(text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", struct, *operands, volatile=False, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), sums, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def transpose(word: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """An 8x8 matrix of 16-bit elements, of which lane 4g + j holds those of row g at columns 2j and 2j + 1, transposed.
    All lanes of the warp must arrive.
    """
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return Uint32(_asm(text, "=r,r", T.i32(), Uint32(word), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def multiply_bf16x2(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Two bf16 products, nearest even; subnormals are kept."""
    text = "mul.rn.bf16x2 $0, $1, $2;"
    return Uint32(_asm(text, "=r,r,r", T.i32(), Uint32(a), Uint32(b), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def rotate_left(a: Any, by: int, *, loc: Any = None, ip: Any = None) -> Any:
    """A u32 rotated by a number of bits known at compile time."""
    text = f"shf.l.wrap.b32 $0, $1, $1, {by};"
    return Uint32(_asm(text, "=r,r", T.i32(), Uint32(a), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def spread_half(a: Any, which: int, *, loc: Any = None, ip: Any = None) -> Any:
    """The lower (0) or upper (1) half of a u32 as both: no instruction of its own where halves are multiplied."""
    half = ("low", "high")[which]
    text = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; mov.b32 $0, {{{half}, {half}}}; }}"
    return Uint32(_asm(text, "=r,r", T.i32(), Uint32(a), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def permute(low: Any, high: Any, selector: int, *, loc: Any = None, ip: Any = None) -> Any:
    """Four bytes of {high, low} by PTX's `prmt`."""
    text = f"prmt.b32 $0, $1, $2, {selector:#x};"
    return Uint32(_asm(text, "=r,r,r", T.i32(), Uint32(low), Uint32(high), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def permute_by(low: Any, high: Any, selector: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """`permute` with a selector in a register."""
    operands = (Uint32(low), Uint32(high), Uint32(selector))
    return Uint32(_asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", T.i32(), *operands, volatile=False, loc=loc, ip=ip))


@dsl_user_op
def add_byte(word: Any, which: int, to: Any, times: int, *, loc: Any = None, ip: Any = None) -> Any:
    """Byte `which` of a u32 times up to 255, plus `to`, modulo 2^32, in one instruction that is not one of the integer
    unit's.
    """
    text = f"dp4a.u32.u32 $0, $1, {times << 8 * which:#x}, $2;"
    return Uint32(_asm(text, "=r,r,r", T.i32(), Uint32(word), Uint32(to), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def upper_half(word: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """A u32 shifted right by 16, in one instruction that is not one of the integer unit's."""
    text = "{ .reg .b32 zero; mov.b32 zero, 0; dp2a.lo.u32.u32 $0, $1, 0x100, zero; }"
    return Uint32(_asm(text, "=r,r", T.i32(), Uint32(word), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def merge(a: Any, b: Any, mask: int, *, loc: Any = None, ip: Any = None) -> Any:
    """The bits of `a` in `mask`, and those of `b` elsewhere."""
    text = f"lop3.b32 $0, $1, $2, {mask:#x}, 0xE4;"
    return Uint32(_asm(text, "=r,r,r", T.i32(), Uint32(a), Uint32(b), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def to_f16x2(low: Any, high: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Two fp32 as fp16 in a u32, nearest even."""
    text = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return Uint32(_asm(text, "=r,f,f", T.i32(), Float32(low), Float32(high), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def widen_e4m3x4(word: Any, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """The four e4m3 of a u32 as two words of fp16 pairs; exact."""
    text = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    )
    kind = ir.Type.parse("!llvm.struct<(i32,i32)>")
    return _words(_asm(text, "=r,=r,r", kind, Uint32(word), volatile=False, loc=loc, ip=ip), 2, loc, ip)


@dsl_user_op
def copy_async(
    shared: Any, source: Any, count: Any, size: int, ahead: int = 0, *, loc: Any = None, ip: Any = None
) -> None:  # fmt: skip
    """Start copying `count` (u32) of 4, 8 or 16 bytes, 16 past L1, and zeros for the rest; of 0 nothing is read.

    ahead: bytes, 128 or 256, that the L2 is to fetch together with these: an aligned piece of memory.
    """
    level = "cg" if size == 16 else "ca"
    hint = f".L2::{ahead}B" if ahead else ""
    text = f"cp.async.{level}.shared.global{hint} [$0], [$1], {size}, $2;"
    _asm(text, "r,l,r", None, Uint32(shared), Int64(source), Uint32(count), loc=loc, ip=ip)


@dsl_user_op
def copy_ahead(shared: Any, source: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying 16 bytes of weights past L1, 256 bytes ahead into L2 and first to leave it."""
    text = "cp.async.cg.shared.global.L2::cache_hint.L2::256B [$0], [$1], 16, $2;"
    _asm(text, "r,l,l", None, Uint32(shared), Int64(source), Int64(LEAVES_FIRST), loc=loc, ip=ip)


@dsl_user_op
def commit_copies(*, loc: Any = None, ip: Any = None) -> None:
    """This thread's copies since the last commit become a group; it may be empty."""
    _asm("cp.async.commit_group;", "", None, loc=loc, ip=ip)


@dsl_user_op
def await_copies(left: int, *, loc: Any = None, ip: Any = None) -> None:
    """Until all of this thread's groups but the last `left` have arrived, visible to this thread."""
    _asm(f"cp.async.wait_group {left};", "", None, loc=loc, ip=ip)


@dsl_user_op
def load_shared_16b(address: Any, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """Four words of shared memory."""
    kind = ir.Type.parse("!llvm.struct<(i32,i32,i32,i32)>")
    words = _asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", kind, Uint32(address), loc=loc, ip=ip)
    return _words(words, 4, loc, ip)


@dsl_user_op
def load_matrices(address: Any, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """Four 8x8 matrices of 16-bit elements: word m of lane 4g + j holds of matrix m row g, columns 2j and 2j + 1.

    Lane 8m + r gives the shared address of row r of matrix m. All lanes of the warp must arrive.
    """
    kind = ir.Type.parse("!llvm.struct<(i32,i32,i32,i32)>")
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return _words(_asm(text, "=r,=r,=r,=r,r", kind, Uint32(address), loc=loc, ip=ip), 4, loc, ip)


@dsl_user_op
def load_shared_8b(address: Any, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """Two words of shared memory."""
    kind = ir.Type.parse("!llvm.struct<(i32,i32)>")
    return _words(
        _asm("ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", kind, Uint32(address), loc=loc, ip=ip), 2, loc, ip
    )


@dsl_user_op
def store_shared_16b(address: Any, values: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Four fp32 into shared memory."""
    text = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
    _asm(text, "r,f,f,f,f", None, Uint32(address), *(Float32(value) for value in values), loc=loc, ip=ip)


@dsl_user_op
def store_shared_8b(address: Any, values: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Two fp32 into shared memory."""
    text = "st.shared.v2.f32 [$0], {$1, $2};"
    _asm(text, "r,f,f", None, Uint32(address), *(Float32(value) for value in values), loc=loc, ip=ip)


def _words(struct: Any, count: int, loc: Any, ip: Any) -> list[Any]:
    return [Uint32(llvm.extractvalue(T.i32(), struct, [i], loc=loc, ip=ip)) for i in range(count)]
