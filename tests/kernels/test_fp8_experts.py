"""FP8 experts against float64 on the dequantised values: the CPU's reference, and DeepGEMM's calls, which are emulated
where there is no GPU (`deep_gemm_emulation`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from rose_dist.kernels import deep_gemm, fp8_experts
from rose_dist.kernels.arch import BLACKWELL, HOPPER, DeviceInfo
from rose_dist.kernels.errors import KernelArgumentError, MissingToolchainError, UnsupportedArchError
from rose_dist.kernels.expert_slots import COMPACT, PackedLayout
from rose_dist.kernels.formats import FP8
from rose_dist.kernels.fp8_experts import (
    FEW,
    MANY,
    Fp8Rows,
    Fp8Weight,
    fp8_expert_linear,
    fp8_expert_swiglu,
    quantize_blocks,
)
from rose_dist.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from rose_dist.kernels.mxfp4_experts import ExpertRows
from rose_dist.kernels.quantize import dequantize, quantize
from rose_dist.kernels.swiglu import Rows
from tests.kernels.conftest import RealGPU, emulated
from tests.kernels.deep_gemm_emulation import EmulatedDeepGemm

LIMIT = 7.0
COUNTS = (100, 0, 1, 128)
"""Rows of experts 0 to 3: part of a tile, none, one, a whole tile."""


@pytest.fixture(params=["sm_90a", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU as in `tests.kernels.conftest`, whose DeepGEMM is in `library`."""
    torch.manual_seed(0)
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        pytest.importorskip("deep_gemm")
        found: Any = RealGPU(monkeypatch)
        found.library = deep_gemm.load()
    else:
        found = emulated(monkeypatch, request.param)
        found.library = EmulatedDeepGemm()
        monkeypatch.setattr(deep_gemm, "load", lambda: found.library)
    return found


