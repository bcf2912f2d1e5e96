"""Attention of decoding requests, one query each, over a paged KV cache, with sinks and a sliding window.

out = Σ_k exp(s_k) · v_k / (Σ_k exp(s_k) + exp(sink)), s_k = scale · q·k, over the keys that the query sees: the sink is
a further logit whose column is dropped (GPT-OSS's reference, `sdpa`). Query head h reads key head
h // (query heads / key heads).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.attention_tiling import (
    TILE,
    gives_way,
    heads_together,
    is_brief,
    most_splits,
    takes_whole_tokens,
)  # fmt: skip
from rose_dist.kernels.jit import Launcher

HEAD_DIMS = (64, 128)
MAX_GROUP = 16
"""Query heads a key head: the rows of one matrix product."""
LOG2_E = 1 / math.log(2)
UNLIMITED = 1 << 30
"""A window that hides nothing."""


@dataclass(frozen=True)
class DecodeWorkspace:
    """Where blocks that share a request leave the results of their parts. Serves any number of layers and groups of one
    shape, and graphs captured with it, one call at a time.
    """

    partials: Tensor
    """fp32 [requests, key heads, splits, padded query heads a key head, head_dim + 4]."""
    counters: Tensor
    """int32 [requests, key heads], 0 between calls."""

    @classmethod
    def allocate(
        cls, *, requests: int, query_heads: int, key_heads: int, head_dim: int, context: int, device: torch.device
    ) -> DecodeWorkspace:
        """For up to `requests` requests of `context` tokens; with longer ones it works too, a little slower."""
        splits = most_splits(context, key_heads, head_dim)
        rows = 8 if query_heads // key_heads <= 8 else 16
        shape = (requests, key_heads, splits, rows, partial_floats(head_dim))
        counters = torch.empty(requests, key_heads, dtype=torch.int32, device=device).zero_()
        return cls(torch.empty(shape, dtype=torch.float32, device=device), counters)


def partial_floats(head_dim: int) -> int:
    """fp32 of a query head in a partial result: its sums, the largest score, the sum of weights, and padding."""
    return head_dim + 4


def decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, first: Tensor | None, lengths: Tensor,
    sinks: Tensor | None, *, window: int | None, block_size: int, scale: float, out: Tensor | None = None,
    rows: Tensor | None = None, workspace: DecodeWorkspace | None = None, key_scale: float = 1.0,
    value_scale: float = 1.0, early: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of one query a request, at the last of its tokens. Its key and value are in the cache already.

    Only the device knows lengths, tables and the number of live requests, so a captured graph serves any of them up to
    its capacity. A request's result depends, bit for bit, on nothing but its own query, keys, values and length.

    Args:
        q: bf16, on a CPU also fp32 [requests, query heads, head_dim], of requests in any distance, as in a fused
            projection's output. head_dim: 64 or 128, on a CPU any.
        keys, values: of `q`'s dtype or e4m3 [slots, key heads, head_dim], one layer's cache; block b has slots from
            b · block_size on. With e4m3 queries and weights are multiplied as fp16, so |q| must stay below 65504.
        tables: int32 [requests, blocks], the blocks of a request's tokens in order. What a query does not see may be
            anything.
        first: int32 [requests], which of the request's blocks `tables[:, 0]` is; None: the first.
        lengths: int32 [requests], tokens so far, the query's included; 0 gives a result of 0.
        sinks: fp32 [query heads], unscaled logits; None: none.
        window: tokens that a query sees, its own included; None: all.
        block_size: tokens a block, a multiple of 16.
        out: like `q`, dense.
        rows: int32 [1], live requests; those beyond give a result of 0, whatever their lengths and tables are.
        workspace: None: scratch memory is allocated, and zeroed by a launch of its own, on every call.
        key_scale, value_scale: what stored keys and values are to be multiplied by.
        early: whether the launches that may still run when this one begins write nothing of all this, the workspace
            included, but queries and the keys and values of each request's last token, so that the others may be
            fetched meanwhile. A launch that lets its dependents begin before its own wait (`linear_rotary`) adds the
            one before it to those; in a layer, the experts' launches wait first and so end the chain. Of few query
            heads (`gives_way`) this launch is such a one too.

    Returns:
        `out`, or a new tensor like it.

    Raises `KernelArgumentError`.
    """
    requests, query_heads, head_dim, key_heads = _check_heads(q, keys, values, sinks)
    _check_tables(q, tables, first, lengths, rows, block_size, window)
    if out is None:
        out = torch.empty(requests, query_heads, head_dim, dtype=q.dtype, device=q.device)
    _check_out(out, q)
    if requests == 0:
        return out
    if not q.is_cuda:
        stored = (keys.float() * key_scale, values.float() * value_scale)
        return _reference(q, *stored, tables, first, lengths, sinks, window, block_size, scale, out, rows)
    if workspace is None:
        context = tables.shape[1] * block_size if window is None else window + TILE
        workspace = DecodeWorkspace.allocate(
            requests=requests, query_heads=query_heads, key_heads=key_heads, head_dim=head_dim, context=context,
            device=q.device,
        )  # fmt: skip
    _check_workspace(workspace, q, key_heads)
    launcher, heads = _launcher(q, keys, block_size, window, early)
    splits = workspace.partials.shape[2]
    if window is not None:
        splits = min(splits, most_splits(window + TILE, key_heads, head_dim))
    launch.run(
        launcher, q, q, q.stride(0), keys, values, keys.stride(0), keys.stride(1), tables, tables.stride(0), first,
        lengths, rows, sinks, out, workspace.partials, workspace.counters, requests, key_heads // heads,
        query_heads // key_heads, UNLIMITED if window is None else window, splits, scale * key_scale * LOG2_E,
        value_scale, launch.device(q).sms,
    )  # fmt: skip
    return out


