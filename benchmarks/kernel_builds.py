"""Compiles what a benchmark is about to launch, by all CPU cores, before it times anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.kernel_cases import Case
from benchmarks.kernel_variants import holding
from rose_dist.kernels import jit


def kernels_of(cases: Iterable[Case]) -> list[jit.Kernel]:
    """What the cases, their variants and those peers that are kernels of this package load. They are called, but what
    they load does nothing.
    """
    found: dict[jit.Kernel, None] = {}

    def load(kernel: jit.Kernel) -> jit.Launcher:
        found[kernel] = None
        return lambda *_: None

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # it fails again where it is timed, and is noted there
            print("not compiled ahead:", error, file=sys.stderr)

    with holding(jit, "load", load):
        for case in cases:
            attempt(case.call)
            for variant in case.variants.values():
                with variant():
                    attempt(case.call)
            for name, call in case.peers.items():
                if not name.startswith("torch"):
                    attempt(call)
    return list(found)


def build(kernels: list[jit.Kernel]) -> None:
    """To disk, where they are not there yet."""
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(os.cpu_count() or 1, len(kernels))), context) as pool:
        list(pool.map(jit.build, kernels, chunksize=2))
