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

HEAD_DIMS = (64, 128)
MAX_GROUP = 16
"""Query heads a key head: the rows of one matrix product."""
TILE = 16
"""Keys that a warp takes at a time; a divisor of every block size."""
MIN_TILES = 8
"""Tiles a split, at least: below, merging costs more than further blocks gain."""
MAX_BLOCKS = 256
"""Blocks that share one request, all its key heads together: about two for each SM of a Hopper GPU."""
LOG2_E = 1 / math.log(2)
UNLIMITED = 1 << 30
"""A window that hides nothing."""


@dataclass(frozen=True)
class DecodeWorkspace:
    """Where the blocks that share a request leave their results. Serves any number of layers and groups of one shape,
    and graphs captured with it, one call at a time.
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
        splits = most_splits(context, key_heads)
        rows = 8 if query_heads // key_heads <= 8 else 16
        shape = (requests, key_heads, splits, rows, partial_floats(head_dim))
        counters = torch.empty(requests, key_heads, dtype=torch.int32, device=device).zero_()
        return cls(torch.empty(shape, dtype=torch.float32, device=device), counters)


def most_splits(context: int, key_heads: int) -> int:
    """Blocks for each key head of a request with `context` visible tokens."""
    return max(1, min(-(-context // TILE) // MIN_TILES, MAX_BLOCKS // key_heads))


def partial_floats(head_dim: int) -> int:
    """fp32 of a query head in a partial result: its sums, the largest score, the sum of weights, and padding."""
    return head_dim + 4


def decode(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, lengths: Tensor, workspace: DecodeWorkspace, *,
    block_size: int, scale: float, sinks: Tensor | None = None, window: int | None = None,
    first_block: Tensor | None = None, rows: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query a request, the last of its tokens. Its key and value are in the cache already.

    Only the device knows lengths, tables and the number of live requests, so a captured graph serves any of them up to
    its capacity. A request's result depends, bit for bit, on nothing but its own query, keys, values and length.

    Args:
        q: bf16 [requests, query heads, head_dim], of requests in any distance, as in a fused projection's output.
        keys, values: bf16 [slots, key heads, head_dim], one layer's cache; block b has slots from b · block_size on.
        block_tables: int32 [requests, blocks], the blocks of a request's tokens in order. What a query does not see may
            be anything.
        lengths: int32 [requests], tokens so far, this one included; 0 gives a result of 0.
        block_size: tokens a block, a multiple of 16.
        sinks: fp32 [query heads], unscaled logits; None for none.
        window: tokens that a query sees, itself included; None for all.
        first_block: int32 [requests], which of the request's blocks its table starts with; None for the first.
        rows: int32 [1], live requests; those beyond give a result of 0 and their lengths and tables are not read.
        out: like `q`, dense.

    Returns:
        `out`, or a new tensor like it.

    Raises `KernelArgumentError`.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _check(q, keys, values, block_tables, lengths, workspace, block_size, sinks, window, first_block, rows, out)
    if q.shape[0] == 0:
        return out
    if not q.is_cuda:
        return _reference(
            q, keys, values, block_tables, lengths, block_size, scale, sinks, window, first_block, rows, out
        )
    from rose_dist.kernels.cute import paged_attention_decode as cute  # noqa: PLC0415 - it loads the compiler

    requests, query_heads, head_dim = q.shape
    key_heads = keys.shape[1]
    group = query_heads // key_heads
    device = launch.device(q)
    launcher = cute.launcher(device.arch, q.dtype, head_dim, group > 8)
    launch.run(
        launcher, q, q, q.stride(0), keys, values, keys.stride(0), keys.stride(1), block_tables, block_tables.stride(0),
        first_block, lengths, rows, sinks, out, workspace.partials, workspace.counters, requests, key_heads, group,
        block_size // TILE, UNLIMITED if window is None else window, workspace.partials.shape[2], scale * LOG2_E,
        device.sms,
    )  # fmt: skip
    return out


def _reference(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, lengths: Tensor, block_size: int, scale: float,
    sinks: Tensor | None, window: int | None, first_block: Tensor | None, rows: Tensor | None, out: Tensor,
) -> Tensor:  # fmt: skip
    """In fp32, one request after another."""
    group = q.shape[1] // keys.shape[1]
    live = q.shape[0] if rows is None else min(int(rows), q.shape[0])
    out.zero_()
    for row in range(live):
        length = int(lengths[row])
        first = 0 if first_block is None else int(first_block[row])
        positions = torch.arange(max(0, length - (window or UNLIMITED)), length)
        slots = block_tables[row, positions // block_size - first].long() * block_size + positions % block_size
        k, v = (x[slots].float().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[row].float(), k) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        if scores.shape[1]:
            weights = scores.softmax(-1)[:, : len(positions)]
            out[row] = torch.einsum("hk,khd->hd", weights, v).to(out.dtype)
    return out


def _check(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, lengths: Tensor, workspace: DecodeWorkspace,
    block_size: int, sinks: Tensor | None, window: int | None, first_block: Tensor | None, rows: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    checks.shape("q", q, None, None, None)
    checks.dtype("q", q, torch.bfloat16)
    requests, query_heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS:
        raise checks.fail("q", f"head_dim is {head_dim}; allowed: {HEAD_DIMS}")
    checks.rows("q", q)
    if q.numel() and q.stride(1) != head_dim:
        raise checks.fail("q", f"heads are {q.stride(1)} elements apart; must be dense ({head_dim})")
    check_cache(keys, values, q)
    check_group(query_heads, keys.shape[1])
    checks.multiple("block_size", block_size, TILE, "a tile of keys lies in one block")
    if window is not None and window < 1:
        raise checks.fail("window", f"is {window}; must be at least 1, or None")
    integers: dict[str, tuple[Tensor | None, tuple[int | None, ...]]] = {
        "block_tables": (block_tables, (requests, None)),
        "lengths": (lengths, (requests,)),
        "first_block": (first_block, (requests,)),
        "rows": (rows, (1,)),
    }
    for name, (tensor, shape) in integers.items():
        if tensor is not None:
            checks.shape(name, tensor, *shape)
            checks.dtype(name, tensor, torch.int32)
            checks.same_device(name, tensor, q.device)
            checks.rows(name, tensor, 4)
    check_sinks(sinks, q)
    checks.shape("out", out, requests, query_heads, head_dim)
    checks.dtype("out", out, q.dtype)
    checks.same_device("out", out, q.device)
    checks.dense("out", out)
    _check_workspace(workspace, q, keys.shape[1])


def check_cache(keys: Tensor, values: Tensor, q: Tensor) -> None:
    """One layer's cache fits the queries."""
    for name, stored in (("keys", keys), ("values", values)):
        checks.shape(name, stored, None, None, q.shape[2])
        checks.dtype(name, stored, q.dtype)
        checks.same_device(name, stored, q.device)
        checks.rows(name, stored)
    if keys.stride() != values.stride() or keys.shape != values.shape:
        raise checks.fail("values", "must have the shape and strides of keys")


def check_group(query_heads: int, key_heads: int) -> None:
    """Whole groups of query heads, none too large."""
    if query_heads % key_heads or not 1 <= query_heads // key_heads <= MAX_GROUP:
        raise checks.fail(
            "q", f"{query_heads} query heads for {key_heads} key heads; needs 1 to {MAX_GROUP} each, all the same"
        )


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """None, or a logit for each query head."""
    if sinks is not None:
        checks.shape("sinks", sinks, q.shape[1])
        checks.dtype("sinks", sinks, torch.float32)
        checks.same_device("sinks", sinks, q.device)
        checks.rows("sinks", sinks, 4)


def _check_workspace(workspace: DecodeWorkspace, q: Tensor, key_heads: int) -> None:
    requests, query_heads, head_dim = q.shape
    rows = 8 if query_heads // key_heads <= 8 else 16
    held, *shape = workspace.partials.shape
    if held < requests or [shape[0], *shape[2:]] != [key_heads, rows, partial_floats(head_dim)]:
        raise checks.fail(
            "workspace", f"is for {held} requests of another shape or fewer than {requests}; allocate it for this one"
        )
    checks.same_device("workspace", workspace.counters, q.device)
