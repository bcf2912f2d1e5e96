"""What the compiler makes of kernels, each compiled once in a run of pytest, whichever of its processes asks first."""

from __future__ import annotations

import hashlib
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from rose_dist.kernels import jit
from rose_dist.kernels.jit import Binary, Kernel


@dataclass(frozen=True)
class Binaries:
    folder: Path

    @classmethod
    def of_run(cls, paths: pytest.TempPathFactory) -> Binaries:
        # A worker of xdist has a folder of its own in the run's.
        base = paths.getbasetemp()
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "binaries"
        folder.mkdir(exist_ok=True)
        return cls(folder)

    def of(self, kernel: Kernel) -> Binary:
        name = hashlib.sha256(f"{type(kernel).__qualname__} {kernel!r}".encode()).hexdigest()
        path = self.folder / name
        if not path.exists():
            compiled = jit.compile_binary(kernel)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(pickle.dumps((compiled.ptx, compiled.cubin, compiled.seconds)))
            new.replace(path)
        return Binary(kernel, *pickle.loads(path.read_bytes()))
