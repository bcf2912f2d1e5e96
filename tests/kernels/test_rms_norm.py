"""RMS norm against float64, in every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.formats import FP8, MXFP4, MXFP8, NVFP4, BlockFormat, ScaleLayout
from rose_dist.kernels.quantize import dequantize, reference
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized

EPS = 1e-5
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
"""Half a unit in the last place, relative; for fp32 what the approximate reciprocal root leaves."""


def exact(x: torch.Tensor, weight: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + bias)


def assert_rounded(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.double() - wanted).abs()
    assert (error <= wanted.abs() * ROUNDING[got.dtype] * 1.01 + 1e-7).all(), error.max()


@pytest.mark.parametrize("hidden", [64, 128, 2880, 7168])
def test_matches_float64(gpu: Any, row_counts: tuple[int, ...], hidden: int) -> None:
    for rows in row_counts:
        x, weight = torch.randn(rows, hidden).bfloat16() * 3, torch.randn(hidden).bfloat16()
        got = rms_norm(gpu.tensor(x), gpu.tensor(weight), EPS)
        assert_rounded(gpu.plain(got), exact(x, weight))


@pytest.mark.parametrize("hidden", [512, 16384])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_weight_bias_and_rows_apart(gpu: Any, dtype: torch.dtype, hidden: int) -> None:
    wide, weight = torch.randn(3, hidden + 32).to(dtype), torch.randn(hidden)
    got = rms_norm(gpu.tensor(wide)[:, 16 : 16 + hidden], gpu.tensor(weight), EPS, weight_bias=1.0)
    assert_rounded(gpu.plain(got), exact(wide[:, 16 : 16 + hidden], weight, 1.0))


def test_many_rows_take_the_bandwidth_variant(gpu: Any) -> None:
    rows = 8 * gpu.info.sms + 3
    x, weight = torch.randn(rows, 256).bfloat16(), torch.randn(256).bfloat16()
    assert_rounded(gpu.plain(rms_norm(gpu.tensor(x), gpu.tensor(weight), EPS)), exact(x, weight))


@pytest.mark.parametrize("hidden", [256, 2880])
def test_residual_is_the_rounded_sum(gpu: Any, row_counts: tuple[int, ...], hidden: int) -> None:
    for rows in row_counts:
        x, residual = torch.randn(2, rows, hidden).bfloat16()
        weight = torch.randn(hidden).bfloat16()
        normed, total = add_rms_norm(gpu.tensor(x), gpu.tensor(residual), gpu.tensor(weight), EPS)
        wanted = (x.double() + residual.double()).to(torch.bfloat16)
        assert torch.equal(gpu.plain(total), wanted)
        assert_rounded(gpu.plain(normed), exact(wanted, weight))


def test_in_place(gpu: Any) -> None:
    x, weight = torch.randn(3, 256).bfloat16(), torch.randn(256).bfloat16()
    moved = gpu.tensor(x)
    assert rms_norm(moved, gpu.tensor(weight), EPS, out=moved) is moved
    assert_rounded(gpu.plain(moved), exact(x, weight))


@pytest.mark.parametrize("fmt", [FP8, MXFP8, MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_quantised_output_decodes_to_the_norm(gpu: Any, fmt: BlockFormat, residual: bool) -> None:
    hidden = 2880
    x, other = torch.randn(2, 3, hidden).bfloat16()
    weight = torch.randn(hidden).bfloat16()
    tensor_scale = torch.tensor([448.0 * 6 / 12]) if fmt is NVFP4 else None
    moved_scale = None if tensor_scale is None else gpu.tensor(tensor_scale)
    codes, scales, total = rms_norm_quantized(
        gpu.tensor(x), gpu.tensor(weight), EPS, fmt, residual=gpu.tensor(other) if residual else None,
        global_scale=moved_scale,
    )  # fmt: skip
    summed = (x.double() + other.double()).to(torch.bfloat16) if residual else x
    wanted = exact(summed, weight)
    assert (total is not None) == residual
    if total is not None:
        assert torch.equal(gpu.plain(total), summed)
    got = dequantize(codes, scales, fmt, dtype=torch.float32, global_scale=moved_scale)
    expected_codes, expected_scales = reference(wanted.float(), fmt, tensor_scale)
    # The norm itself may differ in its last bit, which moves a code only where it lay on a boundary.
    same = (gpu.plain(codes).view(torch.uint8) == expected_codes.view(torch.uint8)).float().mean()
    assert same > 0.998
    step = {FP8: 2**-4, MXFP8: 2**-3, MXFP4: 2**-1, NVFP4: 2**-2}[fmt]
    largest = wanted.abs().unflatten(-1, (-1, 64)).amax(-1).repeat_interleave(64, -1)
    assert ((gpu.plain(got).double() - wanted).abs() <= largest * step).all()
    assert expected_scales.shape == (3, fmt.blocks(hidden))


@pytest.mark.parametrize("fmt", [FP8, MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("hidden", [64, 128, 288])
def test_quantised_rows_for_every_processor(gpu: Any, fmt: BlockFormat, hidden: int) -> None:
    """So many that lanes take several vectors at a time."""
    rows = 8 * gpu.info.sms + 3
    x, weight = torch.randn(rows, hidden).bfloat16(), torch.randn(hidden).bfloat16()
    tensor_scale = torch.tensor([64.0]) if fmt is NVFP4 else None
    moved_scale = None if tensor_scale is None else gpu.tensor(tensor_scale)
    codes, scales, _ = rms_norm_quantized(gpu.tensor(x), gpu.tensor(weight), EPS, fmt, global_scale=moved_scale)
    expected_codes, expected_scales = reference(exact(x, weight).float(), fmt, tensor_scale)
    same = gpu.plain(codes).view(torch.uint8) == expected_codes.view(torch.uint8)
    assert same.float().mean() > 0.998
    assert same.any(-1).all()
    assert gpu.plain(scales).float().flatten().tolist() == pytest.approx(
        expected_scales.float().flatten().tolist(), rel=2**-3 if fmt is NVFP4 else 1e-5
    )


def test_scale_layouts_hold_the_same_scales(gpu: Any) -> None:
    from rose_dist.kernels.quantize import gather  # noqa: PLC0415

    x, weight = torch.randn(5, 512).bfloat16(), torch.randn(512).bfloat16()
    for fmt, layouts in ((FP8, (ScaleLayout.COLUMNS,)), (MXFP8, (ScaleLayout.TILES, ScaleLayout.PACKED_COLUMNS))):
        arguments = (gpu.tensor(x), gpu.tensor(weight), EPS, fmt)
        plain = gpu.plain(rms_norm_quantized(*arguments)[1])
        for layout in layouts:
            scales = rms_norm_quantized(*arguments, layout=layout)[1]
            assert torch.equal(gather(gpu.plain_storage(scales), fmt, layout, 5, 512).cpu(), plain)


def test_no_rows(gpu: Any) -> None:
    x, weight = torch.zeros(0, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
    assert rms_norm(gpu.tensor(x), gpu.tensor(weight), EPS).shape == (0, 256)


def test_nan_and_infinity_stay_in_their_row(gpu: Any) -> None:
    x, weight = torch.randn(3, 256).bfloat16(), torch.ones(256, dtype=torch.bfloat16)
    x[1, 7] = float("nan")
    got = gpu.plain(rms_norm(gpu.tensor(x), gpu.tensor(weight), EPS))
    assert got[1].isnan().all()
    assert_rounded(got[[0, 2]], exact(x[[0, 2]], weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x.double(), w), "x: dtype is torch.float64"),
        (lambda x, w: (x, w.half()), "weight: dtype is torch.float16"),
        (lambda x, w: (x[:, ::2], w[::2].contiguous()), "x: rows are not contiguous"),
        (lambda x, w: (x[:, 1:249], w[1:249].contiguous()), "x: starts at an address"),
        (lambda x, w: (x[:, :252], w[:252]), "x's hidden size: is 252; must be a positive multiple of 8"),
        (lambda x, w: (x, w[:128]), r"weight: shape is \(128,\); needs \(256\)"),
        (lambda x, w: (x[0], w), "x: shape is"),
        (lambda x, w: (x[:, ::2].contiguous(), w[::2]), "weight: is not contiguous"),
    ],
)
def test_bad_arguments_are_named(gpu: Any, change: Any, message: str) -> None:
    x, weight = gpu.tensor(torch.randn(4, 256).bfloat16()), gpu.tensor(torch.randn(512).bfloat16())[:256]
    changed = change(x, weight)
    with pytest.raises(KernelArgumentError, match=message):
        rms_norm(*changed, EPS)
