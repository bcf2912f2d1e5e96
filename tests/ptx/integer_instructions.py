"""Integer, logic and bit-field instructions."""

import operator

import numpy as np

from tests.ptx import float_ops as fl
from tests.ptx import integer_ops as it
from tests.ptx.operation import U32, Operation
from tests.ptx.ptx_types import Type, ptx_type


def arithmetic(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    """add, sub, mul, div, mad of integers."""
    name, kind = parts[0], types[-1]
    if name in ("mul", "mad"):
        return _multiply(name, kind, modifiers)
    if name == "div":
        return Operation((kind,), (kind, kind), it.divide) if not modifiers else None
    function = {"add": operator.add, "sub": operator.sub}.get(name)
    if function is None or modifiers - {"sat"}:
        return None
    if kind.name in ("u16x2", "s16x2"):
        function = fl.by_halves(function)
    elif modifiers:
        function = it.saturating(function)
    return Operation((kind,), (kind, kind), function)


def _multiply(name: str, kind: Type, modifiers: set[str]) -> Operation | None:
    product = {
        frozenset({"lo"}): operator.mul,
        frozenset(): operator.mul,
        frozenset({"hi"}): it.multiply_high,
        frozenset({"wide"}): it.multiply_wide,
    }.get(frozenset(modifiers))
    if product is None:
        return None
    result = ptx_type(f"{kind.kind}{2 * kind.bits}") if modifiers == {"wide"} else kind
    if name == "mul":
        return Operation((result,), (kind, kind), product)
    return Operation((result,), (kind, kind, result), lambda a, b, c: product(a, b) + c)


def min_max(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind, pick = types[-1], np.minimum if parts[0] == "min" else np.maximum
    if modifiers - {"relu"} or kind.kind == "x":
        return None
    if modifiers:
        return Operation((kind,), (kind, kind), lambda a, b: np.maximum(pick(a, b), a.dtype.type(0)))
    return Operation((kind,), (kind, kind), pick)


def negate_absolute(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    function = operator.neg if parts[0] == "neg" else np.abs
    return Operation((types[-1],), (types[-1],), function) if not modifiers else None


def mul24(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    if modifiers != {"lo"}:
        return None
    if parts[0] == "mul24":
        return Operation((kind,), (kind,) * 2, it.multiply_24)
    return Operation((kind,), (kind,) * 3, lambda a, b, c: it.multiply_24(a, b) + c)


def logic(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    function = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[parts[0]]
    return Operation((kind,), (kind, kind), function) if not modifiers else None


def complement(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    if parts[0] == "cnot":
        return Operation((kind,), (kind,), lambda a: (a == 0).astype(a.dtype))
    return Operation((kind,), (kind,), operator.invert)


def shift(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return (
        Operation((kind,), (kind, U32), it.shift_left if parts[0] == "shl" else it.shift_right)
        if not modifiers
        else None
    )


def funnel(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    if not modifiers <= {"l", "r", "wrap", "clamp"}:
        return None
    return Operation((U32,), (U32,) * 3, it.funnel_shift(left="l" in modifiers, wrap="wrap" in modifiers))


def bit_fields(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    name, kind = parts[0], types[-1]
    if name == "bfe":
        return Operation((kind,), (kind, U32, U32), it.extract_field)
    if name == "bfi":
        return Operation((kind,), (kind, kind, U32, U32), it.insert_field)
    if name == "bmsk":
        return Operation((U32,), (U32, U32), lambda a, b: it.bit_mask(a, b, wrap="wrap" in modifiers))
    if name == "lop3":
        return Operation((kind,), (kind, kind, kind, U32), it.lop3)
    if name == "prmt":
        mode = next(iter(modifiers), None)
        return Operation((kind,), (kind, kind, kind), it.permute(mode))
    if name == "bfind":
        shift = "shiftamt" in modifiers
        return Operation((U32,), (kind,), lambda a: it.find_leading(a, shift_amount=shift))
    counts = {"popc": it.population_count, "clz": it.leading_zeros}
    if name in counts:
        return Operation((U32,), (kind,), counts[name])
    return Operation((kind,), (kind,), it.reverse_bits)


def rem(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return Operation((kind,), (kind, kind), it.remainder)


def sad(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return Operation((kind,), (kind,) * 3, it.sad)


def dot_pairs(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    return Operation((U32,), (U32, U32, U32), it.dot_pairs) if parts == ("dp2a", "lo", "u32", "u32") else None


def dot(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kinds = (types[0].name, types[1].name)
    result = ptx_type("s32" if "s32" in kinds else "u32")
    return Operation((result,), (U32, U32, result), lambda a, b, c: it.dot_product(a, b, c, kinds=kinds))
