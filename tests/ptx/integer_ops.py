"""Integer, logic and bit-field operations on numpy arrays (wrap-around is numpy's own)."""

from collections.abc import Callable

import numpy as np

from tests.ptx.number_formats import Array


def _bits(value: Array) -> int:
    return 8 * value.dtype.itemsize


def _unsigned(value: Array) -> Array:
    return value.view(np.dtype(f"u{value.dtype.itemsize}"))


def shift_left(value: Array, amount: Array) -> Array:
    width = _bits(value)
    shifted = value << np.minimum(amount, width - 1).astype(value.dtype)
    return np.where(amount >= width, value.dtype.type(0), shifted)


def shift_right(value: Array, amount: Array) -> Array:
    """Arithmetic for signed dtypes, logical for unsigned."""
    width = _bits(value)
    shifted = value >> np.minimum(amount, width - 1).astype(value.dtype)
    if value.dtype.kind == "i":
        return shifted
    return np.where(amount >= width, value.dtype.type(0), shifted)


def funnel_shift(*, left: bool, wrap: bool) -> Callable[[Array, Array, Array], Array]:
    def run(low: Array, high: Array, amount: Array) -> Array:
        n = (amount & np.uint32(31)) if wrap else np.minimum(amount, np.uint32(32))
        joined = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        n64 = n.astype(np.uint64)
        return ((joined << n64) >> np.uint64(32) if left else joined >> n64).astype(np.uint32)

    return run


def multiply_high(a: Array, b: Array) -> Array:
    if a.dtype.itemsize <= 4:
        wide = np.dtype(f"{a.dtype.kind}8")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(_bits(a))).astype(a.dtype)
    product = np.array(a, dtype=object) * np.array(b, dtype=object)
    wrapped = [(int(p) >> 64) & (2**64 - 1) for p in np.atleast_1d(product)]
    return np.array(wrapped, dtype=np.uint64).view(a.dtype)


def multiply_wide(a: Array, b: Array) -> Array:
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(wide) * b.astype(wide)


def multiply_24(a: Array, b: Array) -> Array:
    def low(x: Array) -> Array:
        shifted = x << x.dtype.type(8)
        return shifted >> x.dtype.type(8)

    return low(a) * low(b)


