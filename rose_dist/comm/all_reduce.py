"""The all-reduce of one group's GPUs, over its symmetric memory."""

from __future__ import annotations

import torch

from rose_dist.comm.symmetric_memory import SymmetricMemory
from rose_dist.kernels.all_reduce import AllReduce, Sizes
from rose_dist.kernels.arch import device_info


def create(memory: SymmetricMemory, *, hidden: int, dtype: torch.dtype, max_rows: int) -> AllReduce:
    """For rows [up to max_rows, hidden]; one object serves all layers of a model. Collective over the memory's group.

    Raises `ValueError` on every rank if they give different sizes.
    """
    group, device = memory.group, memory.device
    sms = min(group.all_gather_objects(device_info(device.index).sms))
    sizes = Sizes(group.size, hidden, dtype, max_rows, sms)
    given = group.all_gather_objects(sizes)
    if len(set(given)) > 1:
        raise ValueError(f"the ranks disagree on an all-reduce's sizes: {dict(enumerate(given))}")
    region = memory.take(sizes.region_bytes)
    return AllReduce(sizes, device, group.rank, region.addresses)


def region_bytes(ranks: int, *, hidden: int, dtype: torch.dtype, max_rows: int) -> int:
    """What `create` takes of the memory at most, whatever the number of SMs."""
    return Sizes(ranks, hidden, dtype, max_rows, sms=max_rows).region_bytes
