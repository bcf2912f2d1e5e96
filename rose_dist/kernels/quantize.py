"""Block-scaled quantisation and its inverse, for every format of `formats.py`.

The rules, in fp32 with one rounding a step, so that reference and kernel agree bit for bit:

- FP8: scale = max(|x|…, 1e-10) · (1 / 448), code = e4m3(x · (1 / scale)). A NaN or an
  infinity makes its scale and all codes of its block NaN.
- E8M0 scales: 2^k with k = floor(log2(max|x|)) − emax (OCP MX 6.3), or the least k that clips nothing; codes are
  x / 2^k, to nearest even, saturating. k below −127 becomes −127. A block with a NaN or an infinity gets the NaN scale
  (255) and zero codes, so that the damage shows.
- NVFP4: scale = e4m3(max|x| · (1 / 6) · global_scale), code = e2m1(x · (global_scale · (1 / scale))), 0 where the
  scale is 0. A block with a NaN or an infinity gets the NaN scale (0x7F) and zero codes. With global_scale =
  448 · 6 / max|tensor|, x ≈ code · scale / global_scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.formats import (
    E2M1_MAGNITUDES,
    E4M3_MAX,
    MIN_AMAX,
    BlockFormat,
    BlockOutput,
    Element,
    Scale,
    ScaleLayout,
)  # fmt: skip
from rose_dist.kernels.row_tiling import DECODE_SHAPES, QUANTIZE_SHAPES


def quantize(
    x: Tensor,
    fmt: BlockFormat,
    *,
    layout: ScaleLayout = ScaleLayout.ROWS,
    global_scale: Tensor | None = None,
    live_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode every row of `x` in blocks.

    Args:
        x: [rows, columns], bf16, fp16 or fp32; columns a multiple of 16.
        layout: order of the scales.
        global_scale: fp32 [1], NVFP4 only.
        live_rows: int32 [1]; rows from there on are left unwritten. None: all are live.

    Returns:
        codes: float8_e4m3fn [rows, columns], or uint8 [rows, columns / 2] with the earlier value in the low nibble.
        scales: as `ScaleLayout.empty` says.

    Raises:
        KernelArgumentError: for an argument that the format or the kernel can't take.
    """
    checks.shape("x", x, None, None)
    checks.dtype("x", x, torch.bfloat16, torch.float16, torch.float32)
    checks.multiple("x's columns", x.shape[1], 16, "codes and blocks are written in whole words")
    checks.global_scale(fmt, global_scale, x.device)
    rows, columns = x.shape
    codes, scales = launch.empty_quantized(fmt, layout, rows, columns, x.device)
    if not x.is_cuda:
        live = rows if live_rows is None else min(int(live_rows), rows)
        plain_codes, plain_scales = reference(x[:live], fmt, global_scale)
        codes[:live] = plain_codes
        arrange(plain_scales, layout, scales, live)
        return codes, scales
    checks.rows("x", x)
    checks.live_rows(live_rows, x.device)
    if rows:
        device = launch.device(x)
        stride = x.stride(0) * x.element_size()
        vector_bytes = launch.widest(device.arch, stride, columns * x.element_size(), x.data_ptr())
        output, shape = BlockOutput(fmt, layout, columns), QUANTIZE_SHAPES.select(rows // device.sms)
        from rose_dist.kernels.cute import quantize as cute  # noqa: PLC0415 - it loads the compiler

        launcher = cute.quantizer(device.arch, x.dtype, shape, vector_bytes, output)
        launch.run(launcher, x, x, x.stride(0), codes, scales, layout.padded_rows(rows), global_scale, live_rows, rows)
    return codes, scales


def dequantize(
    codes: Tensor,
    scales: Tensor,
    fmt: BlockFormat,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: ScaleLayout = ScaleLayout.ROWS,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Decode `quantize`'s codes and scales to [rows, columns] of `dtype` (bf16, fp16 or fp32).

    code · scale (NVFP4: code · (scale · (1 / global_scale))) in fp32, rounded once.
    """
    checks.shape("codes", codes, None, None)
    checks.dtype("codes", codes, fmt.codes_dtype())
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise checks.fail("dtype", f"is {dtype}; allowed: bfloat16, float16, float32")
    checks.global_scale(fmt, global_scale, codes.device)
    rows, columns = codes.shape[0], codes.shape[1] * 8 // fmt.element.bits
    checks.multiple("columns", columns, 16, "codes are read in whole words")
    if not codes.is_cuda:
        plain = gather(scales, fmt, layout, rows, columns)
        return reference_decode(codes, plain, fmt, columns, global_scale).to(dtype)
    checks.dense("codes", codes)
    checks.same_device("scales", scales, codes.device)
    checks.scales(scales, fmt, layout, rows, columns)
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if rows:
        device = launch.device(codes)
        vector_bytes = launch.widest(device.arch, columns * dtype.itemsize, out.data_ptr())
        shape = DECODE_SHAPES.select(rows // device.sms)
        from rose_dist.kernels.cute import quantize as cute  # noqa: PLC0415 - it loads the compiler

        launcher = cute.dequantizer(device.arch, dtype, shape, vector_bytes, BlockOutput(fmt, layout, columns))
        launch.run(launcher, codes, codes, scales, layout.padded_rows(rows), global_scale, out, rows)
    return out


def arrange(plain: Tensor, layout: ScaleLayout, out: Tensor, rows: int) -> None:
    """Write scales [rows, blocks] into `out`, a tensor of `ScaleLayout.empty`, zeroing its padding blocks."""
    blocks = plain.shape[1]
    flat = _flat(out, plain.dtype)
    row, block = torch.meshgrid(torch.arange(rows), torch.arange(layout.padded_blocks(blocks)), indexing="ij")
    place = layout.offset(row, block, layout.padded_rows(out.shape[0]), blocks)
    padded = torch.zeros(place.shape, dtype=torch.uint8 if plain.element_size() == 1 else plain.dtype)
    padded[:, :blocks] = plain.view(padded.dtype)
    flat.view(padded.dtype)[place.to(flat.device)] = padded.to(flat.device)


def gather(scales: Tensor, fmt: BlockFormat, layout: ScaleLayout, rows: int, columns: int) -> Tensor:
    """Scales of any layout as [rows, blocks]."""
    blocks = fmt.blocks(columns)
    row, block = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    place = layout.offset(row, block, layout.padded_rows(rows), blocks).to(scales.device)
    flat = _flat(scales, fmt.scale.value)
    narrow = torch.uint8 if flat.element_size() == 1 else flat.dtype
    return flat.view(narrow)[place].view(fmt.scale.value)


def _flat(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """All scales including padding, in memory order."""
    storage = torch.empty(0, dtype=scales.dtype, device=scales.device)
    count = scales.untyped_storage().nbytes() // scales.element_size() - scales.storage_offset()
    return storage.set_(scales.untyped_storage(), scales.storage_offset(), (count,), (1,)).view(dtype)


# --- References -------------------------------------------------------------------------------------------------------


def reference(x: Tensor, fmt: BlockFormat, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`quantize` in torch, scales as [rows, blocks]; the definition that the kernel reproduces bit for bit."""
    rows, columns = x.shape
    blocks = fmt.blocks(columns)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * fmt.block - columns))
    values = padded.view(rows, blocks, fmt.block)
    largest = values.abs().amax(-1) if columns else values.new_zeros(rows, blocks)
    finite = largest.isfinite()
    if fmt.scale is Scale.FP32:
        scales = largest.clamp(min=MIN_AMAX) * (1.0 / E4M3_MAX)
        scales = torch.where(finite, scales, torch.nan)
        scaled = values * (1.0 / scales)[..., None]
        stored = scales
    else:
        inverse, stored = _e8m0(largest, finite, fmt) if fmt.scale is Scale.E8M0 else _e4m3(largest, global_scale)
        scaled = torch.where(finite[..., None], values * inverse[..., None], 0.0)
        stored = torch.where(finite, stored, 255 if fmt.scale is Scale.E8M0 else 0x7F).to(torch.uint8)
    scaled = scaled.reshape(rows, padded.shape[1])[:, :columns]
    return _element_codes(scaled, fmt.element), stored.view(fmt.scale.value)


