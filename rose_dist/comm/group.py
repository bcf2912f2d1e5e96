"""Collectives over one group of ranks, on CPU tensors. A group of one rank makes no MPI call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from rose_dist.comm.layout import even_split
from rose_dist.kernels.linear_add import linear_add

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_BLOCK = 1 << 20
"""Elements that `all_reduce` works on at once: the scratch memory stays in the cache."""
_GATHER_BYTES = 1 << 15
"""Up to this size `all_reduce` gathers everything, in one call; above, it scatters, sums and gathers."""
_BROADCAST_HEAD = 4096
"""Bytes of the first message of a broadcast; what fits into it needs no second."""


class Group:
    """The ranks of one communicator. Every method is collective: all ranks call it, in the same order, from one thread
    at a time. Tensors are contiguous and on the CPU, of any dtype unless a method says otherwise.
    """

    def __init__(self, communicator: MPI.Comm | None) -> None:
        """`communicator` None: a group of this rank alone."""
        self.rank: int = 0 if communicator is None else communicator.rank
        self.size: int = 1 if communicator is None else communicator.size
        self._communicator = communicator

    @property
    def _comm(self) -> MPI.Comm:
        assert self._communicator is not None, "a group of one rank makes no MPI call"
        return self._communicator

    def free(self) -> None:
        """Give the communicator back. The group can't be used afterwards; a second call does nothing."""
        if self._communicator is not None:
            self._communicator.Free()
            self._communicator = None

    def barrier(self) -> None:
        if self.size > 1:
            self._comm.Barrier()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place. The bits are the same on every rank and in every run: each element is summed
        in rank order, whatever the tensor's size. 16-bit floats are summed in fp32 and rounded once.
        """
        if self.size > 1:
            flat = tensor.detach().view(-1)
            for start in range(0, flat.numel(), _BLOCK):
                block = flat[start : start + _BLOCK]
                if block.nbytes <= _GATHER_BYTES:
                    self._sum_gathered(block)
                else:
                    self._sum_scattered(block)

    def add_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> None:
        """Add the sum of x Wᵀ + b over the ranks to `residual`, in place."""
        part = linear_add(x, weight, bias, None)
        self.all_reduce(part)
        residual += part

    def _sum_gathered(self, block: torch.Tensor) -> None:
        parts = torch.empty(self.size, block.numel(), dtype=block.dtype)
        self._comm.Allgather(memory_of(block), memory_of(parts))
        block.copy_(_sum_in_order(parts))

    def _sum_scattered(self, block: torch.Tensor) -> None:
        shares = [len(even_split(block.numel(), self.size, rank)) for rank in range(self.size)]
        mine = shares[self.rank]
        parts = torch.empty(self.size * mine, dtype=block.dtype)
        self.all_to_all_rows(block, shares, parts, [mine] * self.size)
        total = _sum_in_order(parts.view(self.size, mine)).to(block.dtype)
        block.copy_(self.all_gather_rows(total, shares))

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum of small vectors of 64-bit integers."""
        if self.size == 1:
            return list(values)
        from mpi4py import MPI  # noqa: PLC0415  only where a communicator exists

        return self._reduce_integers(values, MPI.MAX)

    def all_reduce_sum(self, values: Sequence[int]) -> list[int]:
        """The element-wise sum of small vectors of 64-bit integers."""
        if self.size == 1:
            return list(values)
        from mpi4py import MPI  # noqa: PLC0415

        return self._reduce_integers(values, MPI.SUM)

    def _reduce_integers(self, values: Sequence[int], operation: MPI.Op) -> list[int]:
        result = np.empty(len(values), np.int64)
        self._comm.Allreduce(np.array(values, np.int64), result, operation)
        return [int(value) for value in result]

    def all_gather_rows(self, rows: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """[n, …] of each rank, one below the other in rank order. `counts` are the ranks' n, where the caller knows
        them; else the ranks tell each other first.
        """
        if self.size == 1:
            return rows
        if counts is None:
            counts = self._all_counts(rows.shape[0])
        assert counts[self.rank] == rows.shape[0], "counts are not what this rank gives"
        gathered = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype)
        count, row = _rows_of(rows)
        self._comm.Allgatherv([memory_of(rows), count, row], [memory_of(gathered), list(counts), row])
        return gathered

    def _all_counts(self, count: int) -> list[int]:
        counts = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([count], np.int64), counts)
        return [int(value) for value in counts]

    def gather(self, tensor: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        """Every rank's tensor, all of one shape, in rank order on `root`; None elsewhere."""
        if self.size == 1:
            return [tensor]
        parts = torch.empty(self.size if self.rank == root else 0, *tensor.shape, dtype=tensor.dtype)
        count, row = _rows_of(tensor)
        self._comm.Gather([memory_of(tensor), count, row], [memory_of(parts), count, row], root)
        return list(parts) if self.rank == root else None

    def gather_columns(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """[rows, widths[rank]] of every rank side by side, [rows, Σ widths], on the first rank; None elsewhere."""
        if self.size == 1:
            return part
        parts = self.gather(torch.nn.functional.pad(part, (0, max(widths) - part.shape[1])))
        if parts is None:
            return None
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast_bytes(self, data: bytes | None = None, root: int = 0) -> bytes:
        """`root`'s bytes, less than 2 GiB, on every rank."""
        if self.size == 1:
            assert data is not None
            return data
        head = bytearray(_BROADCAST_HEAD)
        if self.rank == root:
            assert data is not None
            head[:8] = len(data).to_bytes(8, "little")
            head[8 : 8 + min(len(data), _BROADCAST_HEAD - 8)] = data[: _BROADCAST_HEAD - 8]
        self._comm.Bcast(head, root)
        length = int.from_bytes(head[:8], "little")
        if length <= _BROADCAST_HEAD - 8:
            return bytes(head[8 : 8 + length])
        body = bytearray(data if self.rank == root and data is not None else length)
        self._comm.Bcast(body, root)
        return bytes(body)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """`root`'s values into every rank's tensor of the same shape and dtype, in place."""
        if self.size > 1:
            self._comm.Bcast([memory_of(tensor), *_rows_of(tensor)], root)

    def all_gather_objects(self, value: T) -> list[T]:
        """Every rank's value, in rank order; pickled, for start-up only."""
        return [value] if self.size == 1 else self._comm.allgather(value)

    def all_to_all_rows(
        self, send: torch.Tensor, send_counts: Sequence[int], receive: torch.Tensor, receive_counts: Sequence[int]
    ) -> None:
        """Rows [n, …] by destination rank, in rank order, to rows by source rank. `receive_counts` must be what the
        others send.
        """
        if self.size == 1:
            receive.copy_(send)
            return
        _, row = _rows_of(send)
        self._comm.Alltoallv([memory_of(send), send_counts, row], [memory_of(receive), receive_counts, row])

    def all_to_all_integers(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[size, n] of every rank: row r goes to rank r; what came, by source rank."""
        if self.size == 1:
            return values
        received = np.empty_like(values)
        self._comm.Alltoall(values, received)
        return received

    def start_all_to_all_rows(
        self, send: torch.Tensor, send_counts: Sequence[int], receive: torch.Tensor, receive_counts: Sequence[int]
    ) -> MPI.Request:
        """`all_to_all_rows` that goes on in the background until the request is waited for. `send` and `receive` must
        stay untouched until then.
        """
        _, row = _rows_of(send)
        return self._comm.Ialltoallv([memory_of(send), send_counts, row], [memory_of(receive), receive_counts, row])


def memory_of(tensor: torch.Tensor) -> MPI.buffer:
    """The tensor's memory, not a copy; the caller keeps the tensor alive. MPI has no bf16; bytes serve every dtype."""
    from mpi4py import MPI  # noqa: PLC0415

    assert tensor.is_contiguous(), "collectives take contiguous tensors"
    assert tensor.device.type == "cpu", "collectives take tensors on the CPU"
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _rows_of(tensor: torch.Tensor) -> tuple[int, MPI.Datatype]:
    """How many rows (of the first dimension), and the datatype of one."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return rows, row_type(tensor.element_size() * math.prod(tensor.shape[1:]))


@cache
def row_type(size: int) -> MPI.Datatype:
    """A datatype of `size` bytes: counts and displacements in rows stay below 2³¹ where bytes would not."""
    from mpi4py import MPI  # noqa: PLC0415

    return MPI.BYTE.Create_contiguous(size).Commit()


def _sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """[n, elements] to [elements], in fp32 for 16-bit floats."""
    narrow = parts.dtype.is_floating_point and parts.element_size() < 4
    total = parts[0].float() if narrow else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
