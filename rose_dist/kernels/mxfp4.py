"""MXFP4: 32 values in 16 bytes of FP4 (E2M1) codes and one shared power-of-two scale byte (E8M0).

Format: OCP Microscaling Formats (MX) Specification v1.0, sections 5.2, 5.3.3, 5.4.1 and 6.3. The nibble order is
GPT-OSS's: element 2i is the low nibble of byte i, element 2i+1 the high one. A code is sign << 3 | magnitude index; a
scale byte s stands for 2^(s − 127), and 255 for NaN.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import torch

BLOCK = 32
"""Values that share a scale."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 stand for; codes 8 to 15 are their negatives."""
SCALE_BIAS = 127
SCALE_NAN = 255

_MAX_EXPONENT = 2  # floor(log2(6)), emax of E2M1
_MIN_SCALE_EXPONENT = -SCALE_BIAS
_CHUNK_BYTES = 1 << 20  # bounds the gather's temporary indices
_CHUNK_BLOCKS = 1 << 16  # bounds the encoder's temporaries


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Decode `blocks` u8 [..., n/32, 16] and `scales` u8 [..., n/32] to [..., n] of `dtype`.

    Every value that `dtype` can hold is exact; larger ones become ±inf (6 · 2^127 in bfloat16), as IEEE
    multiplication gives. A block whose scale is 255 is NaN throughout.

    Args:
        dtype: bfloat16, float16 or float32.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, BLOCK // 2):
        raise ValueError(
            f"MXFP4 needs uint8 blocks [..., n/32, 16] and uint8 scales [..., n/32]; "
            f"got {blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )
    values = _gather(_value_pairs(dtype), blocks).view(dtype).view(*scales.shape, BLOCK)
    if dtype == torch.float16:  # its own range is narrower than the scale's
        return (values.float() * _decode_scales(scales)[..., None]).to(dtype).flatten(-2)
    return values.mul_(_decode_scales(scales).to(dtype)[..., None]).flatten(-2)


def quantize_mxfp4(x: torch.Tensor, *, search: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode `x` [..., n], 32 dividing n, of any float dtype, as blocks u8 [..., n/32, 16] and scales u8 [..., n/32].

    The scale is the OCP rule's, 2^(floor(log2(max|x|)) − 2); elements round to nearest, ties to even, and saturate at
    ±6. With `search`, a block takes the next larger scale where that gives the smaller squared error: it loses half
    the resolution but clips nothing. A block that holds a NaN or an infinity gets the NaN scale, so that the damage
    shows instead of hiding in 31 wrong neighbours.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 needs a last dimension that is a multiple of {BLOCK}, got {list(x.shape)}")
    groups = (*x.shape[:-1], x.shape[-1] // BLOCK)
    parts = [_quantize_blocks(part.float(), search) for part in torch.split(x.reshape(-1, BLOCK), _CHUNK_BLOCKS)]
    blocks, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return blocks.view(*groups, BLOCK // 2), scales.view(groups)


def _quantize_blocks(x: torch.Tensor, search: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [blocks, 32] to u8 [blocks, 16] and u8 [blocks]."""
    magnitudes = x.abs()
    peak = magnitudes.amax(-1)
    finite = peak.isfinite()
    peak = torch.where(finite, peak, 0.0)
    exponent = torch.where(peak > 0, torch.frexp(peak).exponent - 1 - _MAX_EXPONENT, _MIN_SCALE_EXPONENT)
    exponent = exponent.clamp(min=_MIN_SCALE_EXPONENT)
    magnitudes = magnitudes * _power_of_two(-exponent)[:, None]
    index = _round_magnitudes(magnitudes)
    if search:
        halves = magnitudes * 0.5
        candidate = _round_magnitudes(halves)
        better = 4 * _squared_error(halves, candidate) < _squared_error(magnitudes, index)
        exponent += better
        index = torch.where(better[:, None], candidate, index)
    codes = torch.where(finite[:, None], index.to(torch.uint8), 0) | (torch.signbit(x).to(torch.uint8) << 3)
    scales = torch.where(finite, exponent + SCALE_BIAS, SCALE_NAN).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


@cache
def _value_pairs(dtype: torch.dtype) -> torch.Tensor:
    """The two values of each byte side by side, as one integer of twice the width of `dtype`: [256]."""
    wide = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}
    if dtype not in wide:
        raise ValueError(f"MXFP4 decodes to bfloat16, float16 or float32, not {dtype}")
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], -1).to(dtype).view(wide[dtype]).flatten()


def _gather(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table[index], flattened. `index` is uint8, `table` holds 256 entries."""
    if index.is_cuda:
        return table.to(index.device)[index.flatten().int()]
    flat = index.numpy().reshape(-1)
    out = np.empty(flat.size, table.numpy().dtype)
    for start in range(0, flat.size, _CHUNK_BYTES):  # numpy gathers this several times faster than torch indexes
        part = slice(start, start + _CHUNK_BYTES)
        np.take(table.numpy(), flat[part], out=out[part], mode="clip")
    return torch.from_numpy(out)


def _decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """2^(s − 127) in float32; 2^−127 is a subnormal there, so the bits are written rather than computed."""
    bits = scales.int() << 23
    bits = torch.where(scales == 0, 0x0040_0000, bits)
    return torch.where(scales == SCALE_NAN, 0x7FC0_0000, bits).int().view(torch.float32)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float32 from its bits, for −126 ≤ exponent ≤ 127; exp2 may be off by a unit in the last place."""
    return ((exponent + 127) << 23).view(torch.float32)


def _round_magnitudes(magnitudes: torch.Tensor) -> torch.Tensor:
    """Indices int32 into `MAGNITUDES` of the nearest; a tie goes to the even index."""
    midpoints = [(a + b) / 2 for a, b in pairwise(MAGNITUDES)]
    # bucketize counts the bounds below the value; a bound under an odd midpoint lets the midpoint itself go up.
    bounds = [m if i % 2 == 0 else float(np.nextafter(np.float32(m), np.float32(0))) for i, m in enumerate(midpoints)]
    return torch.bucketize(magnitudes, magnitudes.new_tensor(bounds), out_int32=True)


def _squared_error(magnitudes: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of each block, in units of its scale's square: [blocks]."""
    return (magnitudes - magnitudes.new_tensor(MAGNITUDES)[index]).square().sum(-1)