@dataclass
class Case:
    """Rows of 4 experts, on the CPU and without padding."""

    x: torch.Tensor
    weight: Fp8Weight
    bias: torch.Tensor

    @classmethod
    def random(cls, outputs: int, inputs: int) -> Case:
        weight = Fp8Weight.empty(len(COUNTS), outputs, inputs)
        for expert in range(len(COUNTS)):
            weight.store(expert, torch.randn(outputs, inputs) / inputs**0.5)
        return cls(torch.randn(sum(COUNTS), inputs).bfloat16(), weight, torch.randn(len(COUNTS), outputs).bfloat16())

    @property
    def experts(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """float64 [rows, outputs] of rows given in float64."""
        parts = x.split(COUNTS)
        return torch.cat([part @ self.weight.dequantize(e).double().T for e, part in enumerate(parts)])


def rows_of(layout: PackedLayout, gpu: Any = None, listed: Rows | None = None) -> ExpertRows:
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    place = gpu.tensor if gpu is not None else torch.clone
    return ExpertRows(place(counts), place(layout.starts(counts)), max(COUNTS), layout=layout, listed=listed)


def packed(case: Case, layout: PackedLayout, gpu: Any) -> tuple[Fp8Rows, torch.Tensor, ExpertRows]:
    """The case's rows as a dispatch leaves them on a GPU, what it leaves unwritten being NaN; and where they are."""
    starts = layout.starts(torch.tensor(COUNTS))
    total = layout.capacity(sum(COUNTS), len(COUNTS))
    places = torch.cat([torch.arange(count) + starts[expert] for expert, count in enumerate(COUNTS)])
    codes, scales = quantize(case.x, FP8)
    wide = torch.full((total, codes.shape[1]), 0x7F, dtype=torch.uint8)
    wide[places] = codes.view(torch.uint8)
    wide_scales = torch.full((total, scales.shape[1]), torch.nan)
    wide_scales[places] = scales
    group = layout.rows_per_expert or total
    columns = gpu.tensor(wide_scales.view(-1, group, scales.shape[1]).transpose(1, 2).contiguous()).transpose(1, 2)
    given = Fp8Rows(gpu.tensor(wide).view(torch.float8_e4m3fn), columns if layout.rows_per_expert else columns[0])
    # As a dispatch lists them: by token, with pairs of other ranks' experts, whose ids count from 10 here.
    order = torch.randperm(len(places))
    slots = torch.cat([torch.tensor([-1]), places[order], torch.tensor([-1])]).int()
    ids = torch.cat([torch.tensor([3]), case.experts[order] + 10, torch.tensor([-1])]).int()
    listed = Rows(places=gpu.tensor(slots), experts=gpu.tensor(ids), first_expert=10)
    return given, places, rows_of(layout, gpu, listed)


def moved(weight: Fp8Weight, gpu: Any) -> Fp8Weight:
    return Fp8Weight(gpu.tensor(weight.codes.view(torch.uint8)).view(torch.float8_e4m3fn), gpu.tensor(weight.scales))


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def decoded(x: torch.Tensor) -> torch.Tensor:
    return dequantize(*quantize(x, FP8), FP8, dtype=torch.float32).double()


def activation(gate_up: torch.Tensor) -> torch.Tensor:
    gate, linear = gate_up[:, 0::2].clamp(max=LIMIT), gate_up[:, 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


SHAPES = [(256, 128), (320, 192), (192, 96)]
"""Whole blocks; half a block at either end; GPT-OSS's in small: 2880 = 22.5 blocks."""


@pytest.mark.parametrize("layout", [FEW, MANY], ids=["masked", "contiguous"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_deep_gemm_matches_float64(hopper: Any, layout: PackedLayout, outputs: int, inputs: int) -> None:
    case = Case.random(outputs, inputs)
    given, places, rows = packed(case, layout, hopper)
    got = hopper.plain(fp8_expert_linear(given, moved(case.weight, hopper), rows, torch.bfloat16))
    assert error(got[places], case.exact(decoded(case.x))) < 4e-3
    starts = layout.starts(torch.tensor(COUNTS))[:-1]
    assert hopper.plain(rows.ends).tolist() == (starts + torch.tensor(COUNTS)).tolist(), "or padding is work"
    if not hopper.real:
        assert hopper.library.calls == ["masked" if layout == FEW else "contiguous"]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("layout", [FEW, MANY], ids=["masked", "contiguous"])
@pytest.mark.parametrize(("outputs", "inputs"), [(5760, 2880), (2880, 2880)])
def test_real_shapes(layout: PackedLayout, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM against its emulation, bit by bit but for the order of sums."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pytest.importorskip("deep_gemm")
    gpu = RealGPU(monkeypatch)
    case = Case.random(outputs, inputs)
    given, places, rows = packed(case, layout, gpu)
    weight = moved(case.weight, gpu)
    got = fp8_expert_linear(given, weight, rows, torch.bfloat16).cpu()
    with monkeypatch.context() as patched:
        patched.setattr(deep_gemm, "load", EmulatedDeepGemm)
        torch.set_default_device("cuda")
        try:
            wanted = fp8_expert_linear(given, weight, rows, torch.bfloat16).cpu()
        finally:
            torch.set_default_device("cpu")
    assert error(got[places], wanted[places].double()) < 2e-3


@pytest.mark.gpu(1)
def test_tiles_by_rows_give_the_same_as_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way to say whose the tiles are, should the one used ever fail."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pytest.importorskip("deep_gemm")
    gpu = RealGPU(monkeypatch)
    case = Case.random(512, 256)
    given, places, rows = packed(case, MANY, gpu)
    weight = moved(case.weight, gpu)
    by_ends = fp8_expert_linear(given, weight, rows, torch.bfloat16)
    by_rows, experts = torch.empty_like(by_ends), torch.full((by_ends.shape[0],), -1, dtype=torch.int32)
    experts[places] = case.experts.int()
    deep_gemm.load().m_grouped_fp8_gemm_nt_contiguous(
        (given.codes, given.scales), (weight.codes, weight.scales), by_rows, experts.cuda()
    )
    assert torch.equal(by_rows.cpu()[places], by_ends.cpu()[places])


@pytest.mark.parametrize("layout", [FEW, MANY], ids=["masked", "contiguous"])
def test_swiglu_matches_float64(hopper: Any, layout: PackedLayout) -> None:
    """With bias; what it leaves is what the second layer takes."""
    case = Case.random(2 * 192, 192)
    given, places, rows = packed(case, layout, hopper)
    activated = fp8_expert_swiglu(
        given, moved(case.weight, hopper), hopper.tensor(case.bias), rows, limit=LIMIT, dtype=torch.bfloat16
    )
    wanted = activation(case.exact(decoded(case.x)) + case.bias.double()[case.experts])
    codes = hopper.plain(activated.codes).view(torch.uint8)[places].view(torch.float8_e4m3fn)
    scales = hopper.plain(activated.scales).reshape(-1, 2)[places]
    # Half of what a code can be off by, in the mean; a rounding of the product to bf16 is little beside it.
    assert error(dequantize(codes, scales, FP8, dtype=torch.float32), wanted) < 0.03
    second = Case(case.x, Fp8Weight.empty(len(COUNTS), 192, 192), case.bias)
    for expert in range(len(COUNTS)):
        second.weight.store(expert, torch.randn(192, 192) / 14)
    got = hopper.plain(fp8_expert_linear(activated, moved(second.weight, hopper), rows, torch.bfloat16))
    assert error(got[places], second.exact(dequantize(codes, scales, FP8, dtype=torch.float32).double())) < 4e-3


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_reference_matches_float64(outputs: int, inputs: int) -> None:
    case = Case.random(outputs, inputs)
    rows = rows_of(COMPACT)
    got = fp8_expert_linear(Fp8Rows.of(case.x.float()), case.weight, rows, torch.float32)
    assert error(got, case.exact(decoded(case.x))) < 1e-6
    h = fp8_expert_swiglu(Fp8Rows.of(case.x), case.weight, case.bias.float(), rows, limit=LIMIT, dtype=torch.float32)
    wanted = activation(case.exact(decoded(case.x)) + case.bias.double()[case.experts])
    assert error(dequantize(h.codes, h.scales, FP8, dtype=torch.float32), wanted) < 0.03


def test_blocks_have_their_own_scales() -> None:
    """Each the least power of two that brings its block's largest within e4m3."""
    matrix = torch.randn(200, 144)
    matrix[:128, 128:] *= 100
    codes, scales = quantize_blocks(matrix)
    assert codes.shape == (200, 144)
    assert scales.shape == (2, 2)
    assert torch.equal(scales.log2(), scales.log2().round())
    peaks = [[matrix[:128, :128], matrix[:128, 128:]], [matrix[128:, :128], matrix[128:, 128:]]]
    for i, line in enumerate(peaks):
        for j, block in enumerate(line):
            assert 224 < block.abs().max() / scales[i, j] <= 448
    weight = Fp8Weight(codes[None], scales[None])
    assert ((weight.dequantize(0) - matrix).abs() <= matrix.abs() * 2**-4 + scales.max() * 2**-9).all()
    assert quantize_blocks(torch.full((16, 16), 448.0))[1].item() == 1


def test_mxfp4_becomes_fp8_without_loss() -> None:
    matrix = torch.randn(256, 256) * torch.logspace(-2, 2, 256)[:, None]
    exact = dequantize_mxfp4(*quantize_mxfp4(matrix), torch.float32)
    weight = Fp8Weight.empty(1, 256, 256)
    weight.store(0, exact)
    assert torch.equal(weight.dequantize(0), exact)


def test_bad_arguments(hopper: Any) -> None:
    case = Case.random(128, 128)
    given, _, rows = packed(case, FEW, hopper)
    weight = moved(case.weight, hopper)
    with pytest.raises(KernelArgumentError, match=r"codes: has 512 rows in PackedLayout\(alignment=1"):
        fp8_expert_linear(given, weight, rows_of(COMPACT, hopper), torch.bfloat16)
    with pytest.raises(KernelArgumentError, match=r"codes: shape is \(512, 128\); needs \(any, 64\)"):
        fp8_expert_linear(given, Fp8Weight.empty(4, 128, 64), rows, torch.bfloat16)
    bias = hopper.tensor(case.bias)
    with pytest.raises(KernelArgumentError, match="rows: need a list"):
        fp8_expert_swiglu(given, weight, bias, rows_of(FEW, hopper), limit=LIMIT, dtype=torch.bfloat16)
    with pytest.raises(KernelArgumentError, match="dtype"):
        fp8_expert_linear(given, weight, rows, torch.float32)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load = deep_gemm.load.__wrapped__
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "kept")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(MissingToolchainError, match=r"pip install 'sgl-deep-gemm==.*--moe-weights mxfp4"):
        load()
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))  # PyPI's package of that name
    with pytest.raises(MissingToolchainError, match=r"must be sgl-deep-gemm==.*bin/nvcc"):
        load()


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "load", EmulatedDeepGemm)
    for arch, outcome in ((HOPPER, None), (BLACKWELL, UnsupportedArchError)):
        monkeypatch.setattr(fp8_experts, "device_info", lambda index, arch=arch: DeviceInfo(arch, 132))
        if outcome is None:
            fp8_experts.require(torch.device("cuda", 0))
        else:
            with pytest.raises(outcome, match="Hopper only"):
                fp8_experts.require(torch.device("cuda", 0))
