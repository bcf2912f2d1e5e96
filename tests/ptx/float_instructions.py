"""Float arithmetic instructions."""

from collections.abc import Callable

import numpy as np

from tests.ptx import float_ops as fl
from tests.ptx import number_formats as nf
from tests.ptx.convert_ops import convert
from tests.ptx.number_formats import Array
from tests.ptx.operation import ROUNDING, Operation
from tests.ptx.ptx_types import Type, ptx_type

_FLOAT_MODIFIERS = ROUNDING | {"ftz", "sat", "approx", "full", "relu", "satfinite"}


def arithmetic(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    """add, sub, mul, div, fma, mad of floats."""
    name, kind = parts[0], types[-1]
    if not modifiers <= _FLOAT_MODIFIERS:
        return None
    if len(types) > 1:
        return _mixed_arithmetic(name, types, modifiers)
    function = fl.arithmetic("fma" if name == "mad" else name, kind, modifiers)
    return Operation((kind,), (kind,) * (3 if name in ("fma", "mad") else 2), function)


def _mixed_arithmetic(name: str, types: list[Type], modifiers: set[str]) -> Operation | None:
    """f32 results of f16 or bf16 first operands: add and sub (narrow, f32), fma (narrow, narrow, f32)."""
    wide, narrow = types
    if wide.name != "f32" or narrow.name not in ("f16", "bf16") or name not in ("add", "sub", "fma"):
        return None
    function = fl.arithmetic(name, wide, modifiers)
    count = 2 if name == "fma" else 1

    def run(*operands: Array) -> Array:
        return function(*(fl.comparable(o, narrow.name) for o in operands[:count]), *operands[count:])

    return Operation((wide,), (*(narrow,) * count, wide), run)


def min_max(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind, smaller = types[-1], parts[0] == "min"
    if not modifiers <= {"ftz", "NaN", "abs", "xorsign"}:
        return None
    nan, ftz, magnitude, xorsign = (
        ("NaN" in modifiers),
        ("ftz" in modifiers),
        ("abs" in modifiers),
        ("xorsign" in modifiers),
    )

    def plain(a: Array, b: Array) -> Array:
        if ftz:
            a, b = fl.flush(a), fl.flush(b)
        sign = np.signbit(a) ^ np.signbit(b)
        if magnitude:
            a, b = np.abs(a), np.abs(b)
        result = fl.min_max(a, b, kind.name, smaller=smaller, nan=nan)
        return np.where(sign, -np.abs(result), np.abs(result)).astype(result.dtype) if xorsign else result

    def reduce(*operands: Array) -> Array:
        result = operands[0]
        for operand in operands[1:]:
            result = plain(result, operand)
        return result

    if kind.kind == "f":
        return Operation((kind,), (kind, kind), reduce, variadic=True)
    if magnitude or xorsign or ftz or kind.name not in ("bf16", "bf16x2", "f16x2"):
        return None
    half = kind.name.removesuffix("x2")
    nan_bits = nf.BF16_NAN if half == "bf16" else np.uint16(0x7FFF)

    def narrow(a: Array, b: Array) -> Array:
        x, y = fl.comparable(a, half), fl.comparable(b, half)
        wide = fl.min_max(x, y, "f32", smaller=smaller, nan=nan)
        exact = nf.f32_to_bf16(wide) if half == "bf16" else wide.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(wide), nan_bits, exact)

    return Operation((kind,), (kind, kind), narrow if half == kind.name else fl.by_halves(narrow))


def negate_absolute(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind, name = types[-1], parts[0]
    if not modifiers <= {"ftz"}:
        return None
    sign = {
        "f16": 0x8000,
        "bf16": 0x8000,
        "f32": 0x80000000,
        "f64": 1 << 63,
        "f16x2": 0x80008000,
        "bf16x2": 0x80008000,
    }.get(kind.name)
    if sign is None:
        return None
    raw = ptx_type(f"b{kind.bits}")
    bit = raw.dtype.type(sign)
    change = (lambda a: a ^ bit) if name == "neg" else (lambda a: a & ~bit)
    if "ftz" in modifiers and kind.name == "f32":
        return Operation((kind,), (kind,), lambda a: change(fl.flush(a).view(np.uint32)).view(np.float32))
    return Operation((raw,), (raw,), change)


def approximation(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind, name = types[-1], parts[0]
    if not modifiers <= {"approx", "ftz", "rn"}:
        return None
    if kind.name == "f64" and "rn" in modifiers and name in ("sqrt", "rcp"):
        function: Callable[[Array], Array] = np.sqrt if name == "sqrt" else np.reciprocal
        return Operation((kind,), (kind,), lambda a: fl.canonical(function(a), "f64"))
    if kind.name == "f32":
        base = fl.APPROXIMATIONS[name]
        if "ftz" in modifiers:
            return Operation((kind,), (kind,), lambda a: fl.flush(base(fl.flush(a))))
        return Operation((kind,), (kind,), base)
    half = kind.name.removesuffix("x2")
    if name not in ("ex2", "tanh") or half not in ("f16", "bf16"):
        return None

    def narrow(bits: Array) -> Array:
        wide = fl.APPROXIMATIONS[name](fl.comparable(bits, half))
        return nf.f32_to_bf16(wide) if half == "bf16" else fl.canonical(wide.astype(np.float16), "f16").view(np.uint16)

    if kind.kind == "f":
        return Operation((kind,), (kind,), lambda a: narrow(a.view(np.uint16)).view(np.float16))
    return Operation((kind,), (kind,), narrow if half == kind.name else fl.by_halves(narrow))


def copysign(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return Operation((kind,), (kind, kind), lambda a, b: np.copysign(b, a))


def cvt(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    known = ROUNDING | {"ftz", "sat", "satfinite", "relu"}
    if len(types) != 2 or not modifiers <= known:
        return None
    target, source = types
    packed_of_two = target.name.endswith("x2") and source.name == "f32"
    return Operation((target,), (source,) * (2 if packed_of_two else 1), convert(target, source, modifiers))
