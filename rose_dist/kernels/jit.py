"""Compiles kernels, once, and keeps them: in memory by instance, on disk by content.

A kernel is a frozen dataclass derived from `Kernel`; its fields are its compile-time constants. `load(kernel)` gives a
callable that takes plain integers and floats in the order of `__call__` (tensors as `data_ptr()`, the stream as
`cuda_stream`): 0.3 us a call, and no dtype that DLPack lacks stands in the way.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import torch

from rose_dist.kernels.arch import Arch
from rose_dist.kernels.errors import CompileInCaptureError

log = logging.getLogger(__name__)

Launcher = Callable[..., None]
"""A loaded kernel: `launcher(*integers_and_floats, stream)`."""

_ENTRY = "rose_kernel"
_loaded: dict[Kernel, Launcher] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """Base of all kernels. Subclasses define `__call__` with annotated scalar parameters, the last a `Stream`."""

    arch: Arch
    tvm_ffi: ClassVar[bool] = True
    """Whether it is launched through TVM-FFI, the quick way, and kept on disk."""

    def arguments(self) -> list[Any]:
        """Placeholders to trace `__call__` with, one a parameter."""
        function = inspect.unwrap(type(self).__call__)
        hints = get_type_hints(function)
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        return [_placeholder(hints[name]) for name in names]

    @property
    def label(self) -> str:
        """Class and constants, for logs and tables."""
        constants = (f"{name}={value}" for name, value in vars(self).items() if name != "arch")
        return f"{type(self).__name__}[{self.arch}]({', '.join(constants)})".replace("torch.", "")


@dataclass(frozen=True)
class Binary:
    """A compiled kernel with what the compiler wrote."""

    kernel: Kernel
    ptx: str
    cubin: bytes = field(repr=False)
    seconds: float


def load(kernel: Kernel) -> Launcher:
    """The kernel, ready to launch on GPUs of its arch: from memory, else from disk, else compiled.

    Raises `CompileInCaptureError` inside CUDA graph capture unless the kernel is in memory.
    """
    launcher = _loaded.get(kernel)
    if launcher is not None:
        return launcher
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CompileInCaptureError(f"{kernel.label} was not loaded before graph capture: run the step once first")
    with _lock:
        if kernel not in _loaded:
            _loaded[kernel] = _load(kernel)
        return _loaded[kernel]


def build(kernel: Kernel) -> None:
    """Compile to disk unless it is there; needs no GPU, so that many processes can do it before one loads them all."""
    path = cache_path(kernel)
    if kernel.tvm_ffi and not path.exists():
        _write(path, _compile(kernel))


def compile_binary(kernel: Kernel) -> Binary:
    """Compile afresh and return PTX and cubin; needs no GPU and touches no cache."""
    with tempfile.TemporaryDirectory(prefix="rose-kernel-") as folder:
        start = time.perf_counter()
        compiled = _compile(kernel, f"--keep-ptx --keep-cubin --dump-dir {folder}")
        seconds = time.perf_counter() - start
        return Binary(kernel, compiled.artifacts.PTX, compiled.artifacts.CUBIN, seconds)


def cache_folder() -> Path:
    """`ROSE_KERNEL_CACHE`, else `rose_dist/kernels` in the user's cache folder."""
    named = os.environ.get("ROSE_KERNEL_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rose_dist" / "kernels"


def cache_path(kernel: Kernel) -> Path:
    """Where the kernel's object file is kept: named by everything that decides its content."""
    module = sys.modules[type(kernel).__module__]
    folders = {Path(__file__).parent, Path(inspect.getfile(module)).parent}
    parts = [repr(kernel), type(kernel).__qualname__, _versions(), *sorted(_source_digest(f) for f in folders)]
    return cache_folder() / f"{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:40]}.o"


def _placeholder(hint: Any) -> Any:
    from rose_dist.kernels import dsl  # noqa: PLC0415 - it loads the compiler

    return dsl.cute.runtime.make_fake_stream() if hint is dsl.Stream else hint(1)


def _compile(kernel: Kernel, options: str = "") -> Any:
    from rose_dist.kernels import dsl  # noqa: PLC0415 - it loads the compiler

    options = f"--gpu-arch {kernel.arch} {'--enable-tvm-ffi' if kernel.tvm_ffi else ''} {options}"
    return dsl.cute.compile(kernel, *kernel.arguments(), options=options)


def _load(kernel: Kernel) -> Launcher:
    if not kernel.tvm_ffi:
        from rose_dist.kernels import nvshmem  # noqa: PLC0415 - it loads the compiler

        assert isinstance(kernel, nvshmem.NetworkKernel)
        return nvshmem.load(kernel)
    path = cache_path(kernel)
    launcher = _read(path)
    if launcher is None:
        start = time.perf_counter()
        compiled = _compile(kernel)
        log.info("compiled %s in %.2f s", kernel.label, time.perf_counter() - start)
        _write(path, compiled)
        launcher = compiled.__tvm_ffi_object__()
    return launcher


def _read(path: Path) -> Launcher | None:
    """The launcher from an object file; None where there is none that is whole."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    if stored[-32:] != hashlib.sha256(stored[:-32]).digest():
        log.warning("kernel cache: %s is damaged, compiling again", path)
        return None
    from rose_dist.kernels import dsl  # noqa: PLC0415 - it loads the compiler

    # The digest at the end lies outside every ELF section, so the loader passes over it.
    module = dsl.cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    launcher: Launcher = module[_ENTRY]
    return launcher


def _write(path: Path, compiled: Any) -> None:
    """Store the object file in one rename, so that another process sees all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
            new = Path(folder) / "kernel.o"
            compiled.export_to_c(str(new), _ENTRY)
            content = new.read_bytes()
            new.write_bytes(content + hashlib.sha256(content).digest())
            new.replace(path)
    except OSError as error:
        log.warning("kernel cache: can't write %s (%s); compiling at every start", path, error)


@cache
def _versions() -> str:
    return "|".join(f"{name}={version(name)}" for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"))


@cache
def _source_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
