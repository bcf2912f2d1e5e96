"""Causal attention of chunks of several sequences over a paged KV cache, with sinks and a sliding window.

On Hopper by a kernel of our own. Elsewhere by torch's flash attention, which leaves the sink out; its log-sum-exp puts
it in afterwards (`attention_sinks`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch
from rose_dist.kernels.attention_sinks import apply_sinks
from rose_dist.kernels.paged_attention import LOG2_E, UNLIMITED, check_cache, check_sinks, check_window
from rose_dist.kernels.prefill_tiling import PREFILL_TILINGS, PrefillTiling


def prefill(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor | None, query_starts: Tensor, key_starts: Tensor,
    sinks: Tensor | None, *, most_queries: int, most_keys: int, window: int | None, scale: float,
    out: Tensor | None = None, key_scale: float = 1.0, value_scale: float = 1.0, shape: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each sequence's queries are the last of its tokens: its last query sees its last key, the one before all keys but
    that, and so on. Keys before the chunk are a cached prefix or earlier chunks.

    Args:
        q: bf16 or fp16, on a CPU also fp32 [tokens, query heads, head_dim], sequence after sequence.
        keys, values: of `q`'s dtype or e4m3 [slots, key heads, head_dim], one layer's cache, the queries' own keys and
            values in it. e4m3 is widened to `q`'s dtype.
        slots: int64 [keys], the cache slots of each sequence's keys in order, sequence after sequence. With a window
            a sequence needs only those from window − 1 before its first query on. None: `keys` and `values` are those
            of the sequences' slots alone, which follow one another there.
        query_starts, key_starts: int32 [sequences + 1], where each sequence's queries and keys start; the last is the
            end. No sequence has fewer keys than queries.
        most_queries, most_keys: of one sequence, or more.
        window: tokens that a query sees, its own included; None: all.
        out: like `q`, dense.
        key_scale, value_scale: what stored keys and values are to be multiplied by.
        shape: int32 [2] on a GPU whose own kernel serves (`own_kernel`): how many sequences there are, and the most
            queries of one. Those of `query_starts`, and `most_queries`, only bound them: a captured graph serves other
            steps. `slots` is given. Not to be written by the launch before.

    Returns:
        `out`, or a new tensor like it. By torch's flash attention rounded once before the sink and once after it.

    Raises `KernelArgumentError`. Nothing is read on the host.
    """
    _check(q, keys, values, slots, query_starts, key_starts, sinks, most_queries, most_keys, window)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _check_out(q, out)
    if shape is not None:
        _check_shape(q, keys, slots, shape)
    if q.shape[0] == 0:
        return out
    tiling = _tiling(q)
    if tiling is not None:
        if keys.dtype != q.dtype:
            keys, values, slots = _gather(keys, slots, q.dtype), _gather(values, slots, q.dtype), None
        group = q.shape[1] // keys.shape[1]
        launch.run(
            _launcher(q, group, tiling), out, q, q.stride(0), q.stride(1), keys, values, keys.stride(0),
            keys.stride(1), slots, query_starts, key_starts, sinks, out, shape, query_starts.shape[0] - 1,
            keys.shape[1], -(-most_queries * group // tiling.rows), UNLIMITED if window is None else window,
            scale * key_scale * LOG2_E, value_scale, launch.device(q).sms,
        )  # fmt: skip
        return out
    k, v = _gather(keys, slots, q.dtype), _gather(values, slots, q.dtype)
    flash = _flash if q.is_cuda else _flash_on_cpu
    attended, lse = flash(q, k, v, query_starts, key_starts, most_queries, most_keys, window, scale * key_scale)
    if sinks is None:
        return torch.mul(attended, value_scale, out=out)
    apply_sinks(attended, lse, sinks, out, value_scale)
    return out


def own_kernel(like: Tensor) -> bool:
    """Whether queries and keys of this dtype and head_dim [.., .., head_dim] have a kernel of our own."""
    return _tiling(like) is not None


def _tiling(q: Tensor) -> PrefillTiling | None:
    """That of our own kernel, where there is one."""
    if not q.is_cuda or q.dtype != torch.bfloat16 or not launch.device(q).arch.hopper:
        return None
    return PREFILL_TILINGS.get(q.shape[2])


@checks.once
def _launcher(q: Tensor, group: int, tiling: PrefillTiling) -> jit.Launcher:
    from rose_dist.kernels.cute import paged_attention_prefill as cute  # noqa: PLC0415 - it loads the compiler

    return cute.launcher(launch.device(q).arch, group, tiling)


@checks.once
def _check_out(q: Tensor, out: Tensor) -> None:
    checks.shape("out", out, *q.shape)
    checks.dtype("out", out, q.dtype)
    checks.same_device("out", out, q.device)
    checks.dense("out", out)


@checks.once
def _check_shape(q: Tensor, keys: Tensor, slots: Tensor | None, shape: Tensor) -> None:
    checks.shape("shape", shape, 2)
    checks.dtype("shape", shape, torch.int32)
    checks.same_device("shape", shape, q.device)
    if not own_kernel(q) or keys.dtype != q.dtype or slots is None:
        raise checks.fail("shape", "is for our own kernel alone, with keys of the queries' dtype, and slots")


def _gather(stored: Tensor, slots: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[keys, key heads, head_dim] of the slots, as `dtype`."""
    if slots is None:
        return stored.to(dtype)
    if stored.dtype == dtype:
        return stored.index_select(0, slots)
    # Not all operators know FP8, bytes they do.
    return stored.view(torch.uint8).index_select(0, slots).view(stored.dtype).to(dtype)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, most_queries: int, most_keys: int,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """torch's flash attention: the result and its natural log-sum-exp, fp32 [query heads, tokens].

    With a right window of 0 it is causal, aligned at the last query and key (flash_attn 2.1 and later).
    """
    # One query a sequence takes another path there, whose log-sum-exp has another order.
    most_queries = max(most_queries, 2)
    left = -1 if window is None else window - 1
    attended, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, query_starts, key_starts, most_queries, most_keys, 0.0, True, False, scale=scale,
        window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return attended, lse


def _flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, most_queries: int, most_keys: int,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same from torch's flash attention for CPUs, with a mask, one sequence after another."""
    group = q.shape[1] // k.shape[1]
    attended = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0])
    ends = zip(
        query_starts.tolist(), query_starts[1:].tolist(), key_starts.tolist(), key_starts[1:].tolist(), strict=False
    )
    for first_query, end_query, first_key, end_key in ends:
        behind = torch.arange(end_key - first_key) - (end_key - first_key)
        at = (torch.arange(end_query - first_query) - (end_query - first_query))[:, None]
        hidden = behind > at
        if window is not None:
            hidden |= behind <= at - window
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        own = q[first_query:end_query].transpose(0, 1)[None]
        seen = (x[first_key:end_key].repeat_interleave(group, 1).transpose(0, 1)[None] for x in (k, v))
        result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            own, *seen, 0.0, False, attn_mask=mask[None, None], scale=scale
        )
        attended[first_query:end_query] = result[0].transpose(0, 1)
        lse[:, first_query:end_query] = sums[0]
    return attended, lse


