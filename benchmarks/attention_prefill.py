"""Chunks of prompts, for `attention.py`: ours, and peers that get keys gathered already and no sinks."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.graphs import Call, time_call
from rose_dist.kernels.paged_prefill import prefill

CUDA = torch.device("cuda")


def prefill_row(tokens: int, prefix: int, sequences: int, window: int | None, flashinfer: bool) -> dict[str, Any]:
    """Chunks of GPT-OSS's heads. Peers get keys that are gathered already, and no sinks."""
    query_heads, key_heads, head_dim = 64, 8, 64
    first = 0 if window is None else max(0, prefix - window + 1)
    held = prefix + tokens - first
    keys, values = torch.randn(2, sequences * held, key_heads, head_dim, device=CUDA).bfloat16()
    q = torch.randn(sequences * tokens, query_heads, head_dim, device=CUDA).bfloat16()
    slots = torch.randperm(sequences * held, device=CUDA)
    starts = torch.arange(sequences + 1, device=CUDA, dtype=torch.int32)
    sinks = torch.randn(query_heads, device=CUDA)
    own = partial(
        prefill, q, keys, values, slots, starts * tokens, starts * held, sinks, most_queries=tokens, most_keys=held,
        window=window, scale=0.125,
    )  # fmt: skip
    us = time_call(own, calls=4)
    seen = [min(prefix + i + 1, window or 1 << 30) for i in range(tokens)]
    operations = 4 * sequences * sum(seen) * query_heads * head_dim
    shape = f"{sequences} x {tokens} after {prefix}" + (f" window {window}" if window else "")
    row: dict[str, Any] = {"what": "prefill", "shape": shape, "us": us, "TFLOP/s": operations / us / 1e6}
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        try:
            other = own(library="flash-attn-4").float()
            row["difference of FA4"] = float((other - own().float()).abs().max() / other.abs().max())
            row["with FA4"] = time_call(partial(own, library="flash-attn-4"), calls=4)
        except Exception as error:
            traceback.print_exc()
            row["with FA4"] = f"failed: {str(error)[:80]}"
    gathered = (q, keys, values, starts * tokens, starts * held, tokens, held, window)
    for name, make in prefill_peers(sequences, prefix, window, flashinfer):
        try:
            peer = time_call(make(*gathered), calls=4)
            row |= {name: peer, f"{name}, TFLOP/s": operations / peer / 1e6}
        except Exception as error:
            traceback.print_exc()
            row[name] = f"failed: {str(error)[:80]}"
    return row


def prefill_peers(
    sequences: int, prefix: int, window: int | None, flashinfer: bool
) -> Iterator[tuple[str, Callable[..., Call]]]:
    """Those that can compute the case, each as a function that makes the call."""
    yield "torch flash", flash_prefill
    if sequences == 1 and prefix == 0 and window is None:
        yield "cuDNN", cudnn_prefill
    if flashinfer:
        yield "FlashInfer FA2", partial(flashinfer_prefill, "fa2")
        yield "FlashInfer FA3", partial(flashinfer_prefill, "fa3")
    if importlib.util.find_spec("flash_attn_interface"):
        yield "FA3", flash3_prefill


def flash_prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, query_starts: torch.Tensor, key_starts: torch.Tensor,
    tokens: int, held: int, window: int | None,
) -> Call:  # fmt: skip
    """What `paged_prefill` calls."""
    return partial(
        torch.ops.aten._flash_attention_forward, q, keys, values, query_starts, key_starts, tokens, held, 0.0, True,
        False, scale=0.125, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip


def cudnn_prefill(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> Call:
    """With log-sum-exps, into which sinks could be put. Key heads are repeated: the operator takes no groups."""
    group = q.shape[1] // keys.shape[1]
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, *(x.repeat_interleave(group, 1) for x in (keys, values))))
    return partial(
        torch.ops.aten._scaled_dot_product_cudnn_attention, q, keys, values, None, True, 0.0, True, scale=0.125
    )


def flashinfer_prefill(
    backend: str, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, query_starts: torch.Tensor,
    key_starts: torch.Tensor, tokens: int, held: int, window: int | None,
) -> Call:  # fmt: skip
    import flashinfer  # noqa: PLC0415

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=CUDA), "NHD", backend=backend
    )
    wrapper.plan(
        query_starts, key_starts, q.shape[1], keys.shape[1], q.shape[2], causal=True, sm_scale=0.125,
        window_left=-1 if window is None else window - 1, q_data_type=torch.bfloat16,
    )  # fmt: skip
    return partial(wrapper.run, q, keys, values, return_lse=True)


def flash3_prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, query_starts: torch.Tensor, key_starts: torch.Tensor,
    tokens: int, held: int, window: int | None,
) -> Call:  # fmt: skip
    from flash_attn_interface import flash_attn_varlen_func  # noqa: PLC0415

    return partial(
        flash_attn_varlen_func, q, keys, values, query_starts, key_starts, tokens, held, softmax_scale=0.125,
        causal=True, window_size=(-1 if window is None else window - 1, 0 if window else -1),
    )  # fmt: skip
