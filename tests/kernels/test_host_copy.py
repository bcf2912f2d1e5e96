"""Copies between the host and a GPU by a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.host_copy import read_host, tell_host


def page_locked(gpu: Any, values: torch.Tensor) -> torch.Tensor:
    """Where the GPU can read and write it."""
    return values.pin_memory() if gpu.real else gpu.tensor(values)


@pytest.mark.parametrize("shape", [(1,), (11, 128), (5, 77)], ids=str)
def test_words_come_to_the_gpu(gpu: Any, shape: tuple[int, ...]) -> None:
    values = torch.randint(-(1 << 62), 1 << 62, shape)
    target = gpu.tensor(torch.zeros(shape, dtype=torch.int64))
    read_host(page_locked(gpu, values), target)
    assert torch.equal(gpu.plain(target), values)


@pytest.mark.parametrize("count", [1, 128, 300])
def test_words_go_where_the_gpu_was_told(gpu: Any, count: int) -> None:
    values, beside = torch.randint(1 << 62, (count,)), torch.full((2,), -1)
    source = gpu.tensor(values)
    for _ in range(2):
        told = page_locked(gpu, torch.cat([beside, torch.zeros(count, dtype=torch.int64), beside]))
        tell_host(source, gpu.tensor(torch.tensor([told[2:].data_ptr()])))
        if gpu.real:
            torch.cuda.synchronize()
        assert torch.equal(gpu.plain(told), torch.cat([beside, values, beside]))
    tell_host(source, gpu.tensor(torch.tensor([0])))


def test_bad_arguments(gpu: Any) -> None:
    numbers = gpu.tensor(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(KernelArgumentError, match="target: shape"):
        read_host(numbers, numbers[:3])
    with pytest.raises(KernelArgumentError, match="place: shape"):
        tell_host(numbers, numbers)
    with pytest.raises(KernelArgumentError, match="source: dtype"):
        tell_host(numbers.int(), numbers[:1])
