"""MXFP4 experts with rows in FP8 against float64 on values quantised alike, and their decoding bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_dist.kernels import mxfp4_e4m3
from rose_dist.kernels.arch import BLACKWELL, HOPPER, DeviceInfo
from rose_dist.kernels.e4m3_tiling import E4M3_SHAPES
from rose_dist.kernels.errors import KernelArgumentError, UnsupportedArchError
from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.kernels.mxfp4_e4m3 import SPAN, dequantize_near, expert_mlp_e4m3, launch_gemm
from rose_dist.kernels.mxfp4_experts import ExpertLayer, ExpertRows
from rose_dist.kernels.mxfp4_layout import PackedMxfp4
from rose_dist.kernels.row_groups import GROUPS, group_rows
from rose_dist.kernels.variants import Ranges
from tests.kernels.conftest import RealGPU, emulated
from tests.kernels.expert_layer import LIMIT, POISON, Layer

PLACES = torch.tensor([2 * (c % 8) + c // 8 for c in range(16)])
"""Where the columns of a cell stand."""


@pytest.fixture(params=["sm_90a", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        return RealGPU(monkeypatch)
    return emulated(monkeypatch, request.param)


def in_groups(codes: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows of e4m3 codes packed by expert, as the kernels have them; what is nobody's is NaN."""
    rows, columns = codes.shape
    groups = GROUPS.capacity(rows, len(counts)) // 8
    out = torch.full((groups, columns // 16, 8, 16), 0x7F, dtype=torch.uint8)
    for place, row in zip(slots(counts), codes.view(torch.uint8), strict=True):
        cells = torch.empty(columns // 16, 16, dtype=torch.uint8)
        cells[:, PLACES] = row.view(-1, 16)
        out[place // 8, :, place % 8] = cells
    return out


def slots(counts: torch.Tensor) -> list[int]:
    """Where each expert's rows are, counted in groups' rows."""
    starts = GROUPS.starts(counts).tolist()
    return [starts[e] + i for e, count in enumerate(counts.tolist()) for i in range(count)]


def e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def exact_mlp(x: torch.Tensor, first: Layer, second: Layer) -> torch.Tensor:
    """float64 for rows and activations in FP8; weights as they are."""
    out = torch.zeros(x.shape[0], second.blocks.shape[1], dtype=torch.float64)
    weights = [dequantize_mxfp4(layer.blocks, layer.scales, torch.float32).double() for layer in (first, second)]
    for expert, count in enumerate(first.counts.tolist()):
        part = slice(int(first.offsets[expert]), int(first.offsets[expert]) + count)
        scale = x[part].float().abs().amax(1, keepdim=True) * (1.0 / 448)
        y = e4m3(x[part].float() * (1.0 / scale)).double() @ weights[0][expert].T * scale.double()
        y = y if first.bias is None else y + first.bias[expert].double()
        gate, linear = y[:, 0::2].clamp(max=LIMIT), y[:, 1::2].clamp(-LIMIT, LIMIT)
        h = e4m3(gate / (1 + (-1.702 * gate).exp()) * (linear + 1) * 8).double() / 8
        z = h @ weights[1][expert].T
        out[part] = z if second.bias is None else z + second.bias[expert].double()
    return out


def run(gpu: Any, first: Layer, second: Layer) -> torch.Tensor:
    layers = [
        ExpertLayer(layer.packed(gpu), None if layer.bias is None else gpu.tensor(layer.bias))
        for layer in (first, second)
    ]
    return gpu.plain(expert_mlp_e4m3(gpu.tensor(first.x), *layers, first.expert_rows(gpu), limit=LIMIT))


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """A result of the first layer next to a border of two codes may fall on either side: 2^-4 of an element."""
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < 6e-3, error


@pytest.mark.parametrize("columns", [32, 224])
@pytest.mark.parametrize("counts", [[3, 0, 9], [1, 8, 0, 17]], ids=str)
def test_rows_are_quantised_into_groups(hopper: Any, columns: int, counts: list[int]) -> None:
    layer = Layer(counts, columns, 32, padding=1)
    layer.x[0, 0], layer.x[1] = torch.inf, 0.0
    rows = layer.expert_rows(hopper)
    grouped = group_rows(hopper.tensor(layer.x), rows.counts, rows.offsets, torch.uint8)
    codes, scales = (hopper.plain(t) for t in (grouped.cells, grouped.scales))
    live = layer.x[layer.live].float()
    wanted_scales = live.abs().amax(1, keepdim=True).clamp(min=1e-10) * (1.0 / 448)
    wanted_scales[0] = torch.nan
    wanted = in_groups((live * (1.0 / wanted_scales)).clamp(-448, 448).to(torch.float8_e4m3fn), layer.counts)
    at = torch.tensor(slots(layer.counts))
    assert torch.equal(scales[at].nan_to_num(7), wanted_scales[:, 0].nan_to_num(7))
    assert torch.equal(codes[at // 8, :, at % 8] & 0x7F, wanted[at // 8, :, at % 8] & 0x7F)
    assert torch.equal(codes[at[1:] // 8, :, at[1:] % 8], wanted[at[1:] // 8, :, at[1:] % 8])


@pytest.mark.parametrize("low", [20, 117, 128 - SPAN])
def test_every_code_and_scale_is_exact(hopper: Any, low: int) -> None:
    """All codes at each place of a block, with all of a row's scales. Rows of one 1 pick out columns of the weights."""
    layer = Layer([96], 384, 64, bias=False)
    layer.blocks[0] = torch.randint(0, 256, (64, 12, 16), dtype=torch.uint8)
    layer.scales[0] = (low + (torch.arange(12) + torch.arange(64)[:, None]) % 12).to(torch.uint8)
    layer.scales[0, 5, 1] = 255
    picked = [column + 32 * ((column + 4 * i) % 12) for i in range(3) for column in range(32)]
    got = products(hopper, layer, torch.eye(384)[picked])
    wanted = dequantize_mxfp4(layer.blocks, layer.scales, torch.bfloat16)[0][:, picked].T
    assert (got[:, 5].isnan()).all()
    others = [i for i in range(64) if i != 5]
    assert len(layer.scales[0, others].unique()) == SPAN + 1
    assert torch.equal(got[:, others], wanted[:, others])


def products(gpu: Any, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Of the second layer's kernel with rows that e4m3 holds exactly."""
    codes = gpu.tensor(in_groups(e4m3(x * 8), layer.counts))
    out = torch.empty(x.shape[0], layer.blocks.shape[1], dtype=torch.bfloat16, device=torch.device("cuda", 0))
    bias = None if layer.bias is None else gpu.tensor(layer.bias)
    whole = ExpertLayer(layer.packed(gpu), bias)
    shape = replace(E4M3_SHAPES.variants[1], widths=(96,))
    launch_gemm(codes, None, whole, layer.expert_rows(gpu), out, shape, alpha=0.0, limit=0.0)
    return gpu.plain(out)


def test_scales_far_below_a_rows_largest_are_raised(hopper: Any) -> None:
    layer = Layer([4], 64, 32, bias=False)
    layer.scales[0, :, 0], layer.scales[0, :, 1] = 120, 120 - SPAN - torch.arange(32).to(torch.uint8) % 8
    x = torch.eye(64)[[0, 31, 32, 63]]
    got = products(hopper, layer, x)
    packed = layer.packed(hopper)
    plain = PackedMxfp4(*(hopper.plain(t) for t in (packed.data, packed.rescale, packed.tops)))
    near = dequantize_near(plain, 0)
    assert torch.equal(got.float(), near[:, [0, 31, 32, 63]].T)
    exact = dequantize_mxfp4(layer.blocks, layer.scales, torch.float32)[0]
    assert torch.equal(near[:, :32], exact[:, :32])
    assert torch.equal(near[::8], exact[::8])
    assert ((near - exact).abs().amax(1) <= 6 * 2.0 ** (120 - 127 - SPAN)).all()


@pytest.mark.parametrize(
    ("counts", "columns", "inner", "outputs", "widths"),
    [
        ([33, 0, 64, 17], 160, 32, 288, (32, 40, 64)),
        ([170, 1, 137], 768, 64, 32, (112, 144)),
    ],
    ids=str,
)
def test_matches_float64(
    hopper: Any, counts: list[int], columns: int, inner: int, outputs: int, widths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Both shapes with some widths, warps and a warpgroup without a tile row, blocks with several items."""
    shape = replace(E4M3_SHAPES.select(max(counts)), widths=widths)
    monkeypatch.setattr(mxfp4_e4m3, "E4M3_SHAPES", Ranges((0,), (shape,)))
    first, second = Layer(counts, columns, 2 * inner), Layer(counts, inner, outputs)
    live = first.live
    assert_near(run(hopper, first, second)[live], exact_mlp(first.x, first, second)[live])


@pytest.mark.parametrize(
    ("counts", "columns", "stages"), [([1, 41, 2], 6, 4), ([3, 1, 33, 2, 1, 100, 5], 1, 4)], ids=str
)
def test_rings_that_items_do_not_divide(
    hopper: Any, counts: list[int], columns: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block with several items, some shorter than the ring."""
    if hopper.real:
        pytest.skip("in schedules of the interpreter")
    hopper.info = replace(hopper.info, sms=1)
    shape = replace(E4M3_SHAPES.variants[1], widths=(8, 40, 104), step_columns=1, stages=stages)
    monkeypatch.setattr(mxfp4_e4m3, "E4M3_SHAPES", Ranges((0,), (shape,)))
    first, second = Layer(counts, columns * 32, 64), Layer(counts, 32, 32)
    for hopper.seed in range(2):
        assert_near(run(hopper, first, second)[first.live], exact_mlp(first.x, first, second)[first.live])


def test_rows_between_experts_are_not_written(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a bias needed."""
    monkeypatch.setattr(mxfp4_e4m3, "E4M3_SHAPES", Ranges((0,), (replace(E4M3_SHAPES.variants[0], widths=(8,)),)))
    first, second = Layer([2, 0, 3], 96, 64, padding=2, bias=False), Layer([2, 0, 3], 32, 32, bias=False)
    got = run(hopper, first, second)
    assert_near(got[first.live], exact_mlp(first.x, first, second)[first.live])
    dead = [row for row in range(got.shape[0]) if row not in first.live]
    assert (got[dead].view(torch.int16) == POISON).all()


def test_the_reference_matches_float64() -> None:
    first, second = Layer([5, 0, 9], 96, 64), Layer([5, 0, 9], 32, 32)
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 6e-3)):
        layers = [ExpertLayer(pack(layer), layer.bias.to(dtype)) for layer in (first, second)]
        rows = ExpertRows(first.counts, first.offsets, 9)
        got = expert_mlp_e4m3(first.x.to(dtype), *layers, rows, limit=LIMIT)
        wanted = exact_mlp(first.x, first, second)
        assert (got.double() - wanted).norm() / wanted.norm() < bound


def pack(layer: Layer) -> PackedMxfp4:
    packed = PackedMxfp4.empty(*layer.blocks.shape[:2], layer.blocks.shape[2] * 32)
    for expert in range(len(layer.blocks)):
        packed.store(expert, layer.blocks[expert], layer.scales[expert])
    return packed


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedArchError, match="needs a Hopper GPU, not cpu"):
        mxfp4_e4m3.require(torch.device("cpu"))
    for arch in (HOPPER, BLACKWELL):
        monkeypatch.setattr(mxfp4_e4m3, "device_info", lambda index, arch=arch: DeviceInfo(arch, 132))
        if arch.hopper:
            mxfp4_e4m3.require(torch.device("cuda", 0))
        else:
            with pytest.raises(UnsupportedArchError, match="--moe-activations fp8 needs a Hopper GPU, this one"):
                mxfp4_e4m3.require(torch.device("cuda", 0))


def test_bad_arguments() -> None:
    first, second = Layer([2], 64, 64), Layer([2], 64, 32)
    rows = ExpertRows(first.counts, first.offsets, 2)
    layers = [ExpertLayer(pack(layer), layer.bias) for layer in (first, second)]
    with pytest.raises(KernelArgumentError, match=r"down\.weight: has 64 columns; needs 32"):
        expert_mlp_e4m3(first.x, *layers, rows, limit=LIMIT)
    with pytest.raises(KernelArgumentError, match="bias: shape"):
        expert_mlp_e4m3(first.x, layers[0]._replace(bias=second.bias), layers[1], rows, limit=LIMIT)
