"""Every row kernel on every dtype that it takes and odd numbers of rows, against the CPU path that other tests hold
against float64 and the formats' definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rose_dist.kernels.embedding import embed_with_angles
from rose_dist.kernels.formats import FORMATS, NVFP4
from rose_dist.kernels.qk_norm import PagedCache, Rotary, qk_norm_rope_cache
from rose_dist.kernels.quantize import dequantize, quantize
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized
from rose_dist.kernels.routing import Router, Score, route
from rose_dist.kernels.swiglu import Gate, Rows, activate_quantized, clamped_swiglu, silu_mul

Tensors = list[torch.Tensor]
EPS = 1e-5
EMPTY = torch.empty
"""As long as no GPU is emulated."""
HALVES, FLOATS = (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = 288
"""The last block of 128 is a quarter one."""


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def global_scale(fmt: Any, like: torch.Tensor, move: Any) -> torch.Tensor | None:
    return move(torch.tensor([64.0])) if fmt is NVFP4 else None


def a_norm(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    x, weight = randn(rows, COLUMNS, dtype=dtype), randn(COLUMNS, dtype=dtype)
    return [rms_norm(move(x), move(weight), EPS)]


def an_added_norm(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    x, residual, weight = (randn(*shape, dtype=dtype) for shape in ((rows, COLUMNS), (rows, COLUMNS), (COLUMNS,)))
    return list(add_rms_norm(move(x), move(residual), move(weight), EPS))


def a_quantised_norm(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    x, weight = randn(rows, COLUMNS, dtype=dtype), randn(COLUMNS, dtype=dtype)
    found: Tensors = []
    for fmt in FORMATS.values():
        codes, scales, _ = rms_norm_quantized(move(x), move(weight), EPS, fmt, global_scale=global_scale(fmt, x, move))
        found.append(dequantize(codes, scales, fmt, dtype=torch.float32, global_scale=global_scale(fmt, x, move)))
    return found


def quantised(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    x = randn(rows, COLUMNS, dtype=dtype)
    return [
        t.view(torch.uint8) if t.element_size() == 1 else t
        for fmt in FORMATS.values()
        for t in quantize(move(x), fmt, global_scale=global_scale(fmt, x, move))
    ]


def dequantised(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    x, found = randn(rows, COLUMNS, dtype=torch.float32), []
    for fmt in FORMATS.values():
        plain = quantize(x, fmt, global_scale=global_scale(fmt, x, lambda t: t))
        codes, scales = (move(t) for t in plain)
        found.append(dequantize(codes, scales, fmt, dtype=dtype, global_scale=global_scale(fmt, x, move)))
    return found


def activations(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    x, bias = randn(rows, 2 * COLUMNS, dtype=dtype), randn(3, 2 * COLUMNS, dtype=dtype)
    which = Rows(experts=move((torch.arange(rows) % 3).int()))
    return [silu_mul(move(x)), clamped_swiglu(move(x), limit=7.0, bias=move(bias), rows=which)]


def quantised_activations(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    x, found = randn(rows, 2 * COLUMNS, dtype=dtype), []
    for gate in Gate:
        for fmt in FORMATS.values():
            scale = global_scale(fmt, x, move)
            codes, scales = activate_quantized(gate, move(x), fmt, limit=7.0, global_scale=scale)
            found.append(dequantize(codes, scales, fmt, dtype=torch.float32, global_scale=scale))
    return found


def heads(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    fused, weight = move(randn(rows, 12, 64, dtype=dtype)), move(randn(64, dtype=dtype))
    angles = torch.rand(rows, 32) * 6
    keys, values = (move(torch.zeros(rows + 1, 2, 64, dtype=dtype)) for _ in range(2))
    cache = PagedCache(keys, values, move(torch.randperm(rows)))
    qk_norm_rope_cache(
        fused[:, :8], fused[:, 8:10], fused[:, 10:], cache, move(angles.cos()), move(angles.sin()),
        norm=(weight, weight, EPS), rotary=Rotary.NEOX,
    )  # fmt: skip
    return [fused[:, :8], keys, values]


def routes(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    # Distinct in every dtype, so that the order of choices is one.
    logits = torch.stack([torch.randperm(64) for _ in range(rows)]) if rows else torch.zeros(0, 64)
    logits = (logits.float() / 8 - 4).to(dtype)
    found: Tensors = []
    for router in (Router(4), Router(6, Score.SOFTMAX), Router(4, Score.SIGMOID, groups=8, top_groups=4)):
        routing = route(move(logits), router, counts=True)
        assert routing.counts is not None
        found += [routing.ids, routing.weights, routing.counts]
    return found


def embeddings(rows: int, dtype: torch.dtype, move: Any) -> Tensors:
    table, angles = randn(20, COLUMNS, dtype=dtype), [move(randn(9, 32, dtype=torch.float32)) for _ in range(2)]
    ids, positions = torch.randint(20, (rows,)), torch.randint(9, (rows,))
    return list(embed_with_angles(move(ids), move(positions), move(table), *angles, first_id=3))


FUNCTIONS: list[tuple[Callable[..., Tensors], tuple[torch.dtype, ...]]] = [
    (a_norm, FLOATS),
    (an_added_norm, FLOATS),
    (a_quantised_norm, FLOATS),
    (quantised, FLOATS),
    (dequantised, FLOATS),
    (activations, HALVES),
    (quantised_activations, HALVES),
    (heads, HALVES),
    (routes, FLOATS),
    (embeddings, FLOATS),
]


def assert_same(got: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    if not wanted.is_floating_point():
        assert torch.equal(got, wanted), name
        return
    wide, error = wanted.double(), (got.double() - wanted.double()).abs()
    largest = wide.abs().amax(-1, keepdim=True) if wide.numel() else wide
    if "quantised" in name:
        # A value on a boundary between two codes may fall to either; it is a whole step then.
        assert (error > largest * 2**-6).double().sum() <= 0.004 * wide.numel(), name
    elif name == "heads":  # the CPU path rounds between norm and rotation
        assert (error <= largest * torch.finfo(got.dtype).eps).all(), (name, error.max())
    else:
        assert (error <= wide.abs() * 2.1 * torch.finfo(got.dtype).eps + 3e-6).all(), (name, error.max())


@pytest.mark.parametrize("rows", [0, 1, 3, 127, 8191])
@pytest.mark.parametrize(
    ("function", "dtype"),
    [pytest.param(f, dtype, id=f"{f.__name__}-{str(dtype)[6:]}") for f, dtypes in FUNCTIONS for dtype in dtypes],
)
def test_odd_rows_equal_the_cpu_path(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensors], dtype: torch.dtype, rows: int
) -> None:
    if not gpu.real and (rows > 3 or (rows and gpu.info.arch.blackwell and dtype is not torch.bfloat16)):
        pytest.skip("takes long on an emulated GPU")
    torch.manual_seed(rows)
    with monkeypatch.context() as plain:
        plain.setattr(torch, "empty", EMPTY)
        wanted = function(rows, dtype, torch.Tensor.clone)
    torch.manual_seed(rows)
    got = [gpu.plain(t) for t in function(rows, dtype, gpu.tensor)]
    for one, other in zip(got, wanted, strict=True):
        assert_same(one, other, function.__name__)
