"""Times attention of prompts: ours, and peers that get keys gathered already and, but for FlashAttention-4, no sinks.

    python -m benchmarks.attention_prefill [--tilings]

Prints a table: our kernel with keys in slots of any order and with keys that follow one another, compared with fp32
torch at some queries; torch's flash attention with sinks put in afterwards, as where we have no kernel;
FlashAttention-4 (pip install flash-attn-4==4.0.0b36) with sinks, and how long it takes to compile. `--tilings` adds
other tilings and what tells waiting for keys from computing. `attention.py` writes the same rows into its page.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from benchmarks.attention_variants import PREFILL_VARIANTS
from benchmarks.graphs import Call, table, time_call
from benchmarks.kernel_variants import holding
from rose_dist.kernels import paged_prefill
from rose_dist.kernels.paged_prefill import prefill

CUDA = torch.device("cuda")
QUERY_HEADS, KEY_HEADS, HEAD_DIM, SCALE = 64, 8, 64, 0.125
"""GPT-OSS's."""
SHAPES = ((128, 0, 1), (1024, 0, 1), (4000, 0, 1), (8192, 0, 1), (1024, 8192, 1), (1024, 0, 8))
"""Tokens of a chunk, tokens before it, sequences."""


@dataclass(frozen=True)
class Prompts:
    """Chunks of several prompts.

    held: keys of each. slots: of all keys in order, None where they follow one another.
    """

    tokens: int
    prefix: int
    sequences: int
    window: int | None

    @cached_property
    def held(self) -> int:
        first = 0 if self.window is None else max(0, self.prefix - self.window + 1)
        return self.prefix + self.tokens - first

    @cached_property
    def q(self) -> torch.Tensor:
        return torch.randn(self.sequences * self.tokens, QUERY_HEADS, HEAD_DIM, device=CUDA).bfloat16()

    @cached_property
    def cache(self) -> torch.Tensor:
        """Keys and values, in the order of the sequences."""
        return torch.randn(2, self.sequences * self.held, KEY_HEADS, HEAD_DIM, device=CUDA).bfloat16()

    @cached_property
    def slots(self) -> torch.Tensor:
        return torch.randperm(self.sequences * self.held, device=CUDA)

    @cached_property
    def scattered(self) -> torch.Tensor:
        """The cache with each key in its slot."""
        scattered = torch.empty_like(self.cache)
        scattered[:, self.slots] = self.cache
        return scattered

    @cached_property
    def sinks(self) -> torch.Tensor:
        return torch.randn(QUERY_HEADS, device=CUDA)

    @cached_property
    def starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.arange(self.sequences + 1, device=CUDA, dtype=torch.int32)
        return numbers * self.tokens, numbers * self.held

    @cached_property
    def out(self) -> torch.Tensor:
        return torch.empty_like(self.q)

    def attend(self, *, in_order: bool) -> torch.Tensor:
        keys, values = self.cache if in_order else self.scattered
        return prefill(
            self.q, keys, values, None if in_order else self.slots, *self.starts, self.sinks, most_queries=self.tokens,
            most_keys=self.held, window=self.window, scale=SCALE, out=self.out,
        )  # fmt: skip

    def error(self, out: torch.Tensor) -> float:
        """Largest difference from fp32 torch over the largest value, of some queries of every sequence."""
        picked = sorted({0, 1, self.tokens // 3, self.tokens // 2, self.tokens - 2, self.tokens - 1})
        worst = 0.0
        for sequence in range(self.sequences):
            keys, values = self.cache[:, sequence * self.held : (sequence + 1) * self.held].float()
            for token in picked:
                own, row = self.held - self.tokens + token + 1, sequence * self.tokens + token
                seen = slice(0 if self.window is None else max(0, own - self.window), own)
                k, v = (x[seen].repeat_interleave(QUERY_HEADS // KEY_HEADS, 1) for x in (keys, values))
                scores = torch.einsum("hd,khd->hk", self.q[row].float(), k) * SCALE
                weights = torch.cat([scores, self.sinks[:, None]], 1).softmax(-1)[:, :-1]
                wanted = torch.einsum("hk,khd->hd", weights, v)
                worst = max(worst, float((out[row].float() - wanted).abs().max() / wanted.abs().max()))
        return worst

    @property
    def operations(self) -> int:
        seen = (min(self.prefix + i + 1, self.window or 1 << 30) for i in range(self.tokens))
        return 4 * self.sequences * sum(seen) * QUERY_HEADS * HEAD_DIM

    def __str__(self) -> str:
        text = f"{self.sequences} x {self.tokens} after {self.prefix}"
        return text + (f" window {self.window}" if self.window else "")


def prefill_row(
    tokens: int, prefix: int, sequences: int, window: int | None, flashinfer: bool, tilings: bool = False
) -> dict[str, Any]:
    """One case, with peers."""
    case = Prompts(tokens, prefix, sequences, window)
    row: dict[str, Any] = {"what": "prefill", "shape": str(case)}
    own = partial(case.attend, in_order=False)
    row["error"] = case.error(own())
    row["us"] = time_call(own, calls=4)
    row["TFLOP/s"] = case.operations / row["us"] / 1e6
    row["us in order"] = time_call(partial(case.attend, in_order=True), calls=4)
    with holding(paged_prefill, "PREFILL_TILINGS", {}):
        row["torch with sinks"] = time_call(own, calls=4)
        row["torch with sinks in order"] = time_call(partial(case.attend, in_order=True), calls=4)
    for name, variant in PREFILL_VARIANTS.items() if tilings else ():
        row[name] = attempt(partial(time_variant, own, variant))
    gathered = (case.q, *case.cache, *case.starts, tokens, case.held, window)
    for name, make in prefill_peers(sequences, prefix, window, flashinfer):
        row[name] = attempt(lambda make=make: time_call(make(*gathered), calls=4))
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        columns = attempt(partial(flash4_columns, case))
        row |= columns if isinstance(columns, dict) else {"FA4": columns}
    return row


def attempt(call: Call) -> Any:
    """What `call` returns, or what it fails with: one peer's failure is not the others'."""
    try:
        return call()
    except Exception as error:
        traceback.print_exc()
        return f"failed: {str(error)[:80]}"


def time_variant(call: Call, variant: Callable[[], AbstractContextManager[None]]) -> float:
    with variant():
        return time_call(call, calls=4)


def flash4_columns(case: Prompts) -> dict[str, Any]:
    """FlashAttention-4 with sinks, keys in order. CuTeDSL compiles it at its first use."""
    from flash_attn.cute.interface import _flash_attn_fwd  # noqa: PLC0415

    call = partial(
        _flash_attn_fwd, case.q, *case.cache, cu_seqlens_q=case.starts[0], cu_seqlens_k=case.starts[1],
        max_seqlen_k=case.held, softmax_scale=SCALE, causal=True, learnable_sink=case.sinks, out=case.out,
        window_size_left=None if case.window is None else case.window - 1,
    )  # fmt: skip
    begin = time.perf_counter()
    call()
    seconds, error = time.perf_counter() - begin, case.error(case.out)
    begin = time.perf_counter()
    for _ in range(20):
        call()
    host = (time.perf_counter() - begin) / 20 * 1e6
    return {"FA4": time_call(call, calls=4), "error of FA4": error, "first call, s": seconds, "FA4's host us": host}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tilings", action="store_true", help="other tilings; products alone; copies alone")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        for window in (None, 128):
            rows.append(prefill_row(*shape, window, flashinfer=False, tilings=arguments.tilings))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    main()
