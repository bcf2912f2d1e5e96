"""What happens to queries, keys and values between their projection and attention, in one launch.

Per-head RMS norm of q and k, rotary embedding of q and k, and the write of k and v into a paged cache; each part can
be left out. `rotary.rotate_and_store` uses the same kernel.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch
from rose_dist.kernels.variants import heads_each

HEAD_DIMS = (64, 128, 256)
E4M3_MAX = 448.0


class Rotary(enum.Enum):
    """Which elements of a head rotate together."""

    NONE = "none"
    NEOX = "neox"
    """i and i + head_dim / 2."""
    INTERLEAVED = "interleaved"
    """2i and 2i + 1."""


@dataclass(frozen=True)
class PagedCache:
    """One layer's cache. Slot s is row s % block_size of block s // block_size.

    keys, values: [blocks, block_size, key heads, head_dim], or [slots, key heads, head_dim], of the keys' dtype or
    e4m3; the last dimension dense, the others in any order (a permuted view of [blocks, key heads, block_size,
    head_dim] will do).
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    """int64 [tokens]: where each token's key and value go; −1: nowhere."""
    key_scale: float = 1.0
    value_scale: float = 1.0
    """e4m3 caches hold keys and values times the reciprocals of these, saturated at ±448; others hold them as are."""


def qk_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """RMS norm of every head of `q` [tokens, query heads, head_dim] and `k` [tokens, key heads, head_dim], in place.

    Weights are [head_dim] of the same dtype. Computed in fp32, rounded once.
    """
    if not q.is_cuda:
        q.copy_(_reference_norm(q, q_weight, eps))
        k.copy_(_reference_norm(k, k_weight, eps))
        return
    _launch(q, k, norm=(q_weight, k_weight, eps))


