"""Linear layers of few rows against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.small_linear import fits, small_linear


def assert_close(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    relative = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
    assert ((got.double() - wanted).abs() <= wanted.abs() * relative + 1e-4).all()


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_matches_float64(gpu: Any, rows: int, out_dtype: torch.dtype) -> None:
    inputs, outputs = (2880, 5120) if gpu.real else (192, 48)
    x, weight = torch.randn(rows, inputs).bfloat16(), (torch.randn(outputs, inputs) / 16).bfloat16()
    bias = torch.randn(outputs).bfloat16() if rows % 2 else None
    got = small_linear(
        gpu.tensor(x), gpu.tensor(weight), None if bias is None else gpu.tensor(bias), out_dtype=out_dtype
    )
    assert got.dtype == out_dtype
    assert_close(gpu.plain(got), x, weight, bias)


@pytest.mark.parametrize("inputs", [32, 96, 704])
def test_other_sizes_and_strided_rows(gpu: Any, inputs: int) -> None:
    """One warp, three, and several with runs ahead; x as a slice of a wider tensor."""
    wide, weight = torch.randn(3, inputs + 64).bfloat16(), torch.randn(16, inputs).bfloat16()
    stored = gpu.tensor(wide)[:, 32 : 32 + inputs]
    assert_close(gpu.plain(small_linear(stored, gpu.tensor(weight))), wide[:, 32 : 32 + inputs], weight, None)


def test_a_row_has_the_same_bits_in_any_batch(gpu: Any) -> None:
    x, weight = torch.randn(16, 320).bfloat16(), gpu.tensor(torch.randn(32, 320).bfloat16())
    whole = gpu.plain(small_linear(gpu.tensor(x), weight))
    for row in (0, 9):
        assert torch.equal(gpu.plain(small_linear(gpu.tensor(x[row : row + 1]), weight)), whole[row : row + 1])


def test_cpu_reference() -> None:
    x, weight, bias = torch.randn(3, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16()
    assert_close(small_linear(x, weight, bias), x, weight, bias)


def test_fits() -> None:
    weight = torch.zeros(48, 64).bfloat16()
    assert fits(torch.zeros(16, 64).bfloat16(), weight)
    for x, other in (
        (torch.zeros(17, 64).bfloat16(), weight), (torch.zeros(0, 64).bfloat16(), weight), (torch.zeros(1, 64), weight),
        (torch.zeros(1, 48).bfloat16(), weight[:, :48]), (torch.zeros(1, 64).bfloat16(), weight[:40]),
    ):  # fmt: skip
        assert not fits(x, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(17, 64).bfloat16()}, "x: has 17 rows"),
        ({"x": torch.zeros(2, 96).bfloat16()}, "x: shape"),
        ({"x": torch.zeros(2, 64)}, "x: dtype"),
        ({"weight": torch.zeros(40, 64).bfloat16()}, "weight's outputs: is 40"),
        ({"weight": torch.zeros(48, 48).bfloat16(), "x": torch.zeros(2, 48).bfloat16()}, "weight's inputs: is 48"),
        ({"bias": torch.zeros(47).bfloat16()}, "bias: shape"),
        ({"bias": torch.zeros(48)}, "bias: dtype"),
    ],
)
def test_bad_arguments(gpu: Any, change: dict[str, torch.Tensor], message: str) -> None:
    good = {"x": torch.zeros(2, 64).bfloat16(), "weight": torch.zeros(48, 64).bfloat16()}
    given = {name: gpu.tensor(t) for name, t in {**good, **change}.items()}
    with pytest.raises(KernelArgumentError, match=message):
        small_linear(given["x"], given["weight"], given.get("bias"))
