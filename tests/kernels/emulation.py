"""Runs the public functions of `rose_dist.kernels` on the PTX interpreter: compiled kernels and real
addresses, no GPU.

Tensors of an `Emulator` say that they are CUDA tensors. What the functions allocate is emulated memory too, filled with
0xA5 and fenced by guard bytes, so unwritten results and stray accesses show.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch
from cuda.bindings.driver import CUstream

from rose_dist.kernels import jit, launch, layer_meeting
from rose_dist.kernels.arch import Arch, DeviceInfo
from tests.ptx.cutedsl import Compiled, compile_kernel
from tests.ptx.machine import Machine

_EMPTY = torch.empty


class EmulatedTensor(torch.Tensor):
    """A tensor in emulated memory."""

    is_cuda = True


@lru_cache(maxsize=64)
def compiled(kernel: jit.Kernel) -> Compiled:
    """The kernel with its host code, ready to be interpreted; calls of NVSHMEM are left open. Each takes some 10 MB, so
    those that no test has asked for lately are let go.
    """
    return compile_kernel(kernel, *kernel.arguments(), arch=str(kernel.arch), linked=kernel.tvm_ffi)


def forget() -> None:
    """Empty what the functions of `rose_dist.kernels` remember: forms of arguments, and kernels for them. To be called
    before and after an emulation, since a real GPU's launchers and an emulated one's are remembered in one place.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("rose_dist.kernels."):
            for function in list(vars(module).values()):
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


def stream() -> CUstream:
    """The default stream, as a kernel's last argument."""
    return CUstream(0)


class Emulator:
    """An emulated GPU of one arch."""

    real = False

    def __init__(self, arch: Arch, sms: int) -> None:
        self.info = DeviceInfo(arch, sms)
        self.machine = Machine()
        self.seed = 0
        self.kernels: list[jit.Kernel] = []
        self._pending: list[Any] | None = None

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU."""
        # The interpreter's memory is bytes; dtypes that numpy lacks travel as such.
        narrow = values.contiguous().view(torch.uint8) if values.numel() else values
        stored = self.machine.tensor(narrow.numpy()) if values.numel() else values
        return stored.view(values.dtype).view(values.shape).as_subclass(EmulatedTensor)

    def empty(
        self, *shape: Any, dtype: torch.dtype = torch.float32, device: Any = None, pin_memory: bool = False
    ) -> torch.Tensor:
        """torch.empty in emulated memory for who names a device, as all of `rose_dist.kernels` does."""
        assert not pin_memory, "there is no driver to lock pages"
        if device is None or torch.device(device).type == "meta":
            return _EMPTY(*shape, dtype=dtype, device=device)
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.machine.empty(tuple(sizes), dtype).as_subclass(EmulatedTensor)

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in ordinary memory."""
        return tensor.as_subclass(torch.Tensor).clone()

    def plain_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself without its disguise: padding and strides are kept."""
        return tensor.as_subclass(torch.Tensor)

    def run(self, kernel: jit.Kernel, on: torch.Tensor, *arguments: Any) -> None:
        """What `launch.run` does, interpreted."""
        self.kernels.append(kernel)
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        launches = compiled(kernel)(*numbers, stream())
        if self._pending is None:
            self.machine.run(launches, seed=self.seed)
        else:
            self._pending.extend(launches)

    @contextmanager
    def together(self, seed: int) -> Iterator[None]:
        """Launches in the context run at its end as one stream, so that dependent ones overlap."""
        self._pending = []
        yield
        launches, self._pending = self._pending, None
        self.machine.run(launches, seed=seed)


def install(monkeypatch: pytest.MonkeyPatch, arch: Arch, sms: int = 4) -> Emulator:
    """Route all launches of this test to an emulated GPU."""
    emulator = Emulator(arch, sms)
    forget()
    monkeypatch.setattr(launch, "device", lambda tensor: emulator.info)
    monkeypatch.setattr(launch, "run", emulator.run)
    monkeypatch.setattr(jit, "load", lambda kernel: kernel)
    monkeypatch.setattr(torch, "empty", emulator.empty)
    monkeypatch.setattr(layer_meeting, "_meetings", {})
    return emulator
