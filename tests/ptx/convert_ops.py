"""cvt in all forms that are modelled."""

from collections.abc import Callable

import numpy as np

from tests.ptx import number_formats as nf
from tests.ptx.errors import UnknownInstruction
from tests.ptx.float_ops import canonical, flush, lanes_of_pair, pair, saturate
from tests.ptx.number_formats import MINI_FLOATS, Array
from tests.ptx.ptx_types import Type

Function = Callable[..., Array]

_INTEGER_ROUNDING: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def convert(target: Type, source: Type, modifiers: set[str]) -> Function:
    """The function of `cvt.<modifiers>.<target>.<source>`: typed source arrays (two for packed targets) -> target."""
    if target.name.endswith("x2") or source.name.endswith("x2"):
        return _packed(target, source, modifiers)
    wide = _to_f64(source)
    if target.kind in "us" and source.kind in "us":
        return _integer_to_integer(target, saturating="sat" in modifiers)
    if target.kind in "us":
        return _float_to_integer(target, source, modifiers, wide)
    if source.kind in "us":
        return _integer_to_float(target, modifiers)
    return _float_to_float(target, source, modifiers, wide)


def _to_f64(source: Type) -> Callable[[Array], Array]:
    if source.name == "bf16":
        return lambda bits: nf.bf16_to_f32(bits).astype(np.float64)
    return lambda value: value.astype(np.float64)


def _integer_to_integer(target: Type, *, saturating: bool) -> Function:
    if not saturating:
        return lambda value: value.astype(target.dtype)
    limits = np.iinfo(target.dtype)

    def run(value: Array) -> Array:
        own = np.iinfo(value.dtype)
        return np.clip(value, max(limits.min, own.min), min(limits.max, own.max)).astype(target.dtype)

    return run


def _float_to_integer(target: Type, source: Type, modifiers: set[str], wide: Function) -> Function:
    mode = next(iter(modifiers & _INTEGER_ROUNDING.keys()), None)
    if mode is None:
        raise UnknownInstruction(f"cvt.{target.name}.{source.name} needs one of {sorted(_INTEGER_ROUNDING)}")
    round_, limits = _INTEGER_ROUNDING[mode], np.iinfo(target.dtype)
    ftz = "ftz" in modifiers

    def run(value: Array) -> Array:
        rounded = round_(wide(flush(value) if ftz else value))
        inside = np.clip(np.where(np.isnan(rounded), 0.0, rounded), float(limits.min), float(limits.max))
        # 2^63 - 1 and 2^64 - 1 are no f64 values: the clip leaves the next power of two, which must not reach astype.
        top = inside >= float(limits.max)
        exact = np.where(top, 0.0, inside).astype(target.dtype)
        return np.where(top, target.dtype.type(limits.max), exact)

    return run


def _integer_to_float(target: Type, modifiers: set[str]) -> Function:
    mode = next(iter(modifiers & {"rn", "rz", "rm", "rp"}), "rn")
    if target.name in ("f32", "f64") and mode == "rn":
        return lambda value: value.astype(target.dtype)
    if target.name in ("f16", "bf16") and mode == "rn":

        def narrow(value: Array) -> Array:
            # An integer beyond 53 bits overflows f16 anyway; for bf16 it is first rounded to odd through its low bits.
            wide = value.astype(np.float64)
            return nf.f64_to_bf16(wide) if target.name == "bf16" else wide.astype(np.float16)

        return narrow
    if target.name == "f32":

        def directed(value: Array) -> Array:
            if value.dtype.itemsize == 8:
                raise UnknownInstruction(f"cvt.{mode}.f32 of a 64-bit integer is not modelled")
            return nf.round_f64_to_f32(value.astype(np.float64), mode)

        return directed
    raise UnknownInstruction(f"cvt.{mode}.{target.name} of an integer is not modelled")


def _float_to_float(target: Type, source: Type, modifiers: set[str], wide: Function) -> Function:
    ftz, sat, relu = "ftz" in modifiers, "sat" in modifiers, "relu" in modifiers
    finite = "satfinite" in modifiers
    integral = next(iter(modifiers & _INTEGER_ROUNDING.keys()), None)
    mode = next(iter(modifiers & {"rn", "rz", "rm", "rp", "rna"}), "rn")

    def narrow(value: Array) -> Array:
        if target.name == "f64":
            return canonical(value, "f64")
        if target.name == "f32":
            return canonical(nf.round_f64_to_f32(value, mode))
        if target.name == "tf32":
            return _to_tf32(value.astype(np.float32), mode)
        if target.name == "bf16":
            return nf.f32_to_bf16(nf.f64_round_to_odd_f32(value) if mode == "rn" else value.astype(np.float32), mode)
        if mode == "rz":
            nearest = value.astype(np.float16)
            return np.where(
                np.abs(nearest.astype(np.float64)) > np.abs(value), np.nextafter(nearest, np.float16(0)), nearest
            )
        return canonical(value.astype(np.float16), "f16")

    largest = {"f16": 65504.0, "bf16": float(nf.bf16_to_f32(np.array([0x7F7F], np.uint16))[0])}.get(target.name)

    def run(value: Array) -> Array:
        value = flush(value) if ftz and source.name == "f32" else value
        exact = wide(value)
        if integral:
            exact = _INTEGER_ROUNDING[integral](exact)
        if relu:
            exact = np.where(exact > 0, exact, np.where(np.isnan(exact), exact, 0.0))
        if finite and largest is not None:
            exact = np.where(np.isnan(exact), exact, np.clip(exact, -largest, largest))
        result = narrow(exact)
        if ftz and target.name == "f32":
            result = flush(result)
        return saturate(result) if sat else result

    return run


