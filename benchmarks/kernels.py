"""Times every kernel in CUDA graphs against the copy rate of the same run and against what else there is.

    python benchmarks/kernels.py [--out benchmarks/results/h200] [--only TEXT] [--no-compile] [--flashinfer DIR]

Writes kernels.json and kernels.md after every case, so that an interrupted run keeps what it has. A time is the median
over graph replays divided by the calls in the graph; the spread is the distance from the 10th to the 90th percentile.
Peers: eager torch, torch.compile, quack if it can be imported, and FlashInfer's kernels if `--flashinfer` names a
folder with its `norm` and `silu_and_mul` modules built as fi_norm.so and fi_silu.so.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from rose_dist.kernels import jit, launch, probe
from rose_dist.kernels.embedding import embed
from rose_dist.kernels.formats import FORMATS, FP8, MXFP8, NVFP4
from rose_dist.kernels.qk_norm import PagedCache, qk_norm, qk_norm_rope_cache, rotate
from rose_dist.kernels.qk_norm import Rotary as Pairs
from rose_dist.kernels.quantize import dequantize, quantize
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized
from rose_dist.kernels.routing import Router, Score, route
from rose_dist.kernels.swiglu import Gate, Rows, activate_quantized, clamped_swiglu, silu_mul
from rose_dist.kernels.sync import WaitReport

EPS = 1e-5
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
Call = Callable[[], Any]


@dataclass
class Time:
    """Microseconds a call."""

    median: float
    spread: float


@dataclass
class Case:
    """One kernel on one shape: the call, what it must move, and its peers."""

    kernel: str
    shape: str
    call: Call
    bytes: int = 0
    """Least traffic: every input read and every output written once."""
    peers: dict[str, Call] = field(default_factory=dict)
    compiled: Call | None = None
    """To be wrapped in torch.compile."""


def time_call(call: Call, budget_s: float = 0.25) -> Time:
    """Median over replays of a graph of several calls."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    calls = max(2, min(50, int(0.02 / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(calls)]
    del kept
    samples = []
    until = time.perf_counter() + budget_s
    while len(samples) < 10 or (time.perf_counter() < until and len(samples) < 200):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / calls)
    deciles = statistics.quantiles(samples[2:], n=10)
    return Time(statistics.median(samples[2:]), deciles[-1] - deciles[0])


