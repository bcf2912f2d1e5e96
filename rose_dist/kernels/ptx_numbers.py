"""PTX instructions on numbers in registers: arithmetic with a known rounding, and conversions.

Device code finds them under `ptx`.
"""

from __future__ import annotations

from typing import Any

from rose_dist.kernels.dsl import Float32, T, Uint16, Uint32, dsl_user_op, ir, llvm
from rose_dist.kernels.inline_asm import asm as _asm


@dsl_user_op
def reciprocal(a: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """1 / a in fp32, rounded to nearest even, for 2^−125 ≤ |a| ≤ 2^125; NaN for infinities and NaN.

    One Newton step from the approximation, which is what `rcp.rn` does in that range; its way out for the rest is a
    call, and a call costs a stack.
    """
    text = (
        "{ .reg .f32 guess, error; rcp.approx.ftz.f32 guess, $1; neg.f32 error, $1; "
        "fma.rn.f32 error, error, guess, 0f3F800000; fma.rn.f32 $0, guess, error, guess; }"
    )
    return Float32(_asm(text, "=f,f", T.f32(), Float32(a), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def product(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """a · b in fp32, rounded, and never fused with an addition that follows."""
    text = "mul.rn.f32 $0, $1, $2;"
    return Float32(_asm(text, "=f,f,f", T.f32(), Float32(a), Float32(b), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def multiply_add(a: Any, b: Any, c: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """a · b + c in fp32, rounded once."""
    operands = (Float32(a), Float32(b), Float32(c))
    return Float32(_asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", T.f32(), *operands, volatile=False, loc=loc, ip=ip))


@dsl_user_op
def to_bf16x2(low: Any, high: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Two fp32 as bf16 in a u32, nearest even."""
    text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return Uint32(_asm(text, "=r,f,f", T.i32(), Float32(low), Float32(high), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def round_u32(value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """An fp32 as a u32, nearest even; 0 for anything below and for NaN, 2^32 − 1 for anything beyond."""
    return Uint32(_asm("cvt.rni.u32.f32 $0, $1;", "=r,f", T.i32(), Float32(value), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def absolute(value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """|value| of an fp32."""
    return Float32(_asm("abs.f32 $0, $1;", "=f,f", T.f32(), Float32(value), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def bits(value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The 32 bits of an fp32."""
    return Uint32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def from_bits(value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The fp32 with these 32 bits."""
    return Float32(llvm.bitcast(T.f32(), Uint32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def to_e4m3x2(low: Any, high: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Two fp32 as e4m3 in a u16, nearest even, saturating at ±448; NaN becomes 0x7F."""
    text = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
    return Uint16(_asm(text, "=h,f,f", T.i16(), Float32(low), Float32(high), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def from_e4m3x2(pair: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any]:
    """The two fp32 of a u16 of e4m3; exact."""
    text = "cvt.rn.f16x2.e4m3x2 $0, $1;"
    halves = _asm(text, "=r,h", T.i32(), Uint16(pair), volatile=False, loc=loc, ip=ip)
    return _widen_f16x2(halves, loc, ip)


@dsl_user_op
def to_e2m1x2(low: Any, high: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Blackwell only: two fp32 as e2m1 in the low byte of a u32, nearest even, saturating at ±6; NaN becomes +6."""
    text = "{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1; cvt.u32.u8 $0, pair; }"
    return Uint32(_asm(text, "=r,f,f", T.i32(), Float32(low), Float32(high), volatile=False, loc=loc, ip=ip))


@dsl_user_op
def from_e2m1x2(pair: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any]:
    """Blackwell only: the two fp32 of the low byte of a u32 of e2m1; exact."""
    text = "{ .reg .b8 pair; cvt.u8.u32 pair, $1; cvt.rn.f16x2.e2m1x2 $0, pair; }"
    return _widen_f16x2(_asm(text, "=r,r", T.i32(), Uint32(pair), volatile=False, loc=loc, ip=ip), loc, ip)


def _widen_f16x2(halves: Any, loc: Any, ip: Any) -> tuple[Any, Any]:
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    kind = ir.Type.parse("!llvm.struct<(f32,f32)>")
    pair = _asm(text, "=f,=f,r", kind, Uint32(halves), volatile=False, loc=loc, ip=ip)
    low, high = (Float32(llvm.extractvalue(T.f32(), pair, [i], loc=loc, ip=ip)) for i in range(2))
    return low, high
