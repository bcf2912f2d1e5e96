"""Times paged attention in CUDA graphs against the bytes of the KV cache and against what else there is.

    python -m benchmarks.attention [--out benchmarks/results/h200] [--only TEXT] [--variants] [--flashinfer]

Every decode case is first compared with fp32 torch. The calls of a graph take turns on caches that together exceed the
GPU's L2, as a model's layers do. Each is launched as in a decode step: what it reads is older than the launch before.
Peers see no pages and no sinks: torch's flash attention on contiguous keys, split over the SMs, and with `--flashinfer`
its paged decode. Of prefill also cuDNN, FlashInfer and what else is installed; `with FA4` is ours, keys gathered and
sinks in it, by FlashAttention-4 (pip install flash-attn-4). `--variants` also times blocks
that take whole tokens or so many bytes of one, and the copies alone (`attention_variants.py`). Writes
attention.json and attention.md after every case, so that an interrupted run keeps what it has; a case that fails is
noted, not fatal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention_variants
from benchmarks.attention_prefill import prefill_row
from benchmarks.graphs import Call, copy_rate, table, time_call
from benchmarks.kernels import describe_machine
from rose_dist.kernels.paged_attention import DecodeWorkspace, decode

CUDA = torch.device("cuda")
BLOCK = 16
COLD_BYTES = 256 << 20
"""Of keys and values that a graph's calls go through: several times an H200's L2."""
MOST_CALLS = 128


@dataclass(frozen=True)
class Shape:
    """Requests of one length. window: tokens that a query sees; None: all."""

    requests: int
    context: int
    window: int | None = None
    query_heads: int = 64
    key_heads: int = 8
    head_dim: int = 64
    cache: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        text = f"{self.requests} x {self.context}" + (f" window {self.window}" if self.window else "")
        text += f", {self.query_heads}/{self.key_heads} x {self.head_dim}"
        return text + (" fp8" if self.cache.itemsize == 1 else "")

    @property
    def token_bytes(self) -> int:
        """Of a key and a value, all heads."""
        return 2 * self.key_heads * self.head_dim * self.cache.itemsize

    @property
    def seen(self) -> int:
        return self.context if self.window is None else min(self.context, self.window)

    @property
    def bytes(self) -> int:
        """Keys and values that the queries see, queries and results."""
        return self.requests * self.seen * self.token_bytes + self.requests * self.query_heads * self.head_dim * 4


class Decoding:
    """Caches of several layers for one shape, blocks in random order."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        heads = (shape.key_heads, shape.head_dim)
        blocks = shape.requests * -(-shape.context // BLOCK)
        held = blocks * BLOCK * shape.token_bytes
        self.layers = max(1, min(MOST_CALLS, COLD_BYTES // shape.bytes, (24 << 30) // held))
        self.keys, self.values = (
            torch.randn(self.layers, blocks * BLOCK, *heads, device=CUDA, dtype=torch.bfloat16).to(shape.cache)
            for _ in range(2)
        )
        self.q = torch.randn(shape.requests, shape.query_heads, shape.head_dim, device=CUDA, dtype=torch.bfloat16)
        self.sinks = torch.randn(shape.query_heads, device=CUDA)
        self.tables = torch.randperm(blocks, device=CUDA).int().view(shape.requests, -1)
        self.lengths = torch.full((shape.requests,), shape.context, device=CUDA, dtype=torch.int32)
        self.out = torch.empty_like(self.q)
        self.scale = shape.head_dim**-0.5
        self.workspace = DecodeWorkspace.allocate(
            requests=shape.requests, query_heads=shape.query_heads, key_heads=shape.key_heads,
            head_dim=shape.head_dim, context=shape.context, device=CUDA,
        )  # fmt: skip

    def decode(self, layer: int) -> torch.Tensor:
        return decode(
            self.q, self.keys[layer], self.values[layer], self.tables, None, self.lengths, self.sinks,
            window=self.shape.window, block_size=BLOCK, scale=self.scale, out=self.out, workspace=self.workspace,
            early=True,
        )  # fmt: skip

    def error(self, rows: int = 4) -> float:
        """Largest difference from fp32 torch over the largest value, of the first and last requests."""
        out = self.decode(0).float()
        worst = 0.0
        for row in sorted({*range(min(rows, self.shape.requests)), self.shape.requests - 1}):
            positions = torch.arange(self.shape.context - self.shape.seen, self.shape.context, device=CUDA)
            slots = self.tables[row, positions // BLOCK].long() * BLOCK + positions % BLOCK
            group = self.shape.query_heads // self.shape.key_heads
            # Not all operators know FP8, bytes they do.
            k, v = (x[0].view(torch.uint8)[slots].view(x.dtype).float() for x in (self.keys, self.values))
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("hd,khd->hk", self.q[row].float(), k) * self.scale
            weights = torch.cat([scores, self.sinks[:, None]], 1).softmax(-1)[:, :-1]
            wanted = torch.einsum("hk,khd->hd", weights, v)
            worst = max(worst, float((out[row] - wanted).abs().max() / wanted.abs().max()))
        return worst

    def over_layers(self, call: Callable[[int], Any]) -> Call:
        """A call that goes on to the next layer every time."""
        layers = itertools.cycle(range(self.layers))
        return lambda: call(next(layers))

    @cached_property
    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[layers, requests, context, key heads, head_dim]; whose key it is does not matter for the time."""
        shape = (self.layers, self.shape.requests, -1, self.shape.key_heads, self.shape.head_dim)
        return self.keys.view(shape), self.values.view(shape)

    def peers(self, flashinfer: bool) -> Iterator[tuple[str, Callable[[int], Any]]]:
        if self.shape.cache is not torch.bfloat16:
            return
        if self.shape.window is None:
            keys, values = self.contiguous

            def flash(layer: int) -> Any:
                return torch.ops.aten._flash_attention_forward(
                    self.q[:, None], keys[layer], values[layer], None, None, 1, self.shape.context, 0.0, False, False,
                    scale=self.scale,
                )  # fmt: skip

            yield "torch flash, contiguous", flash
        if flashinfer:
            yield "FlashInfer paged", self._flashinfer()

    def _flashinfer(self) -> Callable[[int], Any]:
        import flashinfer  # noqa: PLC0415

        shape, blocks = self.shape, self.tables.shape[1]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=CUDA), "NHD", use_tensor_cores=True
        )
        starts = torch.arange(shape.requests + 1, device=CUDA, dtype=torch.int32) * blocks
        last = torch.full((shape.requests,), (shape.context - 1) % BLOCK + 1, device=CUDA, dtype=torch.int32)
        wrapper.plan(
            starts, self.tables.flatten(), last, shape.query_heads, shape.key_heads, shape.head_dim, BLOCK,
            window_left=-1 if shape.window is None else shape.window - 1, q_data_type=torch.bfloat16,
        )  # fmt: skip
        pages = (self.layers, -1, BLOCK, shape.key_heads, shape.head_dim)
        keys, values = self.keys.view(pages), self.values.view(pages)
        return lambda layer: wrapper.run(self.q, (keys[layer], values[layer]))


def decode_row(shape: Shape, rate: float, flashinfer: bool, variants: bool) -> dict[str, Any]:
    """One case; `rate` is the copy rate in bytes a microsecond."""
    case = Decoding(shape)
    row: dict[str, Any] = {"what": "decode", "shape": str(shape), "error": case.error()}
    calls = max(case.layers, 4)
    own = time_call(case.over_layers(case.decode), calls=calls)
    row |= {"us": own, "TB/s": shape.bytes / own / 1e6, "of copy rate": shape.bytes / own / rate}
    for name, variant in attention_variants.of(shape.cache.itemsize).items() if variants else ():
        with variant(case):
            row[name] = time_call(case.over_layers(case.decode), calls=calls)
    for name, call in case.peers(flashinfer):
        try:
            row[name] = time_call(case.over_layers(call), calls=calls)
        except Exception as error:
            traceback.print_exc()
            row[name] = f"failed: {str(error)[:80]}"
    return row


def cases(rate: float, flashinfer: bool, variants: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    shapes = [
        Shape(requests, context, window)
        for window in (None, 128)
        for context in ((1024, 8192, 32768) if window is None else (1024,))
        for requests in ((1, 8, 32, 64, 128) if context == 1024 else (1, 8, 32, 128))
    ]
    shapes += [Shape(1, 131072), Shape(1, 1024, None, 32, 4), Shape(1, 8192, None, 8, 1)]
    shapes += [Shape(requests, 8192, None, 64, 4, 128) for requests in (1, 32)]
    fp8 = torch.float8_e4m3fn
    shapes += [Shape(requests, context, cache=fp8) for context in (1024, 8192) for requests in (1, 32, 128)]
    shapes += [Shape(requests, 1024, 128, cache=fp8) for requests in (1, 128)]
    shapes += [Shape(32, 8192, None, 8, 1), Shape(32, 8192, None, 64, 8, 128)]
    for shape in shapes:
        yield f"decode {shape}", partial(decode_row, shape, rate, flashinfer, variants)
    for tokens, prefix, sequences in ((1024, 0, 1), (4000, 0, 1), (1024, 8192, 1), (1024, 0, 8)):
        for window in (None, 128):
            yield f"prefill {tokens} {prefix}", partial(prefill_row, tokens, prefix, sequences, window, flashinfer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/h200", type=Path)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument(
        "--variants", action="store_true", help="whole tokens or other bytes of one a block; copies alone"
    )
    parser.add_argument("--flashinfer", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rate = copy_rate()
    result: dict[str, Any] = {
        "command": "python " + " ".join(["-m benchmarks.attention", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "copy_tb_s": rate / 1e6,
        "cases": [],
    }
    for name, case in cases(rate, arguments.flashinfer, arguments.variants):
        if arguments.only not in name:
            continue
        try:
            row = case()
        except Exception as error:
            traceback.print_exc()
            row = {"what": name, "failed": f"{type(error).__name__}: {str(error)[:120]}"}
        print(row, flush=True)
        result["cases"].append(row)
        (arguments.out / "attention.json").write_text(json.dumps(result, indent=1))
        (arguments.out / "attention.md").write_text(page(result))
        torch.cuda.empty_cache()


def page(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"# Paged attention on {machine['gpu']}\n\n"
        f"`{result['command']}`, {result['date']}, driver {machine['driver']}, torch {machine['torch']}. "
        f"Copy rate of this run: {result['copy_tb_s']:.2f} TB/s.\n\n"
        "Times are us a call in a CUDA graph, medians. A shape is requests x context, query heads/key heads x "
        "head_dim; error is the largest difference from fp32 over the largest value.\n\n" + table(result["cases"])
    )


if __name__ == "__main__":
    main()
