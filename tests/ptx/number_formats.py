"""Conversions between float formats, on numpy arrays. All are exact or correctly rounded; NaN results are PTX's
canonical NaN.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

F32_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
F64_NAN = np.uint64(0x7FFFFFFFFFFFFFFF).view(np.float64)
F16_NAN = np.uint16(0x7FFF).view(np.float16)
BF16_NAN = np.uint16(0x7FFF)


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array, mode: str = "rn") -> Array:
    """Round f32 to bf16 bits, to nearest even ("rn") or to zero ("rz")."""
    bits = values.view(np.uint32)
    if mode == "rn":
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    elif mode != "rz":
        raise ValueError(f"rounding .{mode} to bf16 does not exist in PTX")
    result = (bits >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), BF16_NAN, result)


def f64_round_to_odd_f32(values: Array) -> Array:
    """f64 -> f32 rounded to odd, so that a later rounding to 22 bits or fewer is as if done once."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = values.astype(np.float32)
        back = nearest.astype(np.float64)
        bits = nearest.view(np.uint32)
        away = np.abs(back) > np.abs(values)
    truncated = np.where(away, bits - np.uint32(1), bits)
    inexact = (back != values) & ~np.isnan(values)
    return np.where(inexact, truncated | np.uint32(1), bits).view(np.float32)


def f64_to_bf16(values: Array) -> Array:
    return f32_to_bf16(f64_round_to_odd_f32(values))


def round_f64_to_f32(values: Array, mode: str) -> Array:
    """f64 -> f32 by PTX's rounding mode rn, rz, rm or rp."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = values.astype(np.float32)
        if mode in ("rn", "rna"):
            return nearest
        back = nearest.astype(np.float64)
        below = np.nextafter(nearest, np.float32(-np.inf), dtype=np.float32)
        above = np.nextafter(nearest, np.float32(np.inf), dtype=np.float32)
        down = np.where(back > values, below, nearest)
        up = np.where(back < values, above, nearest)
        if mode == "rz":
            return np.where(values > 0, down, up)
        return down if mode == "rm" else up


@dataclass(frozen=True)
class MiniFloat:
    """A float of 8 bits or fewer, from its table of magnitudes (OCP FP8 and MX definitions).

    `nan` is the code that NaN inputs become under .satfinite: the format's NaN, or its largest value where it has none.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    nan: int

    @cached_property
    def magnitudes(self) -> Array:
        """The finite magnitudes by code, ascending."""
        codes = np.arange(1 << (self.exponent_bits + self.mantissa_bits))
        exponent, mantissa = codes >> self.mantissa_bits, codes & ((1 << self.mantissa_bits) - 1)
        fraction = mantissa / (1 << self.mantissa_bits)
        normal = (1 + fraction) * 2.0 ** (exponent - self.bias)
        table = np.where(exponent > 0, normal, fraction * 2.0 ** (1 - self.bias))
        return table[table <= self.largest][: self._finite_codes]

    @property
    def _finite_codes(self) -> int:
        return {"e4m3": 127, "e5m2": 124}.get(self.name, 1 << (self.exponent_bits + self.mantissa_bits))

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def encode(self, values: Array) -> Array:
        """Codes of f32 or f64 values: to nearest even, saturating to the largest finite value."""
        table = self.magnitudes
        midpoints = (table[1:] + table[:-1]) / 2
        wide = values.astype(np.float64)
        size = np.abs(wide)
        code = np.searchsorted(midpoints, np.where(np.isnan(size), 0, size), side="left")
        tie = (code < len(midpoints)) & (size == midpoints[np.minimum(code, len(midpoints) - 1)])
        code = np.where(tie & (code & 1 == 1), code + 1, code)
        code = np.where(np.signbit(wide), code | self.sign_bit, code)
        return np.where(np.isnan(wide), self.nan, code).astype(np.uint8)

    def decode(self, codes: Array) -> Array:
        """f32 values of codes; bits above the format's width are ignored."""
        magnitude = (codes & np.uint8(self.sign_bit - 1)).astype(np.int64)
        table = np.full(self.sign_bit, np.nan, np.float32)
        table[: len(self.magnitudes)] = self.magnitudes
        if self.name == "e5m2":
            table[0x7C] = np.inf
        value = table[magnitude]
        return np.where(codes & np.uint8(self.sign_bit), -value, value)


E4M3 = MiniFloat("e4m3", 4, 3, 7, 448.0, 0x7F)
E5M2 = MiniFloat("e5m2", 5, 2, 15, 57344.0, 0x7F)
E2M3 = MiniFloat("e2m3", 2, 3, 1, 7.5, 0x1F)
E3M2 = MiniFloat("e3m2", 3, 2, 3, 28.0, 0x1F)
E2M1 = MiniFloat("e2m1", 2, 1, 1, 6.0, 0x7)
MINI_FLOATS = {f.name: f for f in (E4M3, E5M2, E2M3, E3M2, E2M1)}


def f32_to_ue8m0(values: Array, mode: str) -> Array:
    """The power of two next to |value| towards zero ("rz") or upwards ("rp"), as a biased exponent; NaN is 0xFF,
    saturating.
    """
    bits = np.abs(values).view(np.uint32)
    exponent = (bits >> np.uint32(23)).astype(np.int32)
    mantissa = bits & np.uint32(0x7FFFFF)
    # A subnormal f32 lies below 2^-126 (code 1): code 0 is 2^-127, whose f32 mantissa is 0x400000.
    boundary = np.where(exponent == 0, np.uint32(0x400000), np.uint32(0))
    code = exponent + (mantissa > boundary) if mode == "rp" else exponent
    return np.where(np.isnan(values), 0xFF, np.minimum(code, 0xFE)).astype(np.uint8)


def ue8m0_to_f32(codes: Array) -> Array:
    value = np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
    return np.where(codes == 0xFF, F32_NAN, value)