def divide(a: Array, b: Array) -> Array:
    """Towards zero; division by zero gives all ones, as the hardware's routine does."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        quotient = a // safe
    else:
        lowest = np.iinfo(a.dtype).min
        overflow = (a == lowest) & (safe == -1)
        safe = np.where(overflow, a.dtype.type(1), safe)
        quotient = a // safe
        quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(zero, a.dtype.type(-1) if a.dtype.kind == "i" else np.iinfo(a.dtype).max, quotient).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """With the sign of the dividend; x rem 0 = x."""
    zero = b == 0
    return np.where(zero, a, np.fmod(a, np.where(zero, b.dtype.type(1), b))).astype(a.dtype)


def population_count(value: Array) -> Array:
    return np.bitwise_count(_unsigned(value)).astype(np.uint32)


def reverse_bits(value: Array) -> Array:
    raw = np.broadcast_to(value, value.shape).copy()
    octets = raw.view(np.uint8).reshape(*raw.shape, raw.dtype.itemsize)
    flipped = np.packbits(np.unpackbits(octets, axis=-1, bitorder="little"), axis=-1, bitorder="big")
    return np.ascontiguousarray(flipped[..., ::-1]).view(raw.dtype)[..., 0]


def leading_zeros(value: Array) -> Array:
    bits = _bits(value)
    left = _unsigned(value).copy()
    count = np.zeros(left.shape, np.uint32)
    step = bits // 2
    while step:
        empty = left < (left.dtype.type(1) << left.dtype.type(bits - step))
        count += np.where(empty, np.uint32(step), np.uint32(0))
        left = np.where(empty, left << left.dtype.type(step), left)
        step //= 2
    return count + (left == 0).astype(np.uint32)


def find_leading(value: Array, *, shift_amount: bool = False) -> Array:
    """bfind: the position of the highest bit that differs from the sign, all ones if none."""
    source = np.where(value < 0, ~value, value) if value.dtype.kind == "i" else value
    zeros = leading_zeros(source)
    none = zeros == _bits(value)
    position = zeros if shift_amount else np.uint32(_bits(value) - 1) - zeros
    return np.where(none, np.uint32(0xFFFFFFFF), position).astype(np.uint32)


def extract_field(value: Array, position: Array, length: Array) -> Array:
    width = _bits(value)
    start, count = (position & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
    unsigned = _unsigned(value)
    kind = unsigned.dtype.type
    keep = np.minimum(count, np.maximum(width - start, 0))
    shifted = np.where(start >= width, kind(0), unsigned >> np.minimum(start, width - 1).astype(unsigned.dtype))
    mask = np.where(
        keep >= width,
        kind(np.iinfo(unsigned.dtype).max),
        (kind(1) << np.minimum(keep, width - 1).astype(unsigned.dtype)) - kind(1),
    )
    field = shifted & mask
    if value.dtype.kind == "u":
        return field
    sign_at = np.minimum(start + count - 1, width - 1)
    sign = (unsigned >> np.maximum(sign_at, 0).astype(unsigned.dtype)) & kind(1)
    negative = (sign == 1) & (count > 0)
    return np.where(negative, field | ~mask, field).astype(unsigned.dtype).view(value.dtype)


def insert_field(source: Array, base: Array, position: Array, length: Array) -> Array:
    width = _bits(base)
    kind = base.dtype.type
    start, count = (position & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
    ones = np.where(
        count >= width,
        kind(np.iinfo(base.dtype).max),
        (kind(1) << np.minimum(count, width - 1).astype(base.dtype)) - kind(1),
    )
    inside = start < width
    amount = np.minimum(start, width - 1).astype(base.dtype)
    mask = np.where(inside, ones << amount, kind(0))
    return (base & ~mask) | ((source << amount) & mask)


def bit_mask(position: Array, width: Array, *, wrap: bool) -> Array:
    start, count = position.astype(np.int64), width.astype(np.int64)
    if wrap:
        start, count = start & 31, count & 31
    field = np.where(count >= 32, 2**32 - 1, (1 << np.minimum(count, 32)) - 1)
    return np.where(start >= 32, 0, (field << np.minimum(start, 32)) & (2**32 - 1)).astype(np.uint32)


def lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    lut = int(table.reshape(-1)[0])
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
    for row in range(8):
        if lut >> row & 1:
            result = result | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
    return result


_MODES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def permute(mode: str | None) -> Callable[[Array, Array, Array], Array]:
    """prmt: picks four bytes of {b, a}; the selector's nibble bit 3 replicates the sign."""

    def run(a: Array, b: Array, selector: Array) -> Array:
        a, b, selector = np.broadcast_arrays(a, b, selector)
        octets = np.concatenate([np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in (a, b)], axis=1)
        if mode is None:
            nibbles = np.stack([(selector >> np.uint32(4 * i)) & np.uint32(15) for i in range(4)], axis=1)
        else:
            nibbles = np.array(_MODES[mode], np.uint32)[(selector & np.uint32(3)).astype(np.int64)]
        chosen = np.take_along_axis(octets, (nibbles & 7).astype(np.int64), axis=1)
        sign = np.where(chosen & 0x80, np.uint8(0xFF), np.uint8(0))
        return np.ascontiguousarray(np.where(nibbles & 8, sign, chosen).astype(np.uint8)).view(np.uint32)[:, 0]

    return run


def dot_product(a: Array, b: Array, c: Array, *, kinds: tuple[str, str]) -> Array:
    """dp4a: four 8-bit products added to c."""

    def octets(value: Array, kind: str) -> Array:
        raw = np.ascontiguousarray(value).view(np.int8 if kind == "s32" else np.uint8)
        return raw.reshape(-1, 4).astype(np.int64)

    a, b = np.broadcast_arrays(a, b)
    return ((octets(a, kinds[0]) * octets(b, kinds[1])).sum(1) + c.astype(np.int64)).astype(c.dtype)


def dot_pairs(a: Array, b: Array, c: Array) -> Array:
    """dp2a.lo.u32.u32: two products of 16 by 8 bits added to c, the latter the lower ones of b."""
    a, b = (np.broadcast_to(value, c.shape).astype(np.int64) for value in (a, b))
    return ((a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF) + c).astype(c.dtype)


def saturating(operation: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """s32 add or sub that stops at the ends of the range."""
    limits = np.iinfo(np.int32)

    def run(a: Array, b: Array) -> Array:
        return np.clip(operation(a.astype(np.int64), b.astype(np.int64)), limits.min, limits.max).astype(np.int32)

    return run


def sad(a: Array, b: Array, c: Array) -> Array:
    return np.where(a > b, a - b, b - a) + c
