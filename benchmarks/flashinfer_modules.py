"""FlashInfer's kernels (flashinfer-python 0.7), compiled by nvcc before a benchmark needs them.

    python -m benchmarks.flashinfer_modules [--limit SECONDS] [MoeAlltoAll …]

Each is compiled in a process of its own, by as many cores as there are, into FlashInfer's cache; what is there already
takes a few seconds. Started in the background before others, it takes no time from them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

MODULES = {
    "custom all-reduce": "gen_vllm_comm_module",
    "fused all-reduce": "gen_trtllm_comm_module",
    "MoeAlltoAll": "gen_moe_alltoall_module",
}
BUILD = "import sys; from flashinfer.jit import comm; getattr(comm, sys.argv[1])().build_and_load()"


class Builds:
    """Compilations under way."""

    def __init__(self, names: Iterable[str]) -> None:
        self.start = time.monotonic()
        # One file of many kernels takes minutes on one core.
        environment = os.environ | {"NVCC_APPEND_FLAGS": "--split-compile=0"}
        self.processes = {
            name: subprocess.Popen(
                [sys.executable, "-c", BUILD, MODULES[name]], env=environment, text=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            )
            for name in names
        }  # fmt: skip

    def wait(self, limit: float) -> dict[str, str]:
        """By name, what was wrong, or nothing; those that take longer than `limit` seconds from the start are ended."""
        return {name: self._problem(process, limit) for name, process in self.processes.items()}

    def _problem(self, process: subprocess.Popen[str], limit: float) -> str:
        try:
            _, said = process.communicate(timeout=max(0.0, self.start + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its compilers too
            process.wait()
            return f"not compiled within {limit:.0f} s"
        lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()[-1:]
        return f"can't be compiled or loaded: {lines[0][:200]}" if process.returncode and lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODULES), help=", ".join(MODULES))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds")
    arguments = parser.parse_args()
    builds = Builds(arguments.names)
    for name, problem in builds.wait(arguments.limit).items():
        print(f"{name}: {problem or 'compiled'} ({time.monotonic() - builds.start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
