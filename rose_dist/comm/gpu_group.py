"""A tensor-parallel group of GPUs: its collectives go over NVLink and fit into CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rose_dist.comm import all_reduce
from rose_dist.comm.group import Group
from rose_dist.comm.symmetric_memory import SymmetricMemory
from rose_dist.kernels.all_reduce import AllReduce
from rose_dist.kernels.linear_add import linear_add


class GpuGroup:
    """`TensorGroup` on GPUs."""

    def __init__(self, group: Group, reduce: AllReduce) -> None:
        self.rank, self.size = group.rank, group.size
        self.reduce = reduce

    @classmethod
    def create(cls, group: Group, device: torch.device, *, hidden: int, dtype: torch.dtype, max_rows: int) -> GpuGroup:
        """Collective over `group`. For sums of up to `max_rows` rows of `hidden`."""
        size = all_reduce.region_bytes(group.size, hidden=hidden, dtype=dtype, max_rows=max_rows)
        memory = SymmetricMemory(group, device, size)
        return cls(group, all_reduce.create(memory, hidden=hidden, dtype=dtype, max_rows=max_rows))

    def all_reduce(self, tensor: Tensor) -> None:
        self.reduce(tensor, tensor)

    def add_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        if self.reduce.takes_linear(weight):
            self.reduce.add_linear(x, weight, bias, residual)
        else:
            self.reduce.add(linear_add(x, weight, bias, None), residual)

    def gather_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        if self.reduce.sizes.dtype is torch.bfloat16:
            return self.reduce.gather_columns(part, sum(widths))
        gathered = self.reduce.gather_columns(as_bf16(part), sum(widths))
        return None if gathered is None else from_bf16(gathered)

    def broadcast(self, tensor: Tensor) -> None:
        octets, hidden = tensor.view(torch.uint8), self.reduce.sizes.hidden
        rows = tensor.new_empty(-(-tensor.nbytes // hidden), hidden, dtype=self.reduce.sizes.dtype)
        # bf16 holds the number that a byte is; what lies beyond is not looked at.
        travelling = rows.view(-1)[: tensor.nbytes]
        if self.rank == 0:
            travelling.copy_(octets)
        else:
            travelling.zero_()
        self.reduce(rows, rows)
        octets.copy_(travelling)


def as_bf16(x: Tensor) -> Tensor:
    """fp32 [rows, columns] as fp32 [3 rows, columns] of numbers that bf16 holds: three of 8 bits add up to all 24."""
    first = x.bfloat16().float()
    rest = torch.where(first.isinf(), 0.0, x - first)
    second = rest.bfloat16().float()
    return torch.cat([first, second, rest - second])


def from_bf16(parts: Tensor) -> Tensor:
    """What `as_bf16` was given, to the bit but for values near the ends of fp32's range."""
    first, second, third = parts.chunk(3)
    return first + second + third
