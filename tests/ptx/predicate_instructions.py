"""Comparisons, tests and selections."""

import operator
from collections.abc import Callable

import numpy as np

from tests.ptx import float_ops as fl
from tests.ptx.number_formats import Array
from tests.ptx.operation import PRED, Operation
from tests.ptx.ptx_types import Type, ptx_type

_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip  # fmt: skip
_COMBINE: dict[str, Callable[[Array, Array], Array]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_TESTS: dict[str, Callable[[Array], Array]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
}


def comparison(name: str, kind: Type) -> Callable[[Array, Array], Array] | None:
    """PTX's comparison: for floats the plain ones are false on NaN (ne too), those with u are true on NaN."""
    if kind.kind in "usb":
        return _COMPARE.get(name)
    if name in ("num", "nan"):
        wanted = name == "nan"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == wanted
    unordered = name.endswith("u") and name[:-1] in _COMPARE
    base = _COMPARE.get(name[:-1] if unordered else name)
    if base is None:
        return None
    if unordered:
        return lambda a, b: base(a, b) | np.isnan(a) | np.isnan(b)
    return (lambda a, b: base(a, b) & ~(np.isnan(a) | np.isnan(b))) if name == "ne" else base


def setp(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    half = kind.name.removesuffix("x2")
    compare = comparison(parts[1], ptx_type("f32") if half in ("bf16", "f16") else kind)
    combine = next((_COMBINE[p] for p in parts[2:] if p in _COMBINE), None)
    if compare is None or modifiers - {parts[1], "and", "or", "xor", "ftz"}:
        return None
    prepare = fl.flush if "ftz" in modifiers and kind.name == "f32" else (lambda x: x)
    if kind.name in ("bf16", "bf16x2", "f16x2"):
        prepare = lambda x: fl.comparable(x, half)  # noqa: E731

    def run(a: Array, b: Array, c: Array | None = None) -> tuple[Array, Array]:
        if kind.name.endswith("x2"):
            (a0, a1), (b0, b1) = fl.lanes_of_pair(a), fl.lanes_of_pair(b)
            first, second = compare(prepare(a0), prepare(b0)), compare(prepare(a1), prepare(b1))
        else:
            first = compare(prepare(a), prepare(b))
            second = ~first
        if combine is None or c is None:
            return first, second
        return combine(first, c), combine(second, c)

    sources = (kind, kind, PRED) if combine else (kind, kind)
    return Operation((PRED, PRED), sources, run)


def set_(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    target, kind = types[0], types[-1]
    compare = comparison(parts[1], kind)
    if compare is None or modifiers - {parts[1], "ftz"} or kind.kind == "x" or target.bits != 32:
        return None
    if target.kind == "f":
        return Operation((target,), (kind, kind), lambda a, b: compare(a, b).astype(np.float32))
    return Operation(
        (target,),
        (kind, kind),
        lambda a, b: np.where(compare(a, b), target.raw.type(0xFFFFFFFF), target.raw.type(0)).view(target.dtype),
    )


def selp(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return Operation((kind,), (kind, kind, PRED), lambda a, b, p: np.where(p, a, b))


def slct(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    return Operation((types[0],), (types[0], types[0], types[1]), lambda a, b, c: np.where(c >= 0, a, b))


def testp(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    test = _TESTS.get(parts[1])
    return Operation((PRED,), (types[-1],), test) if test else None
