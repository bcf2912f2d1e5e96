"""Every numerical test runs on emulated GPUs of both archs, and on a real one where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rose_dist.kernels import launch
from rose_dist.kernels.arch import ARCHS, DeviceInfo


class RealGPU:
    """The first CUDA device."""

    real = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        empty = torch.empty

        def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
            tensor = empty(*shape, **options)
            if tensor.is_cuda and tensor.numel():
                empty(0, dtype=torch.uint8, device=tensor.device).set_(
                    tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,)
                ).fill_(0xA5)
            return tensor

        monkeypatch.setattr(torch, "empty", poisoned)

    @property
    def info(self) -> DeviceInfo:
        return launch.device(torch.zeros(1, device="cuda"))

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return values.cuda()

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def plain_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def emulated(monkeypatch: pytest.MonkeyPatch, arch: str) -> Any:
    pytest.importorskip("cutlass")
    from tests.kernels import emulation  # noqa: PLC0415

    return emulation.install(monkeypatch, ARCHS[arch])


@pytest.fixture(params=["sm_90a", "sm_100a", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Has `tensor` and `plain` to move tensors there and back, `info` and `real`. What kernels allocate is poisoned."""
    torch.manual_seed(0)
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        yield RealGPU(monkeypatch)
    else:
        yield emulated(monkeypatch, request.param)


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its `of(kernel)` is `jit.compile_binary`, for kernels that several modules look at."""
    pytest.importorskip("cutlass")
    from tests.kernels.binaries import Binaries  # noqa: PLC0415

    return Binaries.of_run(tmp_path_factory)


@pytest.fixture
def row_counts(gpu: Any) -> tuple[int, ...]:
    """Odd numbers of rows; an emulated GPU takes only few."""
    return (1, 3, 127, 8191) if gpu.real else (1, 3)
