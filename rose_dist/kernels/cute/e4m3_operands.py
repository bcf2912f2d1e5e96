"""MXFP4 weights as e4m3 operands of tensor cores: a code is looked up among its block's eight magnitudes."""

from __future__ import annotations

from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.dsl import Int32, Uint32
from rose_dist.kernels.mxfp4 import SCALE_NAN
from rose_dist.kernels.mxfp4_e4m3 import FACTOR_BIAS, SPAN
from rose_dist.kernels.warp_matrix import add_byte, merge, permute, permute_by, upper_half

_LOW, _HIGH = 0x14100800, 0x24201C18
"""e4m3 of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, each times 2^-5: the least scale with which all of them are normal."""
_LOW_STEP, _HIGH_STEP = 0x08080800, 0x08080808
"""An exponent more for each but 0."""


def origins(tops: Any) -> list[Any]:
    """What takes the scale bytes of a lane's four rows, whose largest are in the bytes of `tops`, to 0 … `SPAN`."""
    return [add_byte(~Uint32(tops), row, Uint32((SPAN - 255) & 0xFFFFFFFF)) for row in range(4)]


def magnitudes(scales: Any, which: int, origin: Any) -> tuple[Any, Any]:
    """The eight magnitudes, a byte each, of the block whose scale is byte `which`."""
    scale = Uint32(vector.max_of(Int32(add_byte(scales, which, origin)), Int32(0)))
    return scale * Uint32(_LOW_STEP) + Uint32(_LOW), scale * Uint32(_HIGH_STEP) + Uint32(_HIGH)


def decode_e4m3(word: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """A word's eight codes: columns 2q, 2q + 8, 2q + 1 and 2q + 9 as four e4m3, and those 16 further on."""
    word = Uint32(word)
    by_two = word >> Uint32(2)
    # The magnitudes of pairs 2 and 3 come to nibbles 2, 3, 6 and 7; those of 0 and 1 are in the others. The assembler
    # makes multiplications of shifts to the left: they are not for the unit that has most to do.
    others = merge(word << Uint32(6), by_two, 0x60006000)
    places = permute(word, others, 0x7520) & Uint32(0x77777777)
    first, second = permute_by(low, high, places), permute_by(low, high, upper_half(places))
    first |= merge(by_two, word << Uint32(2), 0x00FF00FF) & Uint32(0x80808080)
    second |= permute(word << Uint32(4), word, 0x7052) & Uint32(0x80808080)
    return first, second


def row_factor(tops: Any, which: int, exponent: int) -> Any:
    """What a row's sums are multiplied by, times 2^`exponent`, in fp32: 0 below 2^-126, NaN for a row with a NaN."""
    top = (Uint32(tops) >> Uint32(8 * which)) & Uint32(0xFF)
    field = Uint32(vector.max_of(Int32(top) + Int32(127 - FACTOR_BIAS + exponent), Int32(0)))
    return ptx.from_bits(vector.select(top == Uint32(SCALE_NAN), Uint32(0x7FC00000), field << Uint32(23)))