def _launcher(q: Tensor, keys: Tensor, block_size: int, window: int | None, early: bool) -> tuple[Launcher, int]:
    """The kernel for these shapes, and how many key heads one of its blocks takes."""
    from rose_dist.kernels.cute import paged_attention_decode, whole_token_attention  # noqa: PLC0415 - the compiler

    requests, query_heads, head_dim = q.shape
    key_heads, device = keys.shape[1], launch.device(q)
    wide, tiles = query_heads // key_heads > 8, block_size // TILE
    kinds = (device.arch, q.dtype, keys.dtype, head_dim)
    if keys.stride()[:2] == (key_heads * head_dim, head_dim) and takes_whole_tokens(
        requests, key_heads, head_dim, window, wide_group=wide
    ):
        return whole_token_attention.launcher(*kinds, key_heads, tiles, early), key_heads
    heads = 1
    if keys.stride(1) == head_dim and not is_brief(requests * key_heads, window, device.sms):
        heads = heads_together(requests, key_heads, head_dim, keys.element_size(), wide_group=wide)
    gives = early and gives_way(requests, query_heads * head_dim)
    return paged_attention_decode.launcher(*kinds, heads, wide, tiles, early, gives), heads


def _reference(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, first: Tensor | None, lengths: Tensor,
    sinks: Tensor | None, window: int | None, block_size: int, scale: float, out: Tensor, rows: Tensor | None,
) -> Tensor:  # fmt: skip
    """In fp32, one request after another; keys and values come as fp32."""
    group = q.shape[1] // keys.shape[1]
    live = q.shape[0] if rows is None else min(int(rows), q.shape[0])
    out.zero_()
    for row in range(live):
        length = int(lengths[row])
        skipped = 0 if first is None else int(first[row])
        positions = torch.arange(max(0, length - (window or UNLIMITED)), length)
        slots = tables[row, positions // block_size - skipped].long() * block_size + positions % block_size
        k, v = (x[slots].repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[row].float(), k) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        if scores.shape[1]:
            weights = scores.softmax(-1)[:, : len(positions)]
            out[row] = torch.einsum("hk,khd->hd", weights, v).to(out.dtype)
    return out


@checks.once
def _check_heads(q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> tuple[int, int, int, int]:
    """Requests, query heads, head_dim and key heads."""
    checks.shape("q", q, None, None, None)
    checks.dtype("q", q, torch.bfloat16, *(() if q.is_cuda else (torch.float32,)))
    requests, query_heads, head_dim = q.shape
    if q.is_cuda and head_dim not in HEAD_DIMS:
        raise checks.fail("q", f"head_dim is {head_dim}; allowed: {HEAD_DIMS}")
    checks.rows("q", q)
    if q.numel() and q.stride(1) != head_dim:
        raise checks.fail("q", f"heads are {q.stride(1)} elements apart; must be dense ({head_dim})")
    check_cache(keys, values, q)
    key_heads = keys.shape[1]
    if query_heads % key_heads or not 1 <= query_heads // key_heads <= MAX_GROUP:
        raise checks.fail(
            "q", f"{query_heads} query heads for {key_heads} key heads; needs 1 to {MAX_GROUP} each, all the same"
        )
    check_sinks(sinks, q)
    return requests, query_heads, head_dim, key_heads


def check_cache(keys: Tensor, values: Tensor, q: Tensor) -> None:
    """One layer's cache fits the queries."""
    for name, stored in (("keys", keys), ("values", values)):
        checks.shape(name, stored, None, None, q.shape[2])
        checks.dtype(name, stored, q.dtype, torch.float8_e4m3fn)
        checks.same_device(name, stored, q.device)
        checks.rows(name, stored)
    checks.dtype("values", values, keys.dtype)
    if keys.stride() != values.stride() or keys.shape != values.shape:
        raise checks.fail("values", "must have the shape and strides of keys")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """None, or a logit for each query head."""
    if sinks is not None:
        checks.shape("sinks", sinks, q.shape[1])
        checks.dtype("sinks", sinks, torch.float32)
        checks.same_device("sinks", sinks, q.device)
        checks.rows("sinks", sinks, 4)


def check_window(window: int | None) -> None:
    """None, or at least the query itself."""
    if window is not None and window < 1:
        raise checks.fail("window", f"is {window}; must be at least 1, or None")


@checks.once
def _check_tables(
    q: Tensor, tables: Tensor, first: Tensor | None, lengths: Tensor, rows: Tensor | None, block_size: int,
    window: int | None,
) -> None:  # fmt: skip
    requests = q.shape[0]
    integers: dict[str, tuple[Tensor | None, tuple[int | None, ...]]] = {
        "tables": (tables, (requests, None)),
        "first": (first, (requests,)),
        "lengths": (lengths, (requests,)),
        "rows": (rows, (1,)),
    }
    for name, (tensor, shape) in integers.items():
        if tensor is not None:
            checks.shape(name, tensor, *shape)
            checks.dtype(name, tensor, torch.int32)
            checks.same_device(name, tensor, q.device)
            checks.rows(name, tensor, 4)
    checks.multiple("block_size", block_size, TILE, "a tile of keys lies in one block")
    check_window(window)


@checks.once
def _check_out(out: Tensor, q: Tensor) -> None:
    checks.shape("out", out, *q.shape)
    checks.dtype("out", out, q.dtype)
    checks.same_device("out", out, q.device)
    checks.dense("out", out)


@checks.once
def _check_workspace(workspace: DecodeWorkspace, q: Tensor, key_heads: int) -> None:
    requests, query_heads, head_dim = q.shape
    rows = 8 if query_heads // key_heads <= 8 else 16
    held, *shape = workspace.partials.shape
    if held < requests or [shape[0], *shape[2:]] != [key_heads, rows, partial_floats(head_dim)]:
        raise checks.fail("workspace", f"was allocated for {held} requests and other heads; needs {requests}")
    checks.same_device("workspace", workspace.counters, q.device)
