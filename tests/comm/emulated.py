"""Several emulated GPUs on which the communication layers run as they would in a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rose_dist.kernels import jit, launch
from rose_dist.kernels.arch import HOPPER, Arch, DeviceInfo
from tests.kernels.emulation import EmulatedTensor, forget
from tests.kernels.peers import Peers

SMS = 3


class Cluster:
    """Emulated GPUs on which the public functions run, one rank after the other; `run` lets all launches go."""

    def __init__(
        self, ranks: int, region_bytes: int, monkeypatch: pytest.MonkeyPatch, arch: Arch = HOPPER, sms: int = SMS
    ) -> None:
        self.peers = Peers(ranks, region_bytes // (2 * ranks * 16) + 1)
        self.rank = 0
        self._empty = torch.empty
        monkeypatch.setattr(launch, "device", lambda _: DeviceInfo(arch, sms))
        monkeypatch.setattr(launch, "run", self._launch)
        monkeypatch.setattr(jit, "load", lambda kernel: kernel)
        monkeypatch.setattr(torch, "empty", self._allocate)
        forget()

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        self.rank = rank
        yield

    def tensor(self, values: torch.Tensor) -> Any:
        return self.peers.tensor(values, self.rank).as_subclass(EmulatedTensor)

    def _allocate(
        self, *shape: Any, dtype: torch.dtype = torch.float32, device: Any = None, **options: Any
    ) -> torch.Tensor:
        if device is None or (torch.device(device).type != "cuda" and not isinstance(device, torch.device)):
            return self._empty(*shape, dtype=dtype, device=device, **options)
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.peers.machine.empty(tuple(sizes), dtype, gpu=self.rank).as_subclass(EmulatedTensor)

    def _launch(self, kernel: jit.Kernel, on: torch.Tensor, *arguments: Any) -> None:
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        self.peers.launch(kernel, self.rank, *numbers)
