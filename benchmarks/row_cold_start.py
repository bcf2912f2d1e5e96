"""How long GPT-OSS's row kernels take until each has run once, for `kernels.py`. Without a GPU: `cold_start.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import torch

from benchmarks.kernel_cases import CUDA, EPS, bf16
from rose_dist.kernels import jit
from rose_dist.kernels.embedding import embed_with_angles
from rose_dist.kernels.formats import FP8
from rose_dist.kernels.qk_norm import PagedCache, qk_norm_rope_cache
from rose_dist.kernels.quantize import quantize
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized
from rose_dist.kernels.routing import Router, route
from rose_dist.kernels.swiglu import Gate, Rows, activate_quantized, clamped_swiglu

COLD_START = """
import time
start = time.perf_counter()
import torch
torch.zeros(1, device="cuda")
imported = time.perf_counter()
from benchmarks import row_cold_start
loaded = time.perf_counter()
count = row_cold_start.gpt_oss_variants()
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
        embed_with_angles(slots, slots, bf16(2000, 2880), cos, cos)
        route(bf16(rows, 128), Router(4))
        route(bf16(rows, 128), Router(4), counts=True)
    return len(jit._loaded)


def cold_start() -> dict[str, Any]:
    """Seconds until all variants that GPT-OSS uses have run once, in a fresh process: compiled, then from disk."""
    with tempfile.TemporaryDirectory() as folder:
        return _cold_start({**os.environ, "ROSE_KERNEL_CACHE": folder})


def _cold_start(environment: dict[str, str]) -> dict[str, Any]:
    result = {}
    command = [sys.executable, "-c", COLD_START]
    for name in ("compiled", "from disk"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
        if line is None:
            return {"failed": done.stderr[-2000:]}
        _, torch_s, import_s, load_s, count = line.split()
        seconds = {"torch_s": float(torch_s), "import_s": float(import_s), "load_s": float(load_s)}
        result[name] = {**seconds, "kernels": int(count)}
    return result
