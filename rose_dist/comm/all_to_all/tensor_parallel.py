"""Every rank of the group has the same tokens: each keeps the rows of its experts, and an all-reduce ends the sum."""

from __future__ import annotations

import torch

from rose_dist.comm.all_to_all.agreement import agree
from rose_dist.comm.all_to_all.local import Local, LocalHandle
from rose_dist.comm.all_to_all.protocol import AllToAllConfig
from rose_dist.comm.group import Group


class TensorParallel(Local):
    """`Local` over `local_experts` (whole, or one slice of each), then a sum over the group in fp32, in rank order."""

    def __init__(self, config: AllToAllConfig, group: Group, local_experts: range) -> None:
        agree(config, group)
        super().__init__(config, local_experts)
        self.group = group

    def reduce(self, handle: LocalHandle) -> torch.Tensor:
        total = super().reduce(handle)
        self.group.all_reduce(total)
        return total
