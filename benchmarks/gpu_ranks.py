"""What benchmarks share in which every GPU of a host has a process: control, symmetric memory, and the link's rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rose_dist.comm.symmetric_memory import Region, SymmetricMemory

HEAP = 6 << 30
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""The environment in which no library uses NVLink multicast: on a shared host it can put the GPUs out of service."""


class Control:
    """What `SymmetricMemory` needs of a group, over torch.distributed on the CPU."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.cpu = dist.new_group(backend="gloo")

    def all_gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.cpu)
        return values

    def meet(self) -> None:
        dist.barrier(group=self.cpu)


class TorchMemory:
    """torch's symmetric memory in place of NVSHMEM's, where that can't start."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self.group, self.device = control, device

    def take(self, size: int) -> Region:
        import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415

        local = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(local, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        local.zero_()
        torch.cuda.synchronize()
        self.group.meet()
        return Region(local, tuple(handle.buffer_ptrs))


def memory_of(control: Control, device: torch.device, size: int = HEAP) -> tuple[Any, str]:
    """NVSHMEM's heap if every rank gets it, and what it is."""
    try:
        memory, problem = SymmetricMemory(control, device, size), ""
    except Exception as error:
        memory, problem = None, f"{type(error).__name__}: {error}"
    problems = control.all_gather_objects(problem)
    if not any(problems):
        return memory, "NVSHMEM"
    print(f"no NVSHMEM heap: {problems}", flush=True)
    return TorchMemory(control, device), "torch symmetric memory"


def link_rate(control: Control, device: torch.device, align: Callable[[], None], size: int = 256 << 20) -> float:
    """Bytes a microsecond of a copy to the next GPU while every GPU does so."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    following = torch.device("cuda", (control.rank + 1) % control.size)
    target = torch.zeros(size, dtype=torch.uint8, device=following)
    torch.cuda.synchronize()
    samples = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        align()
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return float(min(control.all_gather_objects(size / statistics.median(samples[2:]))))
