"""How long the kernels of GPT-OSS 120b on one GPU take to be ready: compiled, and from the disk cache. Needs no GPU.

    python -m benchmarks.cold_start [--arch sm_90a]

Each time in a fresh process. On a machine without a GPU the loader stops before it hands code to the driver, which
takes a few milliseconds a kernel at its first launch (`kernels.py` measures the row kernels with that).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGETS = {"compiled": 15.0, "from disk": 1.0}
CHILD = "from benchmarks import cold_start; cold_start.child('{arch}')"


def used(arch_name: str) -> list[Any]:
    """The registry's kernels that the model launches, of every range of rows, for a bf16 and an fp8 cache."""
    from rose_dist.kernels import registry  # noqa: PLC0415 - it loads the compiler
    from rose_dist.kernels.arch import ARCHS  # noqa: PLC0415

    return [kernel for kernel in registry.kernels(ARCHS[arch_name]) if _serves(type(kernel).__name__, kernel)]


def _serves(name: str, kernel: Any) -> bool:
    if name == "RMSNorm":
        return kernel.quantized is None and kernel.tiling.row_vectors * kernel.count == 2880
    if name == "QKNormRope":
        return kernel.head_dim == 64 and kernel.cache is not None and kernel.rotary.name == "NEOX"
    if name == "Embed":
        return kernel.tiling.row_vectors * kernel.vector_bytes == 2 * 2880
    if name in ("Route", "MapExperts"):
        return kernel.experts == 128 and getattr(kernel, "k", 4) == 4
    return name in ("ExpertLinear", "ExpertGemm", "SmallLinear") or (
        name in ("DecodeAttention", "WholeTokenAttention") and kernel.head_dim == 64
    )


def child(arch_name: str) -> None:
    """Load everything in this process and print what it took."""
    start = time.perf_counter()
    from rose_dist.kernels import jit  # noqa: PLC0415

    kernels = used(arch_name)
    imported, before = time.perf_counter(), time.process_time()
    for kernel in kernels:
        jit.load(kernel)
    done = time.perf_counter()
    times = {"import_s": imported - start, "load_s": done - imported, "load_cpu_s": time.process_time() - before}
    print("RESULT", json.dumps({"kernels": len(kernels), **times}))


def measure(arch_name: str, folder: Path) -> dict[str, Any]:
    """Both times, with `folder` as an empty cache."""
    result = {}
    environment = {**os.environ, "ROSE_KERNEL_CACHE": str(folder)}
    for name in TARGETS:
        command = [sys.executable, "-c", CHILD.format(arch=arch_name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
        if line is None:
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        result[name] = json.loads(line.removeprefix("RESULT"))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="sm_90a")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, times in measure(arguments.arch, Path(folder)).items():
            print(
                f"{name}: {times['kernels']} kernels in {times['load_s']:.2f} s (at most {TARGETS[name]:.0f} s), "
                f"of them {times['load_cpu_s']:.2f} s of CPU; imports before that {times['import_s']:.2f} s"
            )


if __name__ == "__main__":
    main()
