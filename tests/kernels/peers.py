"""Several emulated GPUs that exchange packets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rose_dist.kernels import jit
from rose_dist.kernels import peer_regions as packets
from rose_dist.kernels.sync import REPORT_WORDS
from tests.kernels.emulation import compiled, stream
from tests.ptx.launch import Launch
from tests.ptx.machine import Machine

LONG = 1 << 40


def sum_in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """fp32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


class Peers:
    """GPUs with an inbox each. `launch` collects launches; `run` runs them all, GPUs side by side."""

    def __init__(self, ranks: int, source_packets: int, epoch: int = 0) -> None:
        self.ranks, self.source_bytes = ranks, source_packets * packets.PACKET_BYTES
        self.machine = Machine()
        size = packets.inbox_bytes(ranks, self.source_bytes)
        each = range(ranks)
        self.inboxes = [self.machine.zeros(size, torch.uint8, gpu=g, name=f"inbox of {g}") for g in each]
        self.states = [self.machine.zeros(1, torch.int64, gpu=g) for g in each]
        for state in self.states:
            state.view(torch.int32)[1] = epoch - (epoch >> 31 << 32)  # the high half, as a signed number
        self.reports = [self.machine.zeros(REPORT_WORDS, torch.int32, gpu=g) for g in each]
        self.limit = LONG
        self.weaken = ("", "")
        self.change: Callable[[Launch], Launch] = lambda launch: launch
        self._launches: list[list[Launch]] = [[] for _ in each]

    def tensor(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        narrow = values.contiguous().view(torch.uint8) if values.numel() else values
        return self.machine.tensor(narrow, gpu=rank).view(values.dtype).view(values.shape)

    def empty(self, *shape: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
        return self.machine.empty(shape, dtype, gpu=rank)

    @property
    def addresses(self) -> list[int]:
        found = [inbox.data_ptr() for inbox in self.inboxes]
        return found + [0] * (packets.MAX_RANKS - len(found))

    def launch(self, kernel: jit.Kernel, rank: int, *arguments: Any) -> None:
        """The launch of one rank; tensors are passed by address."""
        numbers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        host = compiled(kernel)
        launches = host(*numbers, stream(), gpu=rank)
        if self.weaken[0]:
            launches = [dataclasses.replace(one, program=host.changed(*self.weaken)) for one in launches]
        self._launches[rank] += launches

    def run(self, seed: int = 0, **options: Any) -> None:
        launches = [self.change(one) for rank in self._launches for one in rank]
        self._launches = [[] for _ in range(self.ranks)]
        self.machine.run(launches, seed=seed, **options)

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        return [function(rank) for rank in range(self.ranks)]
