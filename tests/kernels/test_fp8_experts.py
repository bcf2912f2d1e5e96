"""FP8 experts on the CPU against float64 on the dequantised values. DeepGEMM itself needs a GPU."""

from __future__ import annotations

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.formats import FP8, ScaleLayout
from rose_dist.kernels.fp8_experts import ALIGNMENT, Fp8Weight, fp8_expert_linear, quantize_blocks
from rose_dist.kernels.quantize import dequantize, quantize


def case(outputs: int, inputs: int, device: str = "cpu") -> tuple[torch.Tensor, Fp8Weight, torch.Tensor]:
    """Rows, weights of 3 experts, and whose the rows are: 2 tiles of expert 2, none of 1, part of a tile of 0."""
    torch.manual_seed(0)
    weight = Fp8Weight.empty(3, outputs, inputs, device)
    for expert in range(3):
        weight.store(expert, torch.randn(outputs, inputs, device=device) / inputs**0.5)
    experts = torch.full((3 * ALIGNMENT,), -1, dtype=torch.int32)
    experts[:100], experts[ALIGNMENT : 3 * ALIGNMENT - 1] = 0, 2
    return torch.randn(3 * ALIGNMENT, inputs, device=device).bfloat16(), weight, experts.to(device)


def relative_error(x: torch.Tensor, weight: Fp8Weight, experts: torch.Tensor) -> float:
    codes, scales = quantize(x, FP8, layout=ScaleLayout.COLUMNS)
    got = fp8_expert_linear(codes, scales, weight, experts)
    exact_x = dequantize(codes, scales, FP8, layout=ScaleLayout.COLUMNS, dtype=torch.float32).double()
    worst = 0.0
    for expert in (0, 2):
        mine = experts == expert
        wanted = exact_x[mine] @ weight.dequantize(expert).double().T
        worst = max(worst, float((got[mine].double() - wanted).norm() / wanted.norm()))
    return worst


@pytest.mark.parametrize(("outputs", "inputs"), [(256, 128), (200, 144)])
def test_reference_matches_float64(outputs: int, inputs: int) -> None:
    assert relative_error(*case(outputs, inputs)) < 4e-3


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 256), (5760, 2880), (2880, 2880)])
def test_deep_gemm_matches_float64(outputs: int, inputs: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pytest.importorskip("deep_gemm")
    assert relative_error(*case(outputs, inputs, "cuda")) < 2e-2


def test_blocks_have_their_own_scales() -> None:
    matrix = torch.randn(200, 144)
    matrix[:128, 128:] *= 100
    codes, scales = quantize_blocks(matrix)
    assert codes.shape == (200, 144)
    assert scales.shape == (2, 2)
    peaks = [[matrix[:128, :128], matrix[:128, 128:]], [matrix[128:, :128], matrix[128:, 128:]]]
    for i, line in enumerate(peaks):
        for j, block in enumerate(line):
            assert scales[i, j] == block.abs().max() / 448
    weight = Fp8Weight(codes[None], scales[None])
    assert ((weight.dequantize(0) - matrix).abs() <= matrix.abs() * 2**-4 + scales.max() * 2**-9).all()


@pytest.mark.parametrize(
    ("rows", "message"), [(100, "codes: has 100 rows; must be a multiple of 128"), (256, "experts: shape")]
)
def test_bad_arguments(rows: int, message: str) -> None:
    weight = Fp8Weight.empty(1, 128, 128)
    codes, scales = quantize(torch.zeros(rows, 128), FP8, layout=ScaleLayout.COLUMNS)
    experts = torch.zeros(min(rows, 128), dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=message):
        fp8_expert_linear(codes, scales, weight, experts)
