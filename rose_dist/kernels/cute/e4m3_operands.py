"""MXFP4 weights as e4m3 operands of tensor cores: a code is looked up among its block's eight magnitudes."""

from __future__ import annotations

from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import load_shared, store_shared_words
from rose_dist.kernels.dsl import Int32, Uint32, cute, cutlass, range_constexpr
from rose_dist.kernels.e4m3_tiling import MAGNITUDES, SCALES
from rose_dist.kernels.mxfp4 import SCALE_NAN
from rose_dist.kernels.mxfp4_e4m3 import FACTOR_BIAS, SPAN
from rose_dist.kernels.warp_matrix import add_byte, merge, permute, permute_by, upper_half

_LOW, _HIGH = 0x14100800, 0x24201C18
"""e4m3 of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, each times 2^-5: the least scale with which all of them are normal."""
_LOW_STEP, _HIGH_STEP = 0x08080800, 0x08080808
"""An exponent more for each but 0."""


@cute.jit
def write_magnitudes(table: Int32, thread: Int32, threads: cutlass.Constexpr) -> None:
    """In shared memory, the eight magnitudes with each scale, of which a row's largest is the last."""
    for first in range_constexpr(0, SCALES, threads):
        entry = thread + first
        if entry < SCALES:
            exponent = Uint32(vector.max_of(entry - (SCALES - 1 - SPAN), Int32(0)))
            words = exponent * Uint32(_LOW_STEP) + Uint32(_LOW), exponent * Uint32(_HIGH_STEP) + Uint32(_HIGH)
            store_shared_words(table + entry * MAGNITUDES, words)


def origins(tops: Any, table: Any) -> list[Any]:
    """Of a lane's four rows, whose largest scales are in the bytes of `tops`: where a scale of 0 has its entry."""
    return [add_byte(~Uint32(tops), row, table, MAGNITUDES) for row in range(4)]


def magnitudes(scales: Any, which: int, origin: Any) -> Any:
    """The eight magnitudes of the block whose scale is byte `which`, as two words."""
    return load_shared(Int32(add_byte(scales, which, origin, MAGNITUDES)), 2)


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