def _to_tf32(value: Array, mode: str) -> Array:
    bits = value.view(np.uint32)
    if mode == "rna":
        bits = bits + np.uint32(0x1000)
    elif mode == "rn":
        bits = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return np.where(np.isnan(value), np.uint32(0x7FFFFFFF), bits & np.uint32(0xFFFFE000))


def _packed(target: Type, source: Type, modifiers: set[str]) -> Function:
    to, of = target.name.removesuffix("x2"), source.name.removesuffix("x2")
    if to == "ue8m0":
        mode = "rp" if "rp" in modifiers else "rz"
        if source.name == "f32":
            return lambda high, low: _join8(nf.f32_to_ue8m0(low, mode), nf.f32_to_ue8m0(high, mode))
        if source.name == "bf16x2":
            return _of_halves(
                lambda low, high: _join8(
                    nf.f32_to_ue8m0(nf.bf16_to_f32(low), mode), nf.f32_to_ue8m0(nf.bf16_to_f32(high), mode)
                )
            )
    elif to in MINI_FLOATS:
        return _to_mini(to, source, modifiers)
    elif of in MINI_FLOATS and to in ("f16", "bf16"):
        return _from_mini(of, to, relu="relu" in modifiers)
    elif of == "ue8m0" and to == "bf16":

        def decode(codes: Array) -> Array:
            return nf.f32_to_bf16(nf.ue8m0_to_f32(codes))

        return lambda value: pair(decode(value.astype(np.uint8)), decode((value >> np.uint16(8)).astype(np.uint8)))
    elif to in ("f16", "bf16") and source.name == "f32":
        from tests.ptx.ptx_types import ptx_type  # noqa: PLC0415 — the one recursive use

        single = _float_to_float(ptx_type(to), source, modifiers, _to_f64(source))
        return lambda high, low: pair(single(low).view(np.uint16), single(high).view(np.uint16))
    raise UnknownInstruction(f"cvt.{target.name}.{source.name} is not modelled")


def _join8(low: Array, high: Array) -> Array:
    return low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))


def _of_halves(function: Function) -> Function:
    return lambda packed: function(*lanes_of_pair(packed))


def _to_mini(to: str, source: Type, modifiers: set[str]) -> Function:
    if "satfinite" not in modifiers or "rn" not in modifiers:
        raise UnknownInstruction(f"cvt to {to}x2 needs .rn.satfinite")
    form, relu = MINI_FLOATS[to], "relu" in modifiers

    def encode(value: Array) -> Array:
        return form.encode(np.where(value < 0, 0, value).astype(value.dtype) if relu else value)

    def join(low: Array, high: Array) -> Array:
        if to == "e2m1":
            return encode(low) | (encode(high) << np.uint8(4))
        return _join8(encode(low), encode(high))

    if source.name == "f32":
        return lambda high, low: join(low, high)
    if source.name == "f16x2":
        return _of_halves(
            lambda low, high: join(low.view(np.float16).astype(np.float32), high.view(np.float16).astype(np.float32))
        )
    if source.name == "bf16x2":
        return _of_halves(lambda low, high: join(nf.bf16_to_f32(low), nf.bf16_to_f32(high)))
    raise UnknownInstruction(f"cvt.{to}x2.{source.name} is not modelled")


def _from_mini(of: str, to: str, *, relu: bool) -> Function:
    form = MINI_FLOATS[of]

    def decode(codes: Array) -> Array:
        value = form.decode(codes)
        value = np.where(value < 0, np.float32(0), value) if relu else value
        return nf.f32_to_bf16(value) if to == "bf16" else canonical(value.astype(np.float16), "f16").view(np.uint16)

    def run(packed: Array) -> Array:
        shift = packed.dtype.type(4 if of == "e2m1" else 8)
        return pair(decode(packed.astype(np.uint8)), decode((packed >> shift).astype(np.uint8)))

    return run
