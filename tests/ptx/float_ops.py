"""Float arithmetic on numpy arrays with PTX's rounding, flushing and NaN rules."""

import ctypes
import ctypes.util
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx import number_formats as nf
from tests.ptx.errors import UnknownInstruction
from tests.ptx.number_formats import Array
from tests.ptx.ptx_types import Type

_MIDPOINT_MASK, _MIDPOINT = np.uint64(0x1FFFFFFF), np.uint64(0x10000000)
_F32_TINY = 2.0**-126
_libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
_libm.fma.restype = ctypes.c_double
_libm.fma.argtypes = [ctypes.c_double] * 3
_fma_f64 = np.vectorize(_libm.fma, otypes=[np.float64])

_CANONICAL_NAN: dict[str, Any] = {"f16": nf.F16_NAN, "f32": nf.F32_NAN, "f64": nf.F64_NAN}


def canonical(value: Array, kind: str = "f32") -> Array:
    nan = np.isnan(value)
    return np.where(nan, _CANONICAL_NAN[kind], value) if nan.any() else value


def flush(value: Array) -> Array:
    """Subnormal f32 to zero of the same sign."""
    tiny = np.abs(value) < np.float32(_F32_TINY)
    return np.where(tiny, np.copysign(np.float32(0), value), value) if tiny.any() else value


def saturate(value: Array) -> Array:
    return np.where(np.isnan(value), value.dtype.type(0), np.clip(value, 0, 1)).astype(value.dtype)


def _add_round_to_odd(product: Array, addend: Array) -> Array:
    """product + addend in f64, rounded to odd: a later rounding to 51 bits or fewer is then a single one."""
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.uint64)
    fix = (error != 0) & np.isfinite(total) & np.isfinite(error) & (bits & np.uint64(1) == 0)
    towards_zero = np.signbit(error) != np.signbit(total)
    return np.where(fix, np.where(towards_zero, bits - np.uint64(1), bits | np.uint64(1)), bits).view(np.float64)


