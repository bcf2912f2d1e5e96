"""QK norm, rotary embedding and the cache write against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.qk_norm import PagedCache, Rotary, qk_norm, qk_norm_rope_cache, rotate
from rose_dist.kernels.rotary import rotate_and_store

EPS = 1e-6


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """As a complex product, which the kernel does not use."""
    turn = torch.complex(cos.double(), sin.double())[:, None]
    x = x.double()
    if rotary is Rotary.INTERLEAVED:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.double() - wanted).abs()
    assert (error <= wanted.abs() * 2**-8 + 2e-6 * wanted.abs().amax(-1, keepdim=True) + 1e-6).all(), error.max()


def yarn_like(positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(positions)[:, None] * torch.logspace(0, -4, half)[None]
    return angles.cos() * 1.35, angles.sin() * 1.35


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 5])
def test_qk_norm_in_place_in_a_fused_projection(gpu: Any, head_dim: int, tokens: int) -> None:
    query_heads, key_heads = 6, 2
    fused = torch.randn(tokens, (query_heads + 2 * key_heads) * head_dim).bfloat16()
    weights = torch.randn(2, head_dim).bfloat16()
    moved = gpu.tensor(fused)
    heads = moved.view(tokens, -1, head_dim)
    query_weight, key_weight = (gpu.tensor(w) for w in weights)
    qk_norm(heads[:, :query_heads], heads[:, query_heads:-key_heads], query_weight, key_weight, EPS)
    before, after = fused.view(tokens, -1, head_dim), gpu.plain(moved).view(tokens, -1, head_dim)
    assert_close(after[:, :query_heads], exact_norm(before[:, :query_heads], weights[0]))
    assert_close(after[:, query_heads:-key_heads], exact_norm(before[:, query_heads:-key_heads], weights[1]))
    assert torch.equal(after[:, -key_heads:], before[:, -key_heads:])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rotary", [Rotary.NEOX, Rotary.INTERLEAVED])
@pytest.mark.parametrize("norm", [False, True])
def test_all_of_it_into_a_paged_cache(gpu: Any, head_dim: int, rotary: Rotary, norm: bool) -> None:
    tokens, query_heads, key_heads, block_size = 5, 4, 2, 4
    q, k, v = (torch.randn(tokens, h, head_dim).bfloat16() for h in (query_heads, key_heads, key_heads))
    weights = torch.randn(2, head_dim).bfloat16()
    cos, sin = yarn_like(50, head_dim // 2)
    positions, slots = torch.tensor([3, 49, 0, 7, 20]), torch.tensor([9, -1, 0, 6, 3])
    empty = torch.full((3, block_size, key_heads, head_dim), -7.0).bfloat16()
    keys, values = gpu.tensor(empty), gpu.tensor(empty)
    moved = gpu.tensor(q)
    norms = (gpu.tensor(weights[0]), gpu.tensor(weights[1]), EPS) if norm else None
    qk_norm_rope_cache(
        moved, gpu.tensor(k), gpu.tensor(v), PagedCache(keys, values, gpu.tensor(slots)), gpu.tensor(cos),
        gpu.tensor(sin), positions=gpu.tensor(positions), norm=norms, rotary=rotary,
    )  # fmt: skip
    turn = (cos[positions], sin[positions], rotary)
    assert_close(gpu.plain(moved), exact_rotary(exact_norm(q, weights[0]) if norm else q, *turn))
    wanted = exact_rotary(exact_norm(k, weights[1]) if norm else k, *turn)
    flat_keys, flat_values = (gpu.plain(t).view(-1, key_heads, head_dim) for t in (keys, values))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_close(flat_keys[slot], wanted[token])
            assert torch.equal(flat_values[slot], v[token])
    untouched = sorted(set(range(12)) - set(slots.tolist()))
    assert (flat_keys[untouched] == -7).all()
    assert (flat_values[untouched] == -7).all()


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("norm", [False, True])
def test_fp8_cache(gpu: Any, head_dim: int, norm: bool) -> None:
    """Keys and values are rounded once, times the reciprocal scales, and saturate; NaN stays NaN."""
    tokens, query_heads, key_heads = 3, 4, 2
    q, k, v = (torch.randn(tokens, h, head_dim).bfloat16() for h in (query_heads, key_heads, key_heads))
    v[0, 0, :5] = torch.tensor([1e4, -1e4, math.inf, math.nan, 2.0**-9])
    weights = torch.randn(2, head_dim).bfloat16()
    cos, sin = yarn_like(tokens, head_dim // 2)
    slots = torch.tensor([7, -1, 4])
    keys, values = (gpu.tensor(torch.zeros(8, key_heads, head_dim).to(torch.float8_e4m3fn)) for _ in range(2))
    moved = gpu.tensor(q)
    norms = (gpu.tensor(weights[0]), gpu.tensor(weights[1]), EPS) if norm else None
    cache = PagedCache(keys, values, gpu.tensor(slots), key_scale=0.25, value_scale=0.5)
    qk_norm_rope_cache(moved, gpu.tensor(k), gpu.tensor(v), cache, gpu.tensor(cos), gpu.tensor(sin), norm=norms)
    assert_close(gpu.plain(moved), exact_rotary(exact_norm(q, weights[0]) if norm else q, cos, sin, Rotary.NEOX))
    wanted = exact_rotary(exact_norm(k, weights[1]) if norm else k, cos, sin, Rotary.NEOX) * 4
    stored_keys, stored_values = gpu.plain(keys), gpu.plain(values)
    for token in (0, 2):
        error = (stored_keys[slots[token]].double() - wanted[token]).abs()
        assert (error <= wanted[token].abs() * 2**-4 + 2**-10 + 1e-5).all()
        codes = (v[token].float() * 2).clamp(-448, 448).to(torch.float8_e4m3fn)
        torch.testing.assert_close(stored_values[slots[token]].float(), codes.float(), rtol=0, atol=0, equal_nan=True)
    untouched = [0, 1, 2, 3, 5, 6]
    assert not stored_keys.view(torch.uint8)[untouched].any()
    assert not stored_values.view(torch.uint8)[untouched].any()


def test_fp8_cache_on_the_cpu_agrees(gpu: Any) -> None:
    q, k, v = (torch.randn(5, h, 64).bfloat16() * 9 for h in (4, 2, 2))
    cos, sin = yarn_like(5, 32)
    slots = torch.tensor([3, 0, 11, -1, 6])
    stored = []
    for move in (lambda x: x, gpu.tensor):
        blocks = (move(torch.zeros(3, 4, 2, 64).to(torch.float8_e4m3fn)) for _ in range(2))
        cache = PagedCache(*blocks, move(slots), key_scale=0.1)
        qk_norm_rope_cache(move(q.clone()), move(k), move(v), cache, move(cos), move(sin))
        stored.append([gpu.plain(x).view(torch.uint8) for x in (cache.keys, cache.values)])
    assert torch.equal(stored[0][1], stored[1][1])
    # A rotated key on the edge between two codes may fall to either side.
    assert (stored[0][0] != stored[1][0]).sum() <= 2


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 32), (128, 64), (128, 96), (256, 64)])
@pytest.mark.parametrize("rotary", [Rotary.NEOX, Rotary.INTERLEAVED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_partial_rotary(gpu: Any, head_dim: int, rotary_dim: int, rotary: Rotary, dtype: torch.dtype) -> None:
    """The first elements of a head are rotated among themselves, the others only normed."""
    tokens, query_heads, key_heads = 3, 4, 2
    q, k, v = (torch.randn(tokens, h, head_dim).bfloat16() for h in (query_heads, key_heads, key_heads))
    weights = torch.randn(2, head_dim).bfloat16()
    cos, sin = yarn_like(tokens, rotary_dim // 2)
    slots = torch.tensor([5, 0, 2])
    keys, values = (gpu.tensor(torch.zeros(8, key_heads, head_dim).to(dtype)) for _ in range(2))
    moved = gpu.tensor(q)
    norms = (gpu.tensor(weights[0]), gpu.tensor(weights[1]), EPS)
    cache = PagedCache(keys, values, gpu.tensor(slots))
    qk_norm_rope_cache(
        moved, gpu.tensor(k), gpu.tensor(v), cache, gpu.tensor(cos), gpu.tensor(sin), norm=norms, rotary=rotary
    )
    wanted = []
    for x, weight in ((q, weights[0]), (k, weights[1])):
        normed = exact_norm(x, weight)
        turned = exact_rotary(normed[..., :rotary_dim], cos, sin, rotary)
        wanted.append(torch.cat([turned, normed[..., rotary_dim:]], -1))
    assert_close(gpu.plain(moved), wanted[0])
    stored = [gpu.plain(x).double()[slots] for x in (keys, values)]
    if dtype is torch.bfloat16:
        assert_close(stored[0], wanted[1])
    else:
        assert ((stored[0] - wanted[1]).abs() <= wanted[1].abs() * 2**-4 + 2**-9).all()
    assert torch.equal(stored[1], v.to(dtype).double())


@pytest.mark.parametrize("order", ["slots", "heads_first"])
def test_other_cache_shapes(gpu: Any, order: str) -> None:
    tokens, key_heads, head_dim = 3, 2, 64
    q, k, v = (torch.randn(tokens, h, head_dim).bfloat16() for h in (4, key_heads, key_heads))
    cos, sin = yarn_like(tokens, 32)
    slots = torch.tensor([7, 1, 4])
    if order == "slots":
        keys, values = (gpu.tensor(torch.zeros(8, key_heads, head_dim).bfloat16()) for _ in range(2))
    else:
        keys, values = (gpu.tensor(torch.zeros(2, key_heads, 4, head_dim).bfloat16()).transpose(1, 2) for _ in range(2))
    qk_norm_rope_cache(
        gpu.tensor(q), gpu.tensor(k), gpu.tensor(v), PagedCache(keys, values, gpu.tensor(slots)), gpu.tensor(cos),
        gpu.tensor(sin),
    )  # fmt: skip
    flat = [gpu.plain(t).reshape(8, key_heads, head_dim) for t in (keys, values)]
    assert_close(flat[0][slots], exact_rotary(k, cos, sin, Rotary.NEOX))
    assert torch.equal(flat[1][slots], v)


def test_many_heads_go_two_by_two(gpu: Any) -> None:
    """Enough heads that a group of lanes takes two."""
    tokens = 36 if not gpu.real else 1000
    fused = torch.randn(tokens, 72, 64).bfloat16()
    cos, sin = yarn_like(tokens, 32)
    v, weights = torch.randn(tokens, 8, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    keys, values = (gpu.tensor(torch.zeros(tokens, 8, 64).bfloat16()) for _ in range(2))
    moved, slots = gpu.tensor(fused), torch.randperm(tokens)
    qk_norm_rope_cache(
        moved[:, :64], moved[:, 64:], gpu.tensor(v), PagedCache(keys, values, gpu.tensor(slots)), gpu.tensor(cos),
        gpu.tensor(sin), norm=(gpu.tensor(weights[0]), gpu.tensor(weights[1]), EPS),
    )  # fmt: skip
    after = gpu.plain(moved)
    assert_close(after[:, :64], exact_rotary(exact_norm(fused[:, :64], weights[0]), cos, sin, Rotary.NEOX))
    assert_close(gpu.plain(keys)[slots], exact_rotary(exact_norm(fused[:, 64:], weights[1]), cos, sin, Rotary.NEOX))
    assert torch.equal(gpu.plain(values)[slots], v)
    assert torch.equal(after[:, 64:], fused[:, 64:])


def test_rotary_alone(gpu: Any) -> None:
    x = torch.randn(3, 8, 64).bfloat16()
    cos, sin = (t.bfloat16() for t in yarn_like(3, 32))
    moved = gpu.tensor(x)
    rotate(moved[:, :6], gpu.tensor(cos), gpu.tensor(sin), Rotary.NEOX)
    assert_close(gpu.plain(moved)[:, :6], exact_rotary(x[:, :6], cos, sin, Rotary.NEOX))
    assert torch.equal(gpu.plain(moved)[:, 6:], x[:, 6:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_projection_goes_into_the_cache(gpu: Any, dtype: torch.dtype) -> None:
    """On a GPU by the kernel, which takes 16-bit floats only."""
    fused = torch.randn(3, 8, 64).to(dtype)
    cos, sin = yarn_like(3, 32)
    slots = torch.tensor([5, 0, 3])
    move, plain = (gpu.tensor, gpu.plain) if dtype == torch.bfloat16 else (torch.clone, torch.clone)
    keys, values = (move(torch.zeros(6, 2, 64, dtype=dtype)) for _ in range(2))
    q = rotate_and_store(move(fused), 2, move(cos), move(sin), PagedCache(keys, values, move(slots)))
    assert_close(plain(q), exact_rotary(fused[:, :4], cos, sin, Rotary.NEOX))
    assert_close(plain(keys)[slots], exact_rotary(fused[:, 4:6], cos, sin, Rotary.NEOX))
    assert torch.equal(plain(values)[slots], fused[:, 6:])


def test_cpu_path_is_the_same(gpu: Any) -> None:
    """The CPU implementation and the kernel agree to a bf16 rounding."""
    q, k, v = (torch.randn(4, h, 64).bfloat16() for h in (4, 2, 2))
    cos, sin = yarn_like(4, 32)
    weights = (torch.randn(64).bfloat16(), torch.randn(64).bfloat16(), EPS)
    cache = PagedCache(*(torch.zeros(2, 4, 2, 64).bfloat16() for _ in range(2)), torch.tensor([0, -1, 6, 7]))
    moved = PagedCache(*(gpu.tensor(t) for t in (cache.keys, cache.values, cache.slots)))
    moved_q = gpu.tensor(q)
    qk_norm_rope_cache(
        moved_q, gpu.tensor(k), gpu.tensor(v), moved, gpu.tensor(cos), gpu.tensor(sin),
        norm=(gpu.tensor(weights[0]), gpu.tensor(weights[1]), EPS),
    )  # fmt: skip
    qk_norm_rope_cache(q, k, v, cache, cos, sin, norm=weights)
    assert (gpu.plain(moved_q).float() - q.float()).abs().max() < 0.05
    assert (gpu.plain(moved.keys).float() - cache.keys.float()).abs().max() < 0.05
    assert torch.equal(gpu.plain(moved.values), cache.values)


@pytest.mark.gpu(1)
def test_many_tokens() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for tokens in (1, 3, 127, 8191):
        fused = torch.randn(tokens, 72 * 64, device="cuda").bfloat16()
        before = fused.clone().view(tokens, 72, 64)
        weight = torch.randn(64, device="cuda").bfloat16()
        heads = fused.view(tokens, 72, 64)
        qk_norm(heads[:, :64], heads[:, 64:], weight, weight, EPS)
        assert_close(heads, exact_norm(before, weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 96).bfloat16()}, "q: head_dim is 96"),
        ({"k": torch.zeros(2, 2, 128).bfloat16()}, "k: shape"),
        ({"k": torch.zeros(2, 2, 64)}, "k: dtype"),
        (
            {"cos": torch.zeros(2, 64)},
            "cos: has 64 columns; needs one for two rotated elements: a multiple of 16, at most 32",
        ),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions: dtype"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots: shape"),
        ({"keys": torch.zeros(2, 3, 2, 64).bfloat16()}, "cache.keys: block size is 3"),
        ({"values": torch.zeros(4, 4, 2, 64).bfloat16()}, "cache.values: must have the shape"),
    ],
)
def test_bad_arguments(gpu: Any, change: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "q": torch.zeros(2, 4, 64).bfloat16(), "k": torch.zeros(2, 2, 64).bfloat16(),
        "v": torch.zeros(2, 2, 64).bfloat16(), "keys": torch.zeros(2, 4, 2, 64).bfloat16(),
        "values": torch.zeros(2, 4, 2, 64).bfloat16(), "slots": torch.zeros(2, dtype=torch.int64),
        "cos": torch.zeros(2, 32), "sin": torch.zeros(2, 32), "positions": torch.zeros(2, dtype=torch.int64), **change,
    }  # fmt: skip
    moved = {name: gpu.tensor(t) for name, t in given.items()}
    cache = PagedCache(moved["keys"], moved["values"], moved["slots"])
    with pytest.raises(KernelArgumentError, match=message):
        qk_norm_rope_cache(
            moved["q"], moved["k"], moved["v"], cache, moved["cos"], moved["sin"], positions=moved["positions"]
        )
