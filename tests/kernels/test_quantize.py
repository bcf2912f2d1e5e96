"""Quantisers against the formats' definitions, written here from their value tables and exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.formats import (
    FORMATS,
    FP8,
    FP8_UE8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    BlockFormat,
    Element,
    Scale,
    ScaleLayout,
)  # fmt: skip
from rose_dist.kernels.quantize import dequantize, gather, quantize, reference

GLOBAL_SCALE = 3.5


def table(element: Element) -> list[float]:
    """Every non-negative finite value of an element format, from its bits (OCP 8-bit FP and MX specifications)."""
    if element is Element.E2M1:
        return [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]


def nearest(value: float, element: Element) -> int:
    """Code of the nearest value, ties to the even code, saturating; the sign bit on top."""
    values = table(element)
    sign = int(math.copysign(1.0, value) < 0) * (8 if element is Element.E2M1 else 128)
    exact = abs(Fraction(value))
    low = max(i for i, v in enumerate(values) if Fraction(v) <= exact)
    if low + 1 == len(values):
        return sign | low
    below, above = exact - Fraction(values[low]), Fraction(values[low + 1]) - exact
    return sign | (low + (above < below or (above == below and low % 2 == 1)))


def define_block(block: np.ndarray, fmt: BlockFormat, global_scale: float) -> tuple[list[int], int | float]:
    """Codes and scale of one block by the rules in `quantize`'s docstring."""
    f32 = np.float32
    largest = float(np.max(np.abs(block)))
    if fmt.scale is Scale.FP32:
        scale = f32(max(largest, f32(1e-10)) if math.isfinite(largest) else math.nan) * f32(1 / 448)
        scaled = block * (f32(1) / scale)
        return [0x7F if np.isnan(v) else nearest(float(v), fmt.element) for v in scaled], float(scale)
    if not math.isfinite(largest):
        return [0] * len(block), 255 if fmt.scale is Scale.E8M0 else 0x7F
    if fmt.scale is Scale.E8M0:
        exponent = -127
        if largest > 0:
            ratio = Fraction(largest) / (2**fmt.element.max_exponent if fmt.saturates else int(fmt.element.max))
            exponent = math.frexp(largest)[1] + 20
            while Fraction(2) ** exponent > ratio:  # floor(log2(ratio))
                exponent -= 1
            if not fmt.saturates and Fraction(2) ** exponent < ratio:
                exponent += 1
            exponent = max(exponent, -127)
        scaled_exact = [float(Fraction(float(v)) / Fraction(2) ** exponent) for v in block]
        # −0 keeps its sign, which a fraction has not.
        signed = [math.copysign(s, v) for s, v in zip(scaled_exact, block, strict=True)]
        return [nearest(v, fmt.element) for v in signed], exponent + 127
    code = nearest(float(f32(largest) * f32(1 / 6) * f32(global_scale)), Element.E4M3)
    scale = table(Element.E4M3)[code]
    inverse = f32(0) if scale == 0 else f32(global_scale) * (f32(1) / f32(scale))
    return [nearest(float(v), fmt.element) for v in block * inverse], code


