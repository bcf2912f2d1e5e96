"""Register-to-register instructions: opcode -> operand types and a pure numpy function."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.ptx import float_ops as fl
from tests.ptx import integer_ops as it
from tests.ptx import number_formats as nf
from tests.ptx.convert_ops import convert
from tests.ptx.errors import UnknownInstruction
from tests.ptx.number_formats import Array
from tests.ptx.ptx_types import Type, is_type, ptx_type

U32, PRED = ptx_type("u32"), ptx_type("pred")

_ROUNDING = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna"}
_FLOAT_MODIFIERS = _ROUNDING | {"ftz", "sat", "approx", "full", "relu", "satfinite"}


@dataclass(frozen=True)
class Operation:
    """`function` takes arrays of `sources`' dtypes and returns one array per result (a tuple if there are two)."""

    results: tuple[Type, ...]
    sources: tuple[Type, ...]
    function: Callable[..., Array | tuple[Array, ...]]
    variadic: bool = False


def resolve(parts: tuple[str, ...]) -> Operation | None:
    """The operation of an opcode, or None if it is no register-to-register instruction. Raises UnknownInstruction for
    an unknown form.
    """
    build = _BUILDERS.get(parts[0])
    if build is None:
        return None
    types = [ptx_type(p) for p in parts[1:] if is_type(p)]
    modifiers = {p for p in parts[1:] if not is_type(p)}
    operation = build(parts, types, modifiers)
    if operation is None:
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")
    return operation


def _is_float(kind: Type) -> bool:
    return kind.kind in "fx" and kind.name not in ("u16x2", "s16x2")


def _only(modifiers: set[str], allowed: set[str]) -> bool:
    return modifiers <= allowed


Build = Callable[[tuple[str, ...], list[Type], set[str]], Operation | None]


def _arithmetic(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    """add, sub, mul, div, fma, mad."""
    name, kind = parts[0], types[-1]
    count = 3 if name in ("fma", "mad") else 2
    if _is_float(kind):
        if not _only(modifiers, _FLOAT_MODIFIERS):
            return None
        if len(types) > 1:
            return _mixed_arithmetic(name, types, modifiers)
        function = fl.arithmetic("fma" if name == "mad" else name, kind, modifiers)
        return Operation((kind,), (kind,) * count, function)
    if kind.name in ("u16x2", "s16x2"):
        operations = {"add": operator.add, "sub": operator.sub}
        return (
            Operation((kind,), (kind,) * 2, fl.by_halves(operations[name]))
            if name in operations and not modifiers
            else None
        )
    if name in ("mul", "mad"):
        return _integer_multiply(name, kind, modifiers)
    if name == "div":
        return Operation((kind,), (kind, kind), it.divide) if not modifiers else None
    if modifiers == {"sat"} and kind.name == "s32":
        sign = 1 if name == "add" else -1
        limits = np.iinfo(np.int32)
        return Operation(
            (kind,),
            (kind, kind),
            lambda a, b: np.clip(a.astype(np.int64) + sign * b.astype(np.int64), limits.min, limits.max).astype(
                np.int32
            ),
        )
    function = {"add": operator.add, "sub": operator.sub}.get(name)
    return Operation((kind,), (kind, kind), function) if function and not modifiers else None


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


def _integer_multiply(name: str, kind: Type, modifiers: set[str]) -> Operation | None:
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


def _mul24(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    if modifiers != {"lo"}:
        return None
    if parts[0] == "mul24":
        return Operation((kind,), (kind,) * 2, it.multiply_24)
    return Operation((kind,), (kind,) * 3, lambda a, b, c: it.multiply_24(a, b) + c)


def _min_max(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind, smaller = types[-1], parts[0] == "min"
    if kind.kind in "us":
        relu = "relu" in modifiers
        if modifiers - {"relu"}:
            return None
        pick = np.minimum if smaller else np.maximum
        return Operation((kind,), (kind,) * 2, (lambda a, b: np.maximum(pick(a, b), a.dtype.type(0))) if relu else pick)
    if not _only(modifiers, {"ftz", "NaN", "abs", "xorsign"}):
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


def _negate_absolute(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind, name = types[-1], parts[0]
    if kind.kind in "us":
        return Operation((kind,), (kind,), operator.neg if name == "neg" else it.absolute) if not modifiers else None
    if not _only(modifiers, {"ftz"}):
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


def _logic(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    function = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[parts[0]]
    return Operation((kind,), (kind, kind), function) if not modifiers else None


def _not(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    if parts[0] == "cnot":
        return Operation((kind,), (kind,), lambda a: (a == 0).astype(a.dtype))
    return Operation((kind,), (kind,), operator.invert)


def _shift(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return (
        Operation((kind,), (kind, U32), it.shift_left if parts[0] == "shl" else it.shift_right)
        if not modifiers
        else None
    )


def _funnel(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    if not modifiers <= {"l", "r", "wrap", "clamp"}:
        return None
    return Operation((U32,), (U32,) * 3, it.funnel_shift(left="l" in modifiers, wrap="wrap" in modifiers))


def _bit_fields(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
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


def _rem(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return Operation((kind,), (kind, kind), it.remainder)


def _sad(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return Operation((kind,), (kind,) * 3, it.sad)


def _dot(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kinds = (types[0].name, types[1].name)
    result = ptx_type("s32" if "s32" in kinds else "u32")
    return Operation((result,), (U32, U32, result), lambda a, b, c: it.dot_product(a, b, c, kinds=kinds))


def _approximation(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind, name = types[-1], parts[0]
    if not _only(modifiers, {"approx", "ftz", "rn"}):
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


def _copysign(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return Operation((kind,), (kind, kind), lambda a, b: np.copysign(b, a))


_TESTS: dict[str, Callable[[Array], Array]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
}


def _testp(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    test = _TESTS.get(parts[1])
    return Operation((PRED,), (types[-1],), test) if test else None


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
_COMBINE: dict[str, Callable[[Array, Array], Array]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


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


def _setp(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
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


def _set(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
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


def _selp(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    kind = types[-1]
    return Operation((kind,), (kind, kind, PRED), lambda a, b, p: np.where(p, a, b))


def _slct(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    return Operation((types[0],), (types[0], types[0], types[1]), lambda a, b, c: np.where(c >= 0, a, b))


def _cvt(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
    known = _ROUNDING | {"ftz", "sat", "satfinite", "relu"}
    if len(types) != 2 or not _only(modifiers, known):
        return None
    target, source = types
    packed_of_two = target.name.endswith("x2") and source.name == "f32"
    return Operation((target,), (source,) * (2 if packed_of_two else 1), convert(target, source, modifiers))


_BUILDERS: dict[str, Build] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "fma", "mad"), _arithmetic),
    **dict.fromkeys(("mul24", "mad24"), _mul24),
    **dict.fromkeys(("min", "max"), _min_max),
    **dict.fromkeys(("neg", "abs"), _negate_absolute),
    **dict.fromkeys(("and", "or", "xor"), _logic),
    **dict.fromkeys(("not", "cnot"), _not),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("bfe", "bfi", "bmsk", "lop3", "prmt", "bfind", "popc", "clz", "brev"), _bit_fields),
    **dict.fromkeys(("ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt"), _approximation),
    **dict.fromkeys(("dp4a",), _dot),
    "shf": _funnel, "rem": _rem, "sad": _sad, "copysign": _copysign, "testp": _testp,
    "setp": _setp, "set": _set, "selp": _selp, "slct": _slct, "cvt": _cvt,
}  # fmt: skip
