"""Linear layers of few rows on a CPU, whole and an expert a row, against float64."""

from __future__ import annotations

import pytest
import torch

from rose_dist.kernels.grouped_linear import grouped_linear
from rose_dist.kernels.linear import linear
from rose_dist.kernels.mxfp4_experts import ExpertRows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 33])
@pytest.mark.parametrize("outputs", [8, 7])
def test_linear(rows: int, outputs: int, dtype: torch.dtype) -> None:
    """Of views into larger tensors, as layers hold them."""
    x = torch.randn(rows + 2, 20)[1:-1, 4:].to(dtype)
    weight, bias = torch.randn(3, outputs, 16).to(dtype)[1], torch.randn(2, outputs).to(dtype)[1]
    tolerance = 2e-6 if dtype == torch.float32 else 0.05
    for added in (bias, None):
        wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
        torch.testing.assert_close(linear(x, weight, added).double(), wanted, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("outputs", [8, 7])
def test_an_expert_a_row(outputs: int) -> None:
    counts = torch.tensor([1, 0, 3, 1], dtype=torch.int32)
    offsets = torch.tensor([0, 1, 1, 4, 5])
    x, weight, bias = torch.randn(5, 16), torch.randn(4, outputs, 16), torch.randn(4, outputs)
    experts = torch.repeat_interleave(torch.arange(4), counts)
    for added in (bias, None):
        wanted = torch.einsum("ri,roi->ro", x.double(), weight[experts].double())
        wanted += 0 if added is None else added[experts].double()
        found = grouped_linear(x, weight, added, ExpertRows(counts, offsets, 3))
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-5)