def reference_decode(
    codes: Tensor, scales: Tensor, fmt: BlockFormat, columns: int, global_scale: Tensor | None = None
) -> Tensor:
    """`dequantize` in torch to fp32; `scales` as [rows, blocks]."""
    if fmt.element is Element.E4M3:
        values = codes.float()
    else:
        table = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], device=codes.device)
        values = table[torch.stack([codes & 15, codes >> 4], -1).int()].flatten(-2)
    if fmt.scale is Scale.E8M0:
        bits = torch.where(scales == 0, 0x0040_0000, scales.int() << 23)
        wide = torch.where(scales == 255, 0x7FC0_0000, bits).int().view(torch.float32)
    else:
        wide = scales.float()
    if global_scale is not None:
        wide = wide * (1.0 / global_scale)
    return values * wide.repeat_interleave(fmt.block, -1)[:, :columns]


def _e8m0(largest: Tensor, finite: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """2^−k and k + 127 of every block."""
    if fmt.saturates:
        power = torch.frexp(largest).exponent - 1 - fmt.element.max_exponent
    else:
        # max = (1 + m) · 2^e: one power more where the block's mantissa exceeds that of max.
        mantissa, power = torch.frexp(largest)
        above = mantissa > fmt.element.max / 2 ** (fmt.element.max_exponent + 1)
        power = power - 1 - fmt.element.max_exponent + above.int()
    exponent = torch.where(finite & (largest > 0), power + 127, 0).clamp(min=0)
    return ((254 - exponent) << 23).view(torch.float32), exponent


def _e4m3(largest: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """global_scale / scale (0 where the scale is 0) and the scale's code of every block."""
    assert global_scale is not None
    scale = (largest * (1.0 / 6.0) * global_scale).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    inverse = torch.where(scale.float() == 0, 0.0, global_scale * (1.0 / scale.float()))
    return inverse, scale.view(torch.uint8)


def _element_codes(scaled: Tensor, element: Element) -> Tensor:
    if element is Element.E4M3:
        codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return torch.where(scaled.isnan(), 0x7F, codes.view(torch.uint8)).to(torch.uint8).view(torch.float8_e4m3fn)
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=scaled.device)
    magnitude = scaled.abs()[..., None]
    # A tie goes to the even code: upwards from odd middles.
    above = torch.where(torch.arange(7, device=scaled.device) % 2 == 1, magnitude >= middle, magnitude > middle)
    codes = above.sum(-1).to(torch.uint8) | torch.signbit(scaled).to(torch.uint8) << 3
    return codes[:, 0::2] | codes[:, 1::2] << 4