def definition(x: torch.Tensor, fmt: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (one a byte) and scales of every row."""
    values = x.float().numpy()
    codes, scales = [], []
    with np.errstate(all="ignore"):
        for row in values:
            blocks = [row[i : i + fmt.block] for i in range(0, len(row), fmt.block)]
            defined = [define_block(block, fmt, GLOBAL_SCALE) for block in blocks]
            codes.append([c for block, _ in defined for c in block])
            scales.append([s for _, s in defined])
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(scales)


def inputs(dtype: torch.dtype, columns: int) -> torch.Tensor:
    """Rows of ordinary values, and rows of each special kind."""
    spread = torch.randn(4, columns) * torch.logspace(-6, 6, columns).exp2()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2, columns // 8)
    ties[1] *= -(2.0**-20)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = [torch.nextafter(middles, middles.sign() * end) for end in (0.0, math.inf)]
    beside = torch.cat([*near, torch.tensor([6.0, 7.0])]).repeat(1, columns // 16) * torch.tensor([[1.0], [-1.0]])
    eighths = torch.arange(columns).float().remainder(512) + 0.5
    zeros = torch.zeros(3, columns)
    zeros[1] = -0.0
    zeros[2, 5] = 2.0**-133
    special = torch.randn(6, columns)
    special[0, 3], special[1, 9], special[2, 17] = math.nan, math.inf, -math.inf
    special[3] *= 2.0**-126
    special[4] *= 3.0e38
    special[5, ::7] = 448.0
    clip = torch.full((2, columns), 0.01)
    clip[0, ::16], clip[1, ::16] = 1.99, 1.75
    return torch.cat([spread, ties, beside, eighths[None], zeros, special.clamp(-3.3e38, 3.3e38), clip]).to(dtype)


def unpacked(codes: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    raw = codes.view(torch.uint8)
    return raw if fmt.element is Element.E4M3 else torch.stack([raw & 15, raw >> 4], -1).flatten(-2)


def tensor_scale(fmt: BlockFormat) -> torch.Tensor | None:
    return torch.tensor([GLOBAL_SCALE]) if fmt is NVFP4 else None


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_the_definition(fmt: BlockFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = inputs(dtype, 256)
    codes, scales = reference(x, fmt, tensor_scale(fmt))
    wanted_codes, wanted_scales = definition(x, fmt)
    assert torch.equal(unpacked(codes, fmt), wanted_codes)
    plain = scales.float() if fmt.scale is Scale.FP32 else scales.view(torch.uint8)
    assert torch.equal(plain.nan_to_num(nan=-1.0), wanted_scales.to(plain.dtype).nan_to_num(nan=-1.0))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernel_equals_reference_bit_for_bit(gpu: Any, fmt: BlockFormat, dtype: torch.dtype) -> None:
    """2880 columns: the last block of FP8 is half one."""
    columns = 2880 if gpu.real or dtype is torch.bfloat16 else 288
    x = inputs(torch.float32, columns).to(dtype)
    scale = tensor_scale(fmt)
    codes, scales = quantize(gpu.tensor(x), fmt, global_scale=None if scale is None else gpu.tensor(scale))
    wanted_codes, wanted_scales = reference(x, fmt, scale)
    assert torch.equal(gpu.plain(codes).view(torch.uint8), wanted_codes.view(torch.uint8))
    narrow = torch.int32 if fmt.scale is Scale.FP32 else torch.uint8
    same = gpu.plain(scales).view(narrow) == wanted_scales.view(narrow)
    assert (same | (wanted_scales.isnan() if fmt.scale is Scale.FP32 else torch.zeros(()).bool())).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("columns", [288, 144])
def test_rows_for_every_processor(gpu: Any, fmt: BlockFormat, columns: int) -> None:
    """So many that lanes take several vectors; 144 columns end inside a lane's part of a block."""
    x = inputs(torch.float32, columns).repeat(8 * gpu.info.sms // 16, 1)[: 8 * gpu.info.sms + 1].bfloat16()
    scale = tensor_scale(fmt)
    codes, scales = quantize(gpu.tensor(x), fmt, global_scale=None if scale is None else gpu.tensor(scale))
    wanted_codes, wanted_scales = reference(x, fmt, scale)
    assert torch.equal(gpu.plain(codes).view(torch.uint8), wanted_codes.view(torch.uint8))
    plain = gpu.plain(scales).view(fmt.scale.value).float()
    assert torch.equal(plain.nan_to_num(nan=-1.0), wanted_scales.float().nan_to_num(nan=-1.0))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_many_random_rows(fmt: BlockFormat) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for rows in (1, 3, 127, 8191):
        x = (torch.randn(rows, 2880, device="cuda") * torch.randn(rows, 1, device="cuda").exp2()).bfloat16()
        scale = tensor_scale(fmt)
        scale = None if scale is None else scale.cuda()
        codes, scales = quantize(x, fmt, global_scale=scale)
        wanted_codes, wanted_scales = reference(x, fmt, scale)
        assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
        assert torch.equal(scales.view(torch.uint8), wanted_scales.view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoding_every_code_and_scale(gpu: Any, fmt: BlockFormat, dtype: torch.dtype) -> None:
    columns = 256 if fmt.element is Element.E4M3 else 32
    rows = 256 if fmt.scale is Scale.E8M0 and gpu.real else 20
    pattern = torch.arange(columns) if fmt.element is Element.E4M3 else torch.arange(columns) % 16
    codes = pattern.to(torch.uint8).repeat(rows, 1)
    packed = codes if fmt.element is Element.E4M3 else codes[:, 0::2] | codes[:, 1::2] << 4
    blocks = fmt.blocks(columns)
    if fmt.scale is Scale.FP32:
        scales = torch.randn(rows, blocks).exp2()
    else:
        ends = [0, 1, 2, 126, 127, 128, 253, 254, 255] if fmt.scale is Scale.E8M0 else [0, 1, 7, 8, 56, 119, 126, 127]
        chosen = torch.arange(rows) if rows == 256 else torch.tensor(ends).repeat(3)[:rows]
        scales = chosen[:, None].expand(rows, blocks).contiguous().to(torch.uint8).view(fmt.scale.value)
    values = torch.tensor(table(fmt.element))
    magnitude = codes.int() & (127 if fmt.element is Element.E4M3 else 7)
    nan = magnitude == 127 if fmt.element is Element.E4M3 else torch.zeros_like(codes, dtype=torch.bool)
    wide = values[magnitude.clamp(max=len(values) - 1)].double().masked_fill(nan, math.nan)
    wide = torch.where(codes >= (128 if fmt.element is Element.E4M3 else 8), -wide, wide)
    factor = scales.double()
    if fmt.scale is Scale.E8M0:
        factor = torch.where(scales == 255, math.nan, (scales.double() - 127).exp2())
    if fmt is NVFP4:
        factor = (scales.float() * (1.0 / torch.tensor(GLOBAL_SCALE))).double()
    wanted = (wide * factor.repeat_interleave(fmt.block, -1)[:, :columns]).float().to(dtype)
    scale = tensor_scale(fmt)
    got = dequantize(
        gpu.tensor(packed.view(fmt.codes_dtype())), gpu.tensor(scales), fmt, dtype=dtype,
        global_scale=None if scale is None else gpu.tensor(scale),
    )  # fmt: skip
    assert torch.equal(gpu.plain(got).nan_to_num(nan=12345.0), wanted.nan_to_num(nan=12345.0))


@pytest.mark.parametrize(
    ("fmt", "layout"),
    [
        (FP8, ScaleLayout.COLUMNS),
        (FP8_UE8M0, ScaleLayout.PACKED_COLUMNS),
        (MXFP8, ScaleLayout.TILES),
        (MXFP4, ScaleLayout.TILES),
        (NVFP4, ScaleLayout.TILES),
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [288, 2880])
def test_layouts(gpu: Any, fmt: BlockFormat, layout: ScaleLayout, columns: int) -> None:
    """The scales stand where the layout says, padding is zero, and both directions agree."""
    x = torch.randn(5, columns).bfloat16()
    scale = tensor_scale(fmt)
    moved = None if scale is None else gpu.tensor(scale)
    codes, scales = quantize(gpu.tensor(x), fmt, layout=layout, global_scale=moved)
    wanted_codes, wanted_scales = reference(x, fmt, scale)
    storage = gpu.plain_storage(scales)
    assert torch.equal(gather(storage, fmt, layout, 5, columns).cpu(), wanted_scales)
    blocks = fmt.blocks(columns)
    if layout is ScaleLayout.PACKED_COLUMNS:
        words = scales.as_subclass(torch.Tensor)
        assert words.shape == (5, -(-blocks // 4))
        assert words.stride() == (1, 8)
        plain = torch.stack(list(words)).cpu().view(torch.uint8)
        assert torch.equal(plain[:, :blocks], wanted_scales)
        assert not plain[:, blocks:].any()
    if layout is ScaleLayout.TILES:
        wide = torch.zeros(128, -(-blocks // 4) * 4, dtype=torch.uint8)
        wide[:5, :blocks] = wanted_scales.view(torch.uint8)
        # The published shuffle: [4, 32, tiles, 4] -> [tiles, 32, 4, 4].
        shuffled = wide.view(4, 32, -1, 4).permute(2, 1, 0, 3).reshape(-1)
        got = storage.cpu().view(torch.uint8).reshape(-1)
        tiles = got.view(-1, 32, 4, 4)
        assert torch.equal(tiles[:, :5, 0], shuffled.view(-1, 32, 4, 4)[:, :5, 0])
    decoded = dequantize(codes, scales, fmt, layout=layout, global_scale=moved)
    straight = dequantize(
        gpu.tensor(wanted_codes), gpu.tensor(wanted_scales), fmt, global_scale=moved
    )  # fmt: skip
    assert torch.equal(gpu.plain(decoded), gpu.plain(straight))


def test_dead_rows_stay_unwritten(gpu: Any) -> None:
    x = torch.randn(4, 256).bfloat16()
    codes, scales = quantize(gpu.tensor(x), MXFP8, live_rows=gpu.tensor(torch.tensor([2], dtype=torch.int32)))
    wanted, _ = reference(x, MXFP8)
    raw = gpu.plain(codes).view(torch.uint8)
    assert torch.equal(raw[:2], wanted.view(torch.uint8)[:2])
    assert (raw[2:] == 0xA5).all()
    assert (gpu.plain(scales)[2:] == 0xA5).all()


def test_mxfp4_agrees_with_the_checkpoint_converter() -> None:
    from rose_dist.kernels.mxfp4 import quantize_mxfp4  # noqa: PLC0415

    x = inputs(torch.float32, 256)
    codes, scales = reference(x, MXFP4)
    other_codes, other_scales = quantize_mxfp4(x)
    assert torch.equal(scales, other_scales)
    finite = scales != 255  # the codes of a block that is NaN mean nothing
    assert torch.equal(codes.view(other_codes.shape)[finite], other_codes[finite])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(2, 256, dtype=torch.int32)}, "x: dtype is torch.int32"),
        ({"x": torch.zeros(2, 24, dtype=torch.bfloat16)}, "x's columns: is 24; must be a positive multiple of 16"),
        ({"x": torch.zeros(256, dtype=torch.bfloat16)}, "x: shape is"),
        ({"fmt": NVFP4}, "global_scale: format nvfp4 needs one"),
        ({"global_scale": torch.ones(1)}, "global_scale: format fp8 takes none"),
        ({"fmt": NVFP4, "global_scale": torch.ones(1).double()}, "global_scale: dtype"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    given = {"x": torch.zeros(2, 256, dtype=torch.bfloat16), "fmt": FP8, **arguments}
    with pytest.raises(KernelArgumentError, match=message):
        quantize(given.pop("x"), given.pop("fmt"), **given)


def test_cpu_tensors_take_the_reference() -> None:
    x = torch.randn(5, 288).bfloat16()
    for fmt in FORMATS.values():
        scale = tensor_scale(fmt)
        codes, scales = quantize(x, fmt, global_scale=scale)
        wanted_codes, wanted_scales = reference(x, fmt, scale)
        assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
        assert torch.equal(scales, wanted_scales)
        error = (dequantize(codes, scales, fmt, global_scale=scale).float() - x.float()).abs().max()
        assert error < 1.1
