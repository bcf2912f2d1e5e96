"""Device code that encodes and decodes block-scaled vectors; the epilogue of every kernel with quantised output.

Plain functions that run while a kernel is traced. A block is spread over an aligned group of lanes, each with a vector
of it. References: `quantize.py`.
"""

from __future__ import annotations

from typing import Any

from rose_dist.kernels import ptx, vector, warp_matrix
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr, cute, cutlass
from rose_dist.kernels.formats import E4M3_MAX, MIN_AMAX, BlockFormat, BlockOutput, Element, Scale

_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_E8M0_NAN = 0xFF
_E4M3_NAN = 0x7F


def largest_of_block(fmt: BlockFormat, values: list[Any]) -> Any:
    """Bits of the largest |value| of the block that lies in this lane's `values` (fp32) and its group's."""
    return vector.group_max(vector.largest_magnitude(values), max(fmt.block // len(values), 1))


def encode(
    fmt: BlockFormat, arch: Arch, values: list[Any], global_scale: Any = None, largest: Any = None
) -> tuple[list[Any], Any]:
    """Quantise one block that lies in this lane's `values` (fp32) and its group's.

    Args:
        global_scale: NVFP4 only, fp32; values are multiplied by it before block scales are chosen.
        largest: `largest_of_block`, for who knows it already.

    Returns:
        The codes, packed into u32 (u16 if there are only 16 bits), earlier values in lower bits; and the scale, an
        fp32 or a u32 with the scale's byte.
    """
    if largest is None:
        largest = largest_of_block(fmt, values)
    finite = largest < Uint32(_INFINITY)
    if fmt.scale is Scale.FP32:
        # A NaN or an infinity spoils the whole block, so that it shows.
        largest = vector.max_u32(largest, ptx.bits(Float32(MIN_AMAX)))
        scale = ptx.from_bits(vector.select(finite, largest, Uint32(_NAN))) * Float32(1.0 / E4M3_MAX)
        inverse = ptx.reciprocal(scale)
        return _pack(fmt.element, arch, values, inverse), scale
    if fmt.scale is Scale.E8M0:
        exponent = _shared_exponent(fmt, largest)
        inverse = ptx.from_bits((Uint32(254) - exponent) << Uint32(23))
        scale = vector.select(finite, exponent, Uint32(_E8M0_NAN))
    else:
        share = ptx.from_bits(largest) * Float32(1.0 / fmt.element.max) * global_scale
        code = Uint32(ptx.to_e4m3x2(share, Float32(0.0)))
        decoded, _ = ptx.from_e4m3x2(Uint16(code))
        inverse = vector.select(code == Uint32(0), Float32(0.0), global_scale * ptx.reciprocal(decoded))
        scale = vector.select(finite, code, Uint32(_E4M3_NAN))
    words = _pack(fmt.element, arch, values, inverse)
    return [vector.select(finite, word, type(word)(0)) for word in words], scale


@cute.jit
def store(
    output: cutlass.Constexpr, arch: cutlass.Constexpr, values: list[Any], codes: Int64, scales: Int64, row: Int32,
    index: Int32, padded_rows: Int32, valid: cutlass.Boolean, global_scale: Float32, largest: Uint32 | None = None,
) -> None:  # fmt: skip
    """Quantise this lane's vector, number `index` of `row`, and store codes and scale where `valid`.

    largest: as for `encode`.

    All lanes of a warp must arrive. Lanes beyond the row's end bring its last vector: it lies in the last block, so it
    changes no maximum.
    """
    fmt = output.fmt
    words, scale = encode(fmt, arch, values, global_scale, largest)
    if valid:
        code_bytes = len(values) * fmt.element.bits // 8
        word_type = Uint32 if const_expr(code_bytes >= 4) else Uint16
        vector.store_words(
            codes + Int64(row) * output.row_bytes + index * code_bytes, words, word_type, arch.vector_bytes
        )
        lanes = output.lanes(len(values))
        if index % lanes == 0:
            block = index // lanes
            place = output.place(Int64(row), Int64(block), Int64(padded_rows))
            if const_expr(fmt.scale is Scale.FP32):
                vector.scalar(scales + place * 4, Float32)[0] = scale
            else:
                vector.scalar(scales + place, Uint8)[0] = Uint8(scale)
            _zero_padding(output, scales, row, block, padded_rows)


@cute.jit
def _zero_padding(output: cutlass.Constexpr, scales: Int64, row: Int32, block: Int32, padded_rows: Int32) -> None:
    """The writer of a row's last scale also zeroes those after it that only pad the layout."""
    padding = output.layout.padded_blocks(output.blocks) - output.blocks
    if const_expr(padding > 0):
        if block == output.blocks - 1:
            for i in cutlass.range_constexpr(padding):
                place = output.place(Int64(row), Int64(output.blocks + i), Int64(padded_rows))
                vector.scalar(scales + place, Uint8)[0] = Uint8(0)


def read_global_scale(output: BlockOutput | None, address: Any) -> Any:
    """NVFP4's fp32 at `address`; 1 for formats that have none."""
    needed = output is not None and output.fmt.scale is Scale.E4M3
    return vector.scalar(address, Float32)[0] if needed else Float32(1.0)


def load_codes(source: BlockOutput, codes: Any, row: Any, index: Any, count: int) -> list[Any]:
    """The u32 words of a row's vector of `count` codes number `index`."""
    words = source.fmt.element.bits * count // 32
    loaded = vector.load(codes + Int64(row) * source.row_bytes + index * (words * 4), Uint32, words, words * 4)
    return [loaded[i] for i in range(words)]


def load_scale(source: BlockOutput, scales: Any, row: Any, column: Any, padded_rows: Any, global_scale: Any) -> Any:
    """The fp32 by which the codes of a row's block at `column` are multiplied."""
    block = column // source.fmt.block
    place = source.place(Int64(row), Int64(block), Int64(padded_rows))
    if source.fmt.scale is Scale.FP32:
        return vector.scalar(scales + place * 4, Float32)[0]
    byte = Uint32(vector.scalar(scales + place, Uint8)[0])
    if source.fmt.scale is Scale.E8M0:
        return decode_e8m0(byte)
    return ptx.from_e4m3x2(Uint16(byte))[0] * ptx.reciprocal(global_scale)


def decode(fmt: BlockFormat, arch: Arch, words: list[Any], scale: Any) -> list[Any]:
    """fp32 values of packed codes. `scale` is fp32; codes × scale is exact unless it leaves fp32's range."""
    return [value * scale for word in words for value in _unpack(fmt.element, arch, word)]


def decode_e8m0(byte: Any) -> Any:
    """2^(byte − 127) as fp32, NaN for 255."""
    normal = Uint32(byte) << Uint32(23)
    bits = vector.select(Uint32(byte) == Uint32(0), Uint32(0x00400000), normal)
    return ptx.from_bits(vector.select(Uint32(byte) == Uint32(_E8M0_NAN), Uint32(0x7FC00000), bits))


def _shared_exponent(fmt: BlockFormat, largest: Any) -> Any:
    """Biased power-of-two exponent of the block's scale, 0 … 254, from the bits of its largest magnitude."""
    # Floor takes the exponent field. Ceil adds what makes a mantissa above that of the element's maximum carry into it.
    # Subnormal maxima fall to the least exponent like everything below it.
    carry = 0 if fmt.saturates else 0x7FFFFF - fmt.element.max_mantissa
    exponent = Int32((largest + Uint32(carry)) >> Uint32(23)) - Int32(fmt.element.max_exponent)
    return Uint32(vector.select(exponent < Int32(0), Int32(0), exponent))


def _pack(element: Element, arch: Arch, values: list[Any], factor: Any) -> list[Any]:
    """Codes of fp32s times a positive factor, earlier ones in lower bits."""
    if element is Element.E4M3:
        pairs = [ptx.to_e4m3x2(a * factor, b * factor) for a, b in zip(values[::2], values[1::2], strict=True)]
        return [_join([Uint32(a), Uint32(b)], 16) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    if arch.blackwell:
        pairs = [ptx.to_e2m1x2(a * factor, b * factor) for a, b in zip(values[::2], values[1::2], strict=True)]
        words = [_join(pairs[i : i + 4], 8) for i in range(0, len(pairs), 4)]
    else:
        words = [_e2m1(values[i : i + 8], factor) for i in range(0, len(values), 8)]
    return words if len(values) >= 8 else [Uint16(word) for word in words]


def _join(fields: list[Any], width: int) -> Any:
    """The sum of u32 fields, each `width` bits above the one before."""
    while len(fields) > 1:
        fields = [low + high * Uint32(1 << width) for low, high in zip(fields[::2], fields[1::2], strict=True)]
        width *= 2
    return fields[0]


_WHOLE = 2.0**23
"""fp32s are whole numbers from here on, and halves below."""
_WHOLE_BITS = 0x4B000000


def _e2m1(values: list[Any], factor: Any) -> Any:
    """e2m1 codes of 4 or 8 fp32s times a positive factor, nearest even, saturating, in a u32: for GPUs without the
    instruction.

    Up to 4, e2m1 has the steps of fp32 around 2^23: 1/2 below, 1 above. So adding 2^23 − 2 to a magnitude v rounds it,
    and the sum's bits count the code up. Above 4 they count too fast: there 2^23 + v/2 has the code, below too much.
    """
    fields = []
    for value in values:
        v = ptx.product(ptx.absolute(value), factor)
        fine = ptx.bits(v + Float32(_WHOLE - 2.0))
        coarse = ptx.bits(ptx.multiply_add(v, Float32(0.5), Float32(_WHOLE)))
        fields.append(vector.min_of(vector.min_of(fine, coarse), Uint32(_WHOLE_BITS + 3)))
    above = sum((_WHOLE_BITS - 4) << 4 * i for i in range(len(values))) & 0xFFFFFFFF
    even, odd = _top_bytes(values[0::2]), _top_bytes(values[1::2])
    return _join(fields, 4) - Uint32(above) | (even >> Uint32(4)) & Uint32(0x08080808) | odd & Uint32(0x80808080)


def _top_bytes(values: list[Any]) -> Any:
    """The sign's byte of 2 or 4 fp32s, side by side in a u32."""
    pairs = [
        warp_matrix.permute(ptx.bits(a), ptx.bits(b), 0x0073) for a, b in zip(values[::2], values[1::2], strict=True)
    ]
    return pairs[0] if len(pairs) == 1 else warp_matrix.permute(pairs[0], pairs[1], 0x5410)


def _unpack(element: Element, arch: Arch, word: Any) -> list[Any]:
    """The fp32 values of a u32 of codes."""
    if element is Element.E4M3:
        halves = [ptx.from_e4m3x2(Uint16(word >> Uint32(shift) & Uint32(0xFFFF))) for shift in (0, 16)]
        return [value for pair in halves for value in pair]
    if arch.blackwell:
        pairs = [ptx.from_e2m1x2(word >> Uint32(shift) & Uint32(0xFF)) for shift in (0, 8, 16, 24)]
        return [value for pair in pairs for value in pair]
    return [_from_e2m1(word >> Uint32(shift) & Uint32(0xF)) for shift in range(0, 32, 4)]


def _from_e2m1(code: Any) -> Any:
    """The fp32 of an e2m1 code: its bits at the top of an fp32's exponent and mantissa stand for value · 2^−126."""
    bits = (code & Uint32(7)) << Uint32(22) | (code & Uint32(8)) << Uint32(28)
    return ptx.from_bits(bits) * Float32(2.0**126)
