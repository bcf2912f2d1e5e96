"""MXFP4 against a scalar reference written from the OCP MX v1.0 text, with exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_dist.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4


def decode_code(code: int) -> Fraction:
    """Section 5.3.3: E2M1 with bias 1, no infinities and no NaN."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -magnitude if sign else magnitude


def decode_scale(scale: int) -> Fraction:
    """Section 5.4.1: E8M0 with bias 127."""
    return Fraction(2) ** (scale - 127)


def to_float(value: Fraction, dtype: torch.dtype) -> float:
    """The nearest value of `dtype`; above its range, infinity. Python's own conversion to double is exact here."""
    return torch.tensor(float(value), dtype=torch.float64).to(dtype).double().item()


def quantize_block(block: list[float]) -> tuple[list[int], int]:
    """Section 6.3 for one block of finite values: the shared exponent, then round to nearest even with saturation."""
    values = [Fraction(v) for v in block]
    peak = max(abs(v) for v in values)
    shared = -127
    if peak:
        shared = max(math.frexp(float(peak))[1] - 1 - 2, -127)  # frexp's mantissa is in [0.5, 1)
    codes = []
    for original, value in zip(block, values, strict=True):
        target = abs(value) / Fraction(2) ** shared
        nearest = min(range(8), key=lambda c: (abs(decode_code(c) - target), c & 1))
        codes.append(nearest | (8 if math.copysign(1, original) < 0 else 0))
    return codes, shared + 127


def squared_error(block: list[float], codes: list[int], scale: int) -> Fraction:
    return sum(
        ((Fraction(v) - decode_code(c) * decode_scale(scale)) ** 2 for v, c in zip(block, codes, strict=True)),
        Fraction(0),
    )


def unpack(blocks: torch.Tensor) -> list[int]:
    return [nibble for byte in blocks.tolist() for nibble in (byte & 15, byte >> 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_decodes_every_code_with_every_scale(dtype: torch.dtype) -> None:
    codes = list(range(16)) * 2
    block = torch.tensor([codes[i] | codes[i + 1] << 4 for i in range(0, 32, 2)], dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)
    out = dequantize_mxfp4(block.expand(256, 1, 16), scales[:, None], dtype)
    assert out.dtype == dtype
    assert out.shape == (256, 32)
    for scale in range(255):
        expected = [to_float(decode_code(c) * decode_scale(scale), dtype) for c in codes]
        assert out[scale].double().tolist() == expected, scale
        negative_zero = out[scale, 8]
        assert negative_zero == 0
        assert torch.signbit(negative_zero)
    assert out[255].isnan().all()


def test_decodes_more_than_one_chunk_and_any_leading_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 700, 40, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (3, 700, 40), dtype=torch.uint8, generator=generator)
    whole = dequantize_mxfp4(blocks, scales)
    assert whole.shape == (3, 700, 1280)
    for expert, row in ((0, 0), (1, 699), (2, 350)):
        for column in (0, 39):
            values = whole[expert, row, column * 32 : column * 32 + 32].double().tolist()
            scale = decode_scale(int(scales[expert, row, column]))
            assert values == [float(decode_code(c) * scale) for c in unpack(blocks[expert, row, column])]


def test_decodes_slices_that_are_not_contiguous() -> None:
    blocks = torch.randint(0, 256, (4, 6, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (4, 6, 2), dtype=torch.uint8)
    part = dequantize_mxfp4(blocks[:, 1::2], scales[:, 1::2])
    assert torch.equal(part, dequantize_mxfp4(blocks, scales)[:, 1::2])


@pytest.mark.parametrize(
    ("blocks", "scales", "dtype"),
    [
        (torch.zeros(2, 15, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8), torch.bfloat16),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8), torch.bfloat16),
        (torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, dtype=torch.uint8), torch.bfloat16),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8), torch.float64),
    ],
)
def test_refuses_what_is_not_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="MXFP4"):
        dequantize_mxfp4(blocks, scales, dtype)


def test_quantize_refuses_a_ragged_last_dimension() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_mxfp4(torch.zeros(2, 33))


def blocks_of_floats() -> st.SearchStrategy[list[float]]:
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    ties = st.sampled_from(
        [s * m for m in (0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 7.9) for s in (1, -1)]
    )
    tiny = st.floats(min_value=-(2.0**-126), max_value=2.0**-126, width=32)
    one_kind = st.sampled_from([anything, ties, tiny, st.floats(-8, 8, width=32)])
    return one_kind.flatmap(lambda s: hnp.arrays(np.float32, 32, elements=s)).map(lambda a: a.tolist())


@settings(max_examples=300)
@given(blocks_of_floats())
def test_quantizes_as_the_rule_says(block: list[float]) -> None:
    codes, scale = quantize_block(block)
    blocks, scales = quantize_mxfp4(torch.tensor(block))
    assert scales.tolist() == [scale]
    assert unpack(blocks[0]) == codes


@settings(max_examples=150)
@given(blocks_of_floats())
def test_search_takes_the_better_of_two_scales(block: list[float]) -> None:
    _, scale = quantize_block(block)
    plain = squared_error(block, quantize_block(block)[0], scale)
    blocks, scales = quantize_mxfp4(torch.tensor(block), search=True)
    found = squared_error(block, unpack(blocks[0]), int(scales))
    assert int(scales) in (scale, scale + 1)
    assert found <= plain * (1 + Fraction(1, 10**5))  # the search sums in float32


def test_search_matters_on_gaussian_weights() -> None:
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    error = {s: (dequantize_mxfp4(*quantize_mxfp4(x, search=s), torch.float32) - x).norm() for s in (False, True)}
    assert error[True] < 0.98 * error[False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_value_that_is_not_finite_decodes_to_nan(bad: float) -> None:
    x = torch.ones(2, 64)
    x[1, 40] = bad
    decoded = dequantize_mxfp4(*quantize_mxfp4(x, search=True))
    assert decoded[1, 32:].isnan().all()
    assert decoded[1, :32].eq(1).all()
    assert decoded[0].eq(1).all()


def test_every_mxfp4_number_survives_a_round_trip() -> None:
    """Blocks whose largest code is 4 or 6 have the scale that the rule itself picks, so even the bytes survive."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (255, 16), dtype=torch.uint8, generator=generator)
    blocks[:, 0] = 0x77
    scales = torch.arange(255, dtype=torch.uint8)
    keep = scales < 253  # 6 · 2^126 and above leave float32
    x = dequantize_mxfp4(blocks[:, None], scales[:, None], torch.float32)
    again, scales_again = quantize_mxfp4(x[keep])
    assert torch.equal(again[:, 0], blocks[keep])
    assert torch.equal(scales_again[:, 0], scales[keep])


def test_accepts_bfloat16_and_double() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for other in (x.float(), x.double()):
        for a, b in zip(quantize_mxfp4(x), quantize_mxfp4(other), strict=True):
            assert torch.equal(a, b)