@checks.once
def _check(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor | None, query_starts: Tensor, key_starts: Tensor,
    sinks: Tensor | None, most_queries: int, most_keys: int, window: int | None,
) -> None:  # fmt: skip
    checks.shape("q", q, None, None, None)
    checks.dtype("q", q, torch.bfloat16, torch.float16, *(() if q.is_cuda else (torch.float32,)))
    checks.multiple("head_dim", q.shape[2], 8, "flash attention loads 16 bytes at a time")
    checks.rows("q", q)
    check_cache(keys, values, q)
    if q.shape[1] % keys.shape[1]:
        raise checks.fail("q", f"{q.shape[1]} query heads for {keys.shape[1]} key heads; needs a multiple")
    if slots is not None:
        checks.indices("slots", slots, slots.shape[0] if slots.dim() else 0, q.device)
    for name, starts in (("query_starts", query_starts), ("key_starts", key_starts)):
        checks.shape(name, starts, query_starts.shape[0] if query_starts.dim() else 0)
        checks.dtype(name, starts, torch.int32)
        checks.same_device(name, starts, q.device)
        checks.dense(name, starts, 4)
    if query_starts.shape[0] < 2:
        raise checks.fail("query_starts", "names no sequence; needs 0 and the end of each")
    for name, most in (("most_queries", most_queries), ("most_keys", most_keys)):
        if most < 1:
            raise checks.fail(name, f"is {most}; must be at least 1")
    check_sinks(sinks, q)
    check_window(window)