def copy_rate(size: int) -> float:
    """TB/s of a device-to-device copy that moves `size` bytes, read and written counted."""
    source = torch.randn(size // 8, device=CUDA)
    target = torch.empty_like(source)
    samples = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return size / statistics.median(samples[2:]) / 1e6


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(BF16)


# --- Cases ------------------------------------------------------------------------------------------------------------


def norms(peers: Peers) -> Iterator[Case]:
    for rows, hidden in ((1, 2880), (64, 2880), (64, 7168), (65536, 2880), (32768, 7168), (1 << 20, 128)):
        x, residual, weight = bf16(rows, hidden), bf16(rows, hidden), bf16(hidden)
        size, shape = rows * hidden * 2, f"{rows}x{hidden}"

        def plain(x: Any = x, weight: Any = weight, hidden: int = hidden) -> Any:
            return F.rms_norm(x, (hidden,), weight, EPS)

        def added(x: Any = x, residual: Any = residual, weight: Any = weight, hidden: int = hidden) -> Any:
            total = x + residual
            return F.rms_norm(total, (hidden,), weight, EPS), total

        yield Case(
            "rms_norm", shape, functools.partial(rms_norm, x, weight, EPS), 2 * size,
            {"torch": plain, **peers.norm(x, weight)}, plain,
        )  # fmt: skip
        yield Case(
            "add_rms_norm", shape, functools.partial(add_rms_norm, x, residual, weight, EPS), 4 * size,
            {"torch": added, **peers.add_norm(x, residual, weight)}, added,
        )  # fmt: skip
        if hidden % 128 == 0 or hidden == 2880:
            for fmt in (FP8, MXFP8):
                fused = functools.partial(rms_norm_quantized, x, weight, EPS, fmt, residual=residual)

                def apart(x: Any = x, residual: Any = residual, weight: Any = weight, fmt: Any = fmt) -> Any:
                    normed, total = add_rms_norm(x, residual, weight, EPS)
                    return quantize(normed, fmt), total

                moved = int(3.5 * size) + rows * fmt.blocks(hidden) * fmt.scale.bytes
                yield Case(f"add_rms_norm_{fmt}", shape, fused, moved, {"ours apart": apart})
            fused = functools.partial(rms_norm_quantized, x, weight, EPS, FP8)
            two = functools.partial(lambda x, weight: quantize(rms_norm(x, weight, EPS), FP8), x, weight)
            moved = int(1.5 * size) + rows * FP8.blocks(hidden) * 4
            yield Case("rms_norm_fp8", shape, fused, moved, {"ours apart": two})


def qk_norms(peers: Peers) -> Iterator[Case]:
    for tokens, query_heads, key_heads, head_dim in (
        (1, 64, 8, 64), (64, 64, 8, 64), (14564, 64, 8, 64), (15421, 64, 4, 128), (43691, 16, 8, 256),
    ):  # fmt: skip
        heads = query_heads + 2 * key_heads
        fused = bf16(tokens, heads, head_dim)
        q, k, v = fused[:, :query_heads], fused[:, query_heads:-key_heads], fused[:, -key_heads:]
        weight = bf16(head_dim)
        rows = bf16(tokens * (query_heads + key_heads), head_dim)
        cos, sin = (torch.randn(tokens, head_dim // 2, device=CUDA) for _ in range(2))
        positions = torch.randperm(tokens, device=CUDA)
        blocks = -(-tokens // 64)
        slots = torch.randperm(blocks * 64, device=CUDA)[:tokens]
        cache = PagedCache(bf16(blocks, 64, key_heads, head_dim), bf16(blocks, 64, key_heads, head_dim), slots)
        size = tokens * (query_heads + key_heads) * head_dim * 2
        shape = f"{tokens}x({query_heads}+{key_heads})x{head_dim}"

        def generic(rows: Any = rows, weight: Any = weight, head_dim: int = head_dim) -> Any:
            return F.rms_norm(rows, (head_dim,), weight, EPS)

        yield Case(
            "qk_norm", shape, functools.partial(qk_norm, q, k, weight, weight, EPS), 2 * size,
            {"torch": generic, **peers.norm(rows, weight)}, generic,
        )  # fmt: skip
        for norm in ((weight, weight, EPS), None):
            call = functools.partial(qk_norm_rope_cache, q, k, v, cache, cos, sin, positions=positions, norm=norm)

            def apart(
                q: Any = q, k: Any = k, v: Any = v, cache: Any = cache, cos: Any = cos, sin: Any = sin,
                positions: Any = positions, norm: Any = norm, both: Any = fused[:, :-key_heads],
            ) -> None:  # fmt: skip
                if norm:
                    qk_norm(q, k, *norm)
                rotate(both, cos[positions], sin[positions], Pairs.NEOX)
                cache.keys.view(-1, *k.shape[1:]).index_copy_(0, cache.slots, k)
                cache.values.view(-1, *v.shape[1:]).index_copy_(0, cache.slots, v)

            moved = tokens * heads * head_dim * 4 + tokens * head_dim * 4
            yield Case(
                "qk_norm_rope_cache" if norm else "rope_cache", shape, call, moved, {"ours apart + torch": apart}
            )


def activations(peers: Peers) -> Iterator[Case]:
    for rows, columns in ((4, 2880), (64, 2880), (32768, 2880), (65536, 2048)):
        x, bias = bf16(rows, 2 * columns), bf16(32, 2 * columns)
        which = Rows(experts=torch.arange(rows, device=CUDA, dtype=torch.int32) * 32 // max(rows, 32))
        size, shape = rows * columns * 2, f"{rows}x{columns}"

        def silu(x: Any = x) -> Any:
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up

        def swiglu(x: Any = x, bias: Any = bias, experts: Any = which.experts) -> Any:
            wide = x + bias[experts]
            gate, linear = wide[:, 0::2].clamp(max=7.0), wide[:, 1::2].clamp(-7.0, 7.0)
            return gate * torch.sigmoid(gate * 1.702) * (linear + 1)

        clamped = functools.partial(clamped_swiglu, x, limit=7.0, bias=bias, rows=which)
        yield Case("clamped_swiglu + bias", shape, clamped, 3 * size, {"torch": swiglu}, swiglu)
        plain = functools.partial(silu_mul, x)
        yield Case("silu_mul", shape, plain, 3 * size, {"torch": silu, **peers.silu(x)}, silu)
        for name, gate, one in (
            ("clamped_swiglu + bias", Gate.CLAMPED_SWIGLU, clamped),
            ("silu_mul", Gate.SILU, plain),
        ):
            options = {"limit": 7.0, "bias": bias, "rows": which} if gate is Gate.CLAMPED_SWIGLU else {}
            fused = functools.partial(activate_quantized, gate, x, FP8, **options)
            apart = functools.partial(lambda one: quantize(one(), FP8), one)
            moved = int(2.5 * size) + rows * FP8.blocks(columns) * 4
            yield Case(f"{name} + fp8", shape, fused, moved, {"ours apart": apart})


def quantisers(peers: Peers) -> Iterator[Case]:
    for rows, columns in ((64, 2880), (65536, 2880), (32768, 7168)):
        x, shape = bf16(rows, columns), f"{rows}x{columns}"
        for fmt in FORMATS.values():
            scale = torch.ones(1, device=CUDA) if fmt is NVFP4 else None
            codes, scales = quantize(x, fmt, global_scale=scale)
            moved = rows * columns * 2 + codes.nbytes + scales.nbytes

            def torch_fp8(x: Any = x, columns: int = columns) -> Any:
                blocks = F.pad(x, (0, -columns % 128)).view(x.shape[0], -1, 128).float()
                scales = blocks.abs().amax(-1).clamp(min=1e-10) / 448
                return (blocks / scales[..., None]).to(torch.float8_e4m3fn), scales

            call = functools.partial(quantize, x, fmt, global_scale=scale)
            yield Case(f"quantize {fmt}", shape, call, moved, {}, torch_fp8 if fmt is FP8 else None)
            call = functools.partial(dequantize, codes, scales, fmt, global_scale=scale)
            yield Case(f"dequantize {fmt}", shape, call, moved)


def routers(peers: Peers) -> Iterator[Case]:
    for experts, router, bias in (
        (128, Router(4), None),
        (256, Router(8, Score.SIGMOID, groups=8, top_groups=4, scale=2.5), torch.randn(256, device=CUDA)),
        (256, Router(8), None),
    ):
        for tokens in (1, 8, 32, 128, 4096):
            logits = torch.randn(tokens, experts, device=CUDA)
            if bias is None:
                logits = logits.to(BF16)

            def topk(logits: Any = logits, k: int = router.k) -> Any:
                values, ids = logits.topk(k)
                return ids, values.softmax(-1)

            for counts in (False, True):
                call = functools.partial(route, logits, router, bias=bias, counts=counts)
                name = f"route {router.score.value}{' + counts' if counts else ''}"
                same = {"torch (top-k, softmax)": topk} if router.score is not Score.SIGMOID and not counts else {}
                yield Case(name, f"{tokens}x{experts} top {router.k}", call, 0, same, topk if same else None)


def embeddings(peers: Peers) -> Iterator[Case]:
    for tokens, hidden in ((1, 2880), (64, 2880), (65536, 2880)):
        table, ids = bf16(201088, hidden), torch.randint(201088, (tokens,), device=CUDA)
        plain = functools.partial(F.embedding, ids, table)
        call = functools.partial(embed, ids, table)
        yield Case("embed", f"{tokens}x{hidden}", call, 2 * tokens * hidden * 2, {"torch": plain})


# --- Peers ------------------------------------------------------------------------------------------------------------


class Peers:
    """Kernels of other libraries, where they can be loaded."""

    def __init__(self, flashinfer: str | None) -> None:
        self.found: list[str] = []
        self._norm = self._silu = self._quack = None
        if flashinfer:
            try:
                import tvm_ffi  # noqa: PLC0415

                self._norm = tvm_ffi.load_module(f"{flashinfer}/fi_norm.so")
                self._silu = tvm_ffi.load_module(f"{flashinfer}/fi_silu.so")
                self.found.append("FlashInfer 0.7.2.post1")
            except Exception as error:
                print("no FlashInfer:", error)
        try:
            from quack.rmsnorm import rmsnorm_fwd  # noqa: PLC0415

            self._quack = rmsnorm_fwd
            self.found.append("quack 0.6.5")
        except Exception as error:
            print("no quack:", error)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Call]:
        calls: dict[str, Call] = {}
        if self._norm:
            module = self._norm

            def flashinfer() -> torch.Tensor:
                out = torch.empty_like(x)
                module["rmsnorm"](out, x, weight, EPS, True)
                return out

            calls["FlashInfer"] = flashinfer
        if self._quack:
            calls["quack"] = functools.partial(self._quack, x, weight, eps=EPS)
        return calls

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> dict[str, Call]:
        calls: dict[str, Call] = {}
        if self._norm:
            y, other = x.clone(), residual.clone()
            calls["FlashInfer"] = functools.partial(self._norm["fused_add_rmsnorm"], y, other, weight, EPS, True)
        if self._quack:
            calls["quack"] = functools.partial(self._quack, x, weight, residual=residual, eps=EPS)
        return calls

    def silu(self, x: torch.Tensor) -> dict[str, Call]:
        if not self._silu:
            return {}
        module = self._silu

        def flashinfer() -> torch.Tensor:
            out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
            module["silu_and_mul"](out, x, True)
            return out

        return {"FlashInfer": flashinfer}


# --- Measurements of another kind -------------------------------------------------------------------------------------


def barriers() -> dict[str, float]:
    """us a grid barrier, by blocks: the difference of two launches with different numbers of them."""
    arch = launch.device(torch.zeros(1, device=CUDA)).arch
    report = WaitReport({probe.BARRIER_STAGE: "the grid barrier"})
    result = {}
    for blocks in (16, 66, torch.cuda.get_device_properties(0).multi_processor_count):
        times = []
        for repeats in (100, 1100):
            loaded = jit.load(probe.GridBarriers(arch, repeats, work=False))
            counter = torch.zeros(1, dtype=torch.int32, device=CUDA)
            slots = torch.zeros(blocks, dtype=torch.int32, device=CUDA)
            samples = []
            for attempt in range(9):
                base = attempt * blocks * repeats
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                launch.run(loaded, counter, counter, base, slots, report.address, 10**10, blocks)
                end.record()
                end.synchronize()
                samples.append(begin.elapsed_time(end) * 1e3)
            report.check()
            times.append(statistics.median(samples))
        result[str(blocks)] = (times[1] - times[0]) / 1000
    return result


COLD_START = """
import time
start = time.perf_counter()
import torch
torch.zeros(1, device="cuda")
imported = time.perf_counter()
from benchmarks import kernels
loaded = time.perf_counter()
count = kernels.gpt_oss_variants()
torch.cuda.synchronize()
done = time.perf_counter()
print("RESULT", imported - start, loaded - imported, done - loaded, count)
"""


def gpt_oss_variants() -> int:
    """Call everything that GPT-OSS-120b uses, at every range of rows. Returns how many kernels that loads."""
    for rows in (1, 200, 2000):
        x, weight = bf16(rows, 2880), bf16(2880)
        rms_norm(x, weight, EPS)
        add_rms_norm(x, x, weight, EPS)
        fused = bf16(rows, 80, 64)
        cos = torch.randn(rows, 32, device=CUDA)
        slots = torch.arange(rows, device=CUDA)
        cache = PagedCache(bf16(rows, 8, 64), bf16(rows, 8, 64), slots)
        qk_norm_rope_cache(fused[:, :64], fused[:, 64:72], fused[:, 72:], cache, cos, cos, positions=slots)
        experts = torch.zeros(rows, dtype=torch.int32, device=CUDA)
        clamped_swiglu(bf16(rows, 5760), limit=7.0, bias=bf16(4, 5760), rows=Rows(experts=experts))
        activate_quantized(Gate.CLAMPED_SWIGLU, bf16(rows, 5760), FP8, limit=7.0)
        rms_norm_quantized(x, weight, EPS, FP8, residual=x)
        quantize(x, FP8)
        embed(slots, bf16(2000, 2880))
        route(bf16(rows, 128), Router(4))
        route(bf16(rows, 128), Router(4), counts=True)
    return len(jit._loaded)


def cold_start(folder: Path) -> dict[str, Any]:
    """Seconds until all variants that GPT-OSS uses have run once, in a fresh process: compiled, then from disk."""
    result = {}
    command = [sys.executable, "-c", COLD_START]
    environment = {**os.environ, "ROSE_KERNEL_CACHE": str(folder)}
    for name in ("compiled", "from disk"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
        if line is None:
            return {"failed": done.stderr[-2000:]}
        _, torch_s, import_s, load_s, count = line.split()
        seconds = {"torch_s": float(torch_s), "import_s": float(import_s), "load_s": float(load_s)}
        result[name] = {**seconds, "kernels": int(count)}
    return result


# --- Running and writing ----------------------------------------------------------------------------------------------


GROUPS = (norms, qk_norms, activations, quantisers, routers, embeddings)


def measure(case: Case, compile_peers: bool) -> dict[str, Any]:
    """All times of one case; a peer that fails is noted, not fatal."""
    own = time_call(case.call)
    row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "bytes": case.bytes, "us": asdict(own)}
    row["tb_s"] = case.bytes / own.median / 1e6
    row["peers"] = {}
    calls = dict(case.peers)
    if case.compiled is not None and compile_peers:
        torch._dynamo.reset()
        calls["torch.compile"] = torch.compile(case.compiled, dynamic=False)
    for name, call in calls.items():
        try:
            row["peers"][name] = asdict(time_call(call, 0.15))
        except Exception as error:
            row["peers"][name] = {"failed": str(error)[:200]}
    return row


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine, copies = result["machine"], result["copy_tb_s"]
    lines = [
        f"# Kernels on {machine['gpu']}",
        "",
        f"`{result['command']}`, {result['date']}, driver {machine['driver']}, torch {machine['torch']};",
        f"peers: {machine['peers']}.",
        "",
        f"Copy rate in this run (bytes read and written): {copies['4 GiB']:.2f} TB/s for 4 GiB of traffic, "
        f"{copies['512 MiB']:.2f} TB/s for 512 MiB; shares are of the first.",
        "Times are us a call in a CUDA graph, median (spread p10-p90); a peer's factor is its time over ours.",
        "",
        "| kernel | shape | us | TB/s | of copy rate | peers, us |",
        "|---|---|---|---|---|---|",
    ]
    rate = result["copy_tb_s"]["4 GiB"]
    for row in result["cases"]:
        if "failed" in row:
            lines.append(f"| {row['kernel']} | {row['shape']} | failed: {row['failed'][:80]} | | | |")
            continue
        big = row["bytes"] >= 1 << 28
        own = row["us"]["median"]
        peers = ", ".join(
            f"{name} {t['median']:.2f} ({t['median'] / own:.2f}x)" if "median" in t else f"{name} failed"
            for name, t in row["peers"].items()
        )
        speed = f"{row['tb_s']:.2f} | {row['tb_s'] / rate:.0%}" if big else " | "
        us = f"{own:.2f} ({row['us']['spread']:.2f})"
        lines.append(f"| {row['kernel']} | {row['shape']} | {us} | {speed} | {peers} |")
    extras = {"Grid barrier, us by blocks": "barrier_us", "Cold start of GPT-OSS's variants, s": "cold_start"}
    for title, key in extras.items():
        lines += ["", f"{title}: `{json.dumps(result.get(key))}`"]
    return "\n".join(lines) + "\n"


def describe_machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    return {"gpu": torch.cuda.get_device_name(), "driver": driver[0] if driver else "?", "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/h200", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--flashinfer")
    parser.add_argument("--compile-until", type=float, default=150.0, help="seconds after which it is left out")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    started = time.perf_counter()
    peers = Peers(arguments.flashinfer)
    result: dict[str, Any] = {
        "command": "python " + " ".join(["benchmarks/kernels.py", *(a for a in sys.argv[1:] if not a.startswith("/"))]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {**describe_machine(), "peers": ", ".join(peers.found)},
        "copy_tb_s": {"4 GiB": copy_rate(4 << 30), "1 GiB": copy_rate(1 << 30), "512 MiB": copy_rate(512 << 20)},
        "cases": [],
    }

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - started, 1)
        (arguments.out / "kernels.json").write_text(json.dumps(result, indent=1))
        (arguments.out / "kernels.md").write_text(table(result))

    for group in GROUPS:
        for case in group(peers):
            if arguments.only not in case.kernel:
                continue
            compile_peers = not arguments.no_compile and time.perf_counter() - started < arguments.compile_until
            try:
                row = measure(case, compile_peers)
                print(
                    f"{row['kernel']:32} {row['shape']:20} {row['us']['median']:9.2f} us {row['tb_s']:6.2f} TB/s",
                    flush=True,
                )
            except Exception as error:
                traceback.print_exc()
                row = {"kernel": case.kernel, "shape": case.shape, "failed": f"{type(error).__name__}: {error}"}
            result["cases"].append(row)
        save()
    if not arguments.only:
        for key, function in (("barrier_us", barriers), ("cold_start", lambda: cold_start(arguments.out / ".cache"))):
            try:
                result[key] = function()
            except Exception:
                traceback.print_exc()
            print(key, result.get(key), flush=True)
    save()
    print(table(result))


if __name__ == "__main__":
    main()