def qk_norm_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: PagedCache,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    rotary: Rotary = Rotary.NEOX,
) -> None:
    """Norm and rotate `q` in place; norm and rotate `k` into the cache, copy `v` there. `k` and `v` stay as they are.

    Args:
        q: [tokens, query heads, head_dim]; k, v: [tokens, key heads, head_dim], bf16 or fp16. Tokens may be strided,
            as in a fused projection's output.
        cos, sin: [positions or tokens, rotary_dim / 2], fp32 or of `q`'s dtype, scaled by YaRN's concentration already.
            The first rotary_dim elements of a head are rotated, among themselves; a multiple of 32 up to head_dim.
        positions: int64 [tokens], rows of `cos` and `sin`; None: row t serves token t.
        norm: query weight, key weight (each [head_dim] of `q`'s dtype) and epsilon; None leaves the norm out.

    All in fp32, rounded once at the end; to e4m3 where that is the cache's dtype.
    """
    if q.is_cuda:
        _launch(q, k, v, cache=cache, cos=cos, sin=sin, positions=positions, norm=norm, rotary=rotary)
        return
    keys = k
    if norm is not None:
        q.copy_(_reference_norm(q, norm[0], norm[2]))
        keys = _reference_norm(k, norm[1], norm[2])
    rows = slice(None) if positions is None else positions
    q.copy_(reference_rotary(q, cos[rows], sin[rows], rotary))
    keys = reference_rotary(keys, cos[rows], sin[rows], rotary)
    live = cache.slots >= 0
    slots = cache.slots[live]
    for stored, new, scale in ((cache.keys, keys, cache.key_scale), (cache.values, v, cache.value_scale)):
        block_size = stored.shape[1] if stored.dim() == 4 else 1
        place = (slots // block_size, slots % block_size) if stored.dim() == 4 else (slots,)
        if stored.dtype is torch.float8_e4m3fn:
            codes = (new[live].float() * (1 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(stored.dtype)
            stored.view(torch.uint8)[place] = codes.view(torch.uint8)
        else:
            stored[place] = new[live].to(stored.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> None:
    """Rotate every head of `x` [tokens, heads, head_dim] on the GPU in place; row t of cos and sin serves token t."""
    _launch(x, x[:, :0], cos=cos, sin=sin, rotary=rotary)


def _reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def reference_rotary(x: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> Tensor:
    """(a, b) → (a·cos − b·sin, b·cos + a·sin) for the pairs of every head of `x` [tokens, heads, head_dim]."""
    c, s = cos[:, None].float(), sin[:, None].float()
    rotary_dim = 2 * cos.shape[1]
    if rotary_dim < x.shape[2]:
        turned = reference_rotary(x[..., :rotary_dim], cos, sin, rotary)
        return torch.cat([turned, x[..., rotary_dim:]], -1)
    wide = x.float()
    if rotary is Rotary.NEOX:
        a, b = wide.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)
    a, b = wide[..., 0::2], wide[..., 1::2]
    return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2).to(x.dtype)


def _launch(
    q: Tensor, k: Tensor, v: Tensor | None = None, *, cache: PagedCache | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None, positions: Tensor | None = None, norm: tuple[Tensor, Tensor, float] | None = None,
    rotary: Rotary = Rotary.NONE,
) -> None:  # fmt: skip
    launcher, items = _prepare(q, k, v, cache, cos, sin, positions, norm, rotary)
    if items == 0:
        return
    block_size, cache_strides = _cache_shape(cache)
    weights = norm or (None, None, 0.0)
    factors = (1 / cache.key_scale, 1 / cache.value_scale) if cache else (1.0, 1.0)
    launch.run(
        launcher, q, q, q.stride(0), q.stride(1), k, k.stride(0), k.stride(1),
        v, 0 if v is None else v.stride(0), 0 if v is None else v.stride(1),
        weights[0], weights[1], cos, sin, 0 if cos is None else cos.stride(0), positions,
        cache.slots if cache else None, cache.keys if cache else None, cache.values if cache else None,
        *cache_strides, block_size.bit_length() - 1, *factors, items, weights[2],
    )  # fmt: skip


@checks.once
def _prepare(
    q: Tensor, k: Tensor, v: Tensor | None, cache: PagedCache | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, norm: tuple[Tensor, Tensor, float] | None, rotary: Rotary,
) -> tuple[jit.Launcher, int]:  # fmt: skip
    """The kernel for arguments that have been checked, and its items: groups of heads; 0: nothing to do."""
    _check(q, k, v, cache, cos, sin, positions, norm)
    tokens, query_heads, head_dim = q.shape
    key_heads = k.shape[1]
    device = launch.device(q)
    stored = (cache.keys, cache.values) if cache else ()
    # A lane stores half as many bytes into an e4m3 cache as it loads, at addresses that are half as well aligned.
    size, held = q.element_size(), [t for t in (q, k, v, *stored) if t is not None]
    steps = [step * size for t in held for step in t.stride()[:-1]]
    steps += [t.data_ptr() * (size // t.element_size()) for t in held]
    rotary_dim = head_dim if cos is None else 2 * cos.shape[1]
    vector_bytes = launch.widest(device.arch, head_dim * size // 2, rotary_dim * size // 2, *steps)
    table_dtype = torch.float32 if cos is None else cos.dtype
    heads = query_heads + key_heads * (2 if cache else 1)
    each = heads_each(
        query_heads, key_heads, vector_bytes, tokens * heads // device.sms, rotary=rotary is not Rotary.NONE
    )
    from rose_dist.kernels.cute import qk_norm as cute  # noqa: PLC0415 - it loads the compiler

    launcher = cute.launcher(
        device.arch, q.dtype, table_dtype, query_heads, key_heads, head_dim, vector_bytes, norm is not None, rotary,
        rotary_dim, cache.keys.dtype if cache else None, each,
    )  # fmt: skip
    return launcher, tokens * heads // each


def _cache_shape(cache: PagedCache | None) -> tuple[int, tuple[int, int, int]]:
    """Block size, and the strides of a block, a slot in it and a head."""
    if cache is None:
        return 1, (0, 0, 0)
    keys = cache.keys
    if keys.dim() == 3:
        return 1, (keys.stride(0), 0, keys.stride(1))
    return keys.shape[1], (keys.stride(0), keys.stride(1), keys.stride(2))


def _check(
    q: Tensor, k: Tensor, v: Tensor | None, cache: PagedCache | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, norm: tuple[Tensor, Tensor, float] | None,
) -> None:  # fmt: skip
    checks.shape("q", q, None, None, None)
    checks.dtype("q", q, torch.bfloat16, torch.float16)
    tokens, _, head_dim = q.shape
    if head_dim not in HEAD_DIMS:
        raise checks.fail("q", f"head_dim is {head_dim}; allowed: {HEAD_DIMS}")
    heads: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    for name, x in heads.items():
        if x is not None:
            checks.shape(name, x, tokens, k.shape[1] if name == "v" else None, head_dim)
            checks.dtype(name, x, q.dtype)
            checks.same_device(name, x, q.device)
            checks.rows(name, x)
    if cos is not None and sin is not None:
        rows = tokens if positions is None else None
        checks.shape("cos", cos, rows, None)
        if cos.shape[1] % 16 or not 16 <= cos.shape[1] <= head_dim // 2:
            allowed = f"a multiple of 16, at most {head_dim // 2}"
            raise checks.fail("cos", f"has {cos.shape[1]} columns; needs one for two rotated elements: {allowed}")
        checks.shape("sin", sin, rows, cos.shape[1])
        for name, table in (("cos", cos), ("sin", sin)):
            checks.dtype(name, table, q.dtype, torch.float32)
            checks.same_device(name, table, q.device)
            checks.dense(name, table)
        checks.dtype("sin", sin, cos.dtype)
    if positions is not None:
        checks.indices("positions", positions, tokens, q.device)
    if norm is not None:
        for name, weight in (("q_weight", norm[0]), ("k_weight", norm[1])):
            checks.shape(name, weight, head_dim)
            checks.dtype(name, weight, q.dtype)
            checks.same_device(name, weight, q.device)
            checks.dense(name, weight)
    if cache is not None:
        _check_cache(cache, k)


def _check_cache(cache: PagedCache, k: Tensor) -> None:
    checks.indices("slots", cache.slots, k.shape[0], k.device)
    for name, stored in (("cache.keys", cache.keys), ("cache.values", cache.values)):
        checks.shape(name, stored, *([None] * (stored.dim() - 2 if stored.dim() in (3, 4) else 2)), *k.shape[1:])
        checks.dtype(name, stored, k.dtype, torch.float8_e4m3fn)
        checks.same_device(name, stored, k.device)
        checks.rows(name, stored)
        if stored.dim() == 4 and stored.shape[1] & (stored.shape[1] - 1):
            raise checks.fail(name, f"block size is {stored.shape[1]}; must be a power of two")
    checks.dtype("cache.values", cache.values, cache.keys.dtype)
    for name, scale in (("cache.key_scale", cache.key_scale), ("cache.value_scale", cache.value_scale)):
        if not 0 < scale < math.inf:
            raise checks.fail(name, f"is {scale}; must be positive and finite")
    if cache.keys.stride() != cache.values.stride() or cache.keys.shape != cache.values.shape:
        raise checks.fail("cache.values", "must have the shape and strides of cache.keys")
