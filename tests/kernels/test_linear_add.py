"""A linear layer with the residual, and the projection with rotary and cache write, against what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels import projection
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.linear_add import MAX_ROWS, MOST_ROWS, all_at_once, fits, linear_add
from rose_dist.kernels.linear_rotary import linear_rotary, takes
from rose_dist.kernels.qk_norm import PagedCache


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 48, 2880), (3, 48, 2880), (8, 48, 2880), (8, 32, 4096), (3, 32, 4096), (3, 32, 320), (8, 32, 320), (1, 16, 32),
     (20, 32, 320), (128, 16, 64), (17, 32, 2880)],
)  # fmt: skip
def test_adds_a_rounded_product(gpu: Any, rows: int, outputs: int, inputs: int) -> None:
    x, weight = torch.randn(rows, inputs).bfloat16(), (torch.randn(outputs, inputs) / 16).bfloat16()
    bias = torch.randn(outputs).bfloat16() if rows != 3 else None
    residual = torch.randn(rows, outputs).bfloat16() * 4
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    held = [None if t is None else gpu.tensor(t) for t in (x, weight, bias, residual)]
    got = gpu.plain(linear_add(*held))  # type: ignore[arg-type]
    exact = residual + product.bfloat16()
    assert torch.allclose(got.float(), exact.float(), rtol=2**-7, atol=float(product.abs().max()) * 2**-8)
    assert (got != exact).float().mean() < 0.02  # products that lie between two bf16


def test_a_row_has_the_same_bits_in_any_batch(gpu: Any) -> None:
    x, weight = torch.randn(13, 2880).bfloat16(), gpu.tensor(torch.randn(32, 2880).bfloat16())
    residual = torch.randn(13, 32).bfloat16()
    whole = gpu.plain(linear_add(gpu.tensor(x), weight, None, gpu.tensor(residual)))
    for row in (0, 5, 11):
        one = slice(row, row + 1)
        alone = linear_add(gpu.tensor(x[one]), weight, None, gpu.tensor(residual[one]))
        assert torch.equal(gpu.plain(alone), whole[one])


def test_strided_rows(gpu: Any) -> None:
    wide, weight = torch.randn(3, 192).bfloat16(), torch.randn(16, 128).bfloat16()
    residual = torch.zeros(3, 16).bfloat16()
    got = linear_add(gpu.tensor(wide)[:, 32:160], gpu.tensor(weight), None, gpu.tensor(residual))
    wanted = linear_add(wide[:, 32:160], weight, None, residual)
    assert torch.allclose(gpu.plain(got).float(), wanted.float(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 1), (64, 8), (32, 3)])
def test_rotates_and_stores(gpu: Any, head_dim: int, rows: int) -> None:
    query_heads, key_heads, inputs, slots = 2, 1, 192, 20
    heads = query_heads + 2 * key_heads
    x, weight = torch.randn(rows, inputs).bfloat16(), (torch.randn(heads * head_dim, inputs) / 16).bfloat16()
    bias = torch.randn(heads * head_dim).bfloat16()
    angles = torch.rand(rows, head_dim // 2) * 6
    cos, sin = angles.cos() * 1.3, angles.sin() * 1.3
    places = torch.randperm(slots)[:rows]
    caches = []
    results = []
    for place, plain in ((gpu.tensor, gpu.plain), (torch.clone, torch.clone)):
        kept = [place(torch.full((slots, key_heads, head_dim), 7.0).bfloat16()) for _ in range(2)]
        cache = PagedCache(*kept, place(places))
        q = linear_rotary(place(x), place(weight), place(bias), key_heads, place(cos), place(sin), cache)
        results.append(plain(q).view(rows, query_heads, head_dim))
        caches.append([plain(t) for t in kept])
    for got, wanted in zip([results[0], *caches[0]], [results[1], *caches[1]], strict=True):
        assert torch.allclose(got.float(), wanted.float(), rtol=2**-6, atol=2**-7)
        assert (got != wanted).float().mean() < 0.02
    untouched = torch.ones(slots, dtype=torch.bool)
    untouched[places] = False
    assert (caches[0][0][untouched] == 7).all()
    assert (caches[0][1][untouched] == 7).all()


def test_a_negative_slot_is_not_written(gpu: Any) -> None:
    x, weight, bias = torch.randn(2, 64).bfloat16(), torch.randn(96, 64).bfloat16(), torch.randn(96).bfloat16()
    kept = [gpu.tensor(torch.zeros(4, 1, 32).bfloat16()) for _ in range(2)]
    turns = [gpu.tensor(torch.rand(2, 16)) for _ in range(2)]
    cache = PagedCache(*kept, gpu.tensor(torch.tensor([-1, 2])))
    linear_rotary(gpu.tensor(x), gpu.tensor(weight), gpu.tensor(bias), 1, *turns, cache)
    for stored in kept:
        written = gpu.plain(stored).abs().sum((1, 2)) > 0
        assert written.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(129, 64).bfloat16()}, "x: has 129 rows"),
        ({"x": torch.zeros(2, 96).bfloat16()}, "x: shape"),
        ({"weight": torch.zeros(40, 64).bfloat16()}, "weight's outputs: is 40"),
        ({"weight": torch.zeros(48, 48).bfloat16(), "x": torch.zeros(2, 48).bfloat16()}, "weight's inputs: is 48"),
        ({"bias": torch.zeros(47).bfloat16()}, "bias: shape"),
        ({"residual": torch.zeros(2, 48)}, "residual: dtype"),
        ({"residual": torch.zeros(3, 48).bfloat16()}, "residual: shape"),
    ],
)
def test_bad_arguments(gpu: Any, change: dict[str, torch.Tensor], message: str) -> None:
    good = {
        "x": torch.zeros(2, 64).bfloat16(), "weight": torch.zeros(48, 64).bfloat16(),
        "bias": torch.zeros(48).bfloat16(), "residual": torch.zeros(2, 48).bfloat16(),
    }  # fmt: skip
    given = {name: gpu.tensor(t) for name, t in {**good, **change}.items()}
    with pytest.raises(KernelArgumentError, match=message):
        linear_add(**given)


def test_a_router_of_some_rows_goes_in_one_launch(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all its blocks have an SM each; the bias is added to what is rounded once."""
    rows = min(gpu.info.sms * MAX_ROWS, MOST_ROWS)
    x, weight, bias = torch.randn(rows, 64).bfloat16(), torch.randn(16, 64).bfloat16(), torch.randn(16).bfloat16()
    held = [gpu.tensor(t) for t in (x, weight, bias)]
    taken = []
    monkeypatch.setattr(projection, "linear_add", lambda *given: taken.append(len(given[0])) or linear_add(*given))
    got = gpu.plain(projection.project(*held))
    assert taken == [rows]
    assert torch.equal(got, gpu.plain(linear_add(*held, None)))
    many = gpu.tensor(torch.zeros(16 * (gpu.info.sms + 1), 64).bfloat16())
    assert not all_at_once(held[0], many)
    assert not all_at_once(gpu.tensor(torch.zeros(MOST_ROWS + 1, 64).bfloat16()), held[1])
    assert not all_at_once(gpu.tensor(x.float()), held[1])


def test_fits() -> None:
    assert fits(torch.zeros(48, 64).bfloat16())
    for weight in (torch.zeros(48, 64), torch.zeros(40, 64).bfloat16(), torch.zeros(48, 48).bfloat16()):
        assert not fits(weight)
    assert not fits(torch.zeros(16, 8192).bfloat16())  # 32 runs a warp
    assert takes(torch.zeros(48, 64).bfloat16(), 64, torch.bfloat16)
    assert not takes(torch.zeros(48, 64).bfloat16(), 64, torch.float8_e4m3fn)
    assert not takes(torch.zeros(48, 64).bfloat16(), 40, torch.bfloat16)