def fma_f32(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """a·b + c with one rounding."""
    product, addend = np.multiply(a, b, dtype=np.float64), c.astype(np.float64)
    total = product + addend
    if mode == "rn":
        near_half = (total.view(np.uint64) & _MIDPOINT_MASK) == _MIDPOINT
        if not near_half.any() and not (np.abs(total) < _F32_TINY).any():
            return canonical(total.astype(np.float32))
    return canonical(nf.round_f64_to_f32(_add_round_to_odd(product, addend), mode))


def _narrow(kind: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """(raw lanes -> f64, f64 rounded to odd -> raw lanes) of f16 and bf16."""
    if kind == "bf16":
        return (lambda bits: nf.bf16_to_f32(bits).astype(np.float64), nf.f64_to_bf16)
    return (
        lambda bits: bits.view(np.float16).astype(np.float64),
        lambda wide: canonical(wide.astype(np.float16), "f16").view(np.uint16),
    )


def fma_narrow(kind: str, a: Array, b: Array, c: Array, *, relu: bool = False) -> Array:
    """f16 or bf16 a·b + c on uint16 lanes with one rounding."""
    widen, round_ = _narrow(kind)
    result = _add_round_to_odd(widen(a) * widen(b), widen(c))
    return round_(np.where(result > 0, result, np.where(np.isnan(result), result, 0.0)) if relu else result)


def min_max(a: Array, b: Array, kind: str, *, smaller: bool, nan: bool) -> Array:
    """PTX min/max: -0 < +0; a NaN operand gives the other one, or NaN with .NaN."""
    raw = np.dtype(f"u{a.dtype.itemsize}")
    first = np.where((a < b) == smaller, a, b)
    a_raw, b_raw = np.broadcast_arrays(a.view(raw), b.view(raw))
    same = (a_raw | b_raw) if smaller else (a_raw & b_raw)
    result = np.where(a == b, same.view(a.dtype), first)
    any_nan = np.isnan(a) | np.isnan(b)
    if not any_nan.any():
        return result
    other = _CANONICAL_NAN[kind] if nan else np.where(np.isnan(a), b, a)
    return canonical(np.where(any_nan, other, result), kind)


def lanes_of_pair(bits: Array) -> tuple[Array, Array]:
    """(low, high) uint16 lanes of packed 32-bit values."""
    return bits.astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)


def pair(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def comparable(bits: Array, kind: str) -> Array:
    """The value of f16/bf16 lanes as f32 for comparisons."""
    return nf.bf16_to_f32(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def _approx(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An .approx instruction as the exact value rounded to f32."""

    def apply(value: Array) -> Array:
        with np.errstate(all="ignore"):
            return canonical(function(value.astype(np.float64)).astype(np.float32))

    return apply


APPROXIMATIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": _approx(np.exp2),
    "lg2": _approx(np.log2),
    "sin": _approx(np.sin),
    "cos": _approx(np.cos),
    "tanh": _approx(np.tanh),
    "rcp": _approx(lambda x: 1 / x),
    "rsqrt": _approx(lambda x: 1 / np.sqrt(x)),
    "sqrt": _approx(np.sqrt),
}


def _f32_arithmetic(name: str, mode: str) -> Callable[..., Array]:
    if name == "fma":
        return lambda a, b, c: fma_f32(a, b, c, mode)
    exact: dict[str, Callable[[Array, Array], Array]] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
    }
    if mode == "rn":
        operation = exact[name]
        return lambda a, b: canonical(operation(a, b))
    one, minus_zero = np.ones(1, np.float32), np.full(1, -0.0, np.float32)
    directed: dict[str, Callable[[Array, Array], Array]] = {
        "add": lambda a, b: fma_f32(a, one, b, mode),
        "sub": lambda a, b: fma_f32(b, -one, a, mode),
        "mul": lambda a, b: fma_f32(a, b, minus_zero, mode),
    }
    if name not in directed:
        raise UnknownInstruction(f"{name}.{mode}.f32 is not modelled")
    return directed[name]


def arithmetic(name: str, kind: Type, modifiers: set[str]) -> Callable[..., Array]:
    """add, sub, mul, fma, div of any float type, with .ftz, .sat, .relu and a rounding mode."""
    modes = modifiers & {"rn", "rz", "rm", "rp"}
    mode = next(iter(modes), "rn")
    if kind.name == "f32":
        base = _f32_arithmetic(name, mode)
        ftz, sat = "ftz" in modifiers, "sat" in modifiers

        def run(*operands: Array) -> Array:
            result = base(*(flush(o) for o in operands)) if ftz else base(*operands)
            result = flush(result) if ftz else result
            return saturate(result) if sat else result

        return run if ftz or sat else base
    if mode != "rn":
        raise UnknownInstruction(f"{name}.{mode}.{kind.name} is not modelled")
    if kind.name == "f64":
        f64: dict[str, Callable[..., Array]] = {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "div": np.divide,
            "fma": _fma_f64,
        }
        operation = f64[name]
        return lambda *operands: canonical(operation(*operands), "f64")
    if kind.name == "f32x2":
        return _packed_f32(name, modifiers)
    return _narrow_arithmetic(name, kind.name, relu="relu" in modifiers)


def _packed_f32(name: str, modifiers: set[str]) -> Callable[..., Array]:
    from tests.ptx.ptx_types import ptx_type  # noqa: PLC0415 — the one recursive use

    single = arithmetic(name, ptx_type("f32"), modifiers)

    def run(*operands: Array) -> Array:
        low = single(*(o.astype(np.uint32).view(np.float32) for o in operands)).view(np.uint32)
        high = single(*((o >> np.uint64(32)).astype(np.uint32).view(np.float32) for o in operands)).view(np.uint32)
        return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))

    return run


def _narrow_arithmetic(name: str, kind: str, *, relu: bool) -> Callable[..., Array]:
    """f16, bf16 and their packed pairs; everything is an fma, whose one rounding is then the operation's."""
    half = kind.removesuffix("x2")
    one = np.full(1, 0x3F80 if half == "bf16" else 0x3C00, np.uint16)
    minus_one, minus_zero = one | np.uint16(0x8000), np.full(1, 0x8000, np.uint16)
    lanes: dict[str, Callable[..., Array]] = {
        "fma": lambda a, b, c: fma_narrow(half, a, b, c, relu=relu),
        "add": lambda a, b: fma_narrow(half, a, one, b),
        "sub": lambda a, b: fma_narrow(half, b, minus_one, a),
        "mul": lambda a, b: fma_narrow(half, a, b, minus_zero),
    }
    if name not in lanes:
        raise UnknownInstruction(f"{name}.{kind} is not modelled")
    operation = lanes[name]
    return operation if kind == half else by_halves(operation)


def by_halves(operation: Callable[..., Array]) -> Callable[..., Array]:
    """Applies a 16-bit operation to both halves of packed operands."""

    def run(*operands: Array) -> Array:
        halves = [lanes_of_pair(o) for o in operands]
        return pair(operation(*(h[0] for h in halves)), operation(*(h[1] for h in halves)))

    return run
