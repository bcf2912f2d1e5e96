"""One NVSHMEM heap a process, taken once and cut up: memory of the same size on every rank that all GPUs can reach."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rose_dist.errors import RoseError

ALIGNMENT = 512
_HEAP_SLACK = 64 << 20
"""Bytes of NVSHMEM's heap beyond what is taken, for its own use."""


class SymmetricMemoryError(RoseError):
    """No symmetric memory of the wanted kind."""


class Ranks(Protocol):
    """What is needed of a `Group`."""

    rank: int
    size: int

    def all_gather_objects(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Region:
    """A part of the heap, at the same offset on every rank."""

    local: torch.Tensor
    """uint8 [bytes], this rank's part."""
    addresses: tuple[int, ...]
    """Of every rank's part, by rank, as this GPU reaches it; 0 for ranks that it reaches by messages only."""


_heaps: list[torch.Tensor] = []
"""Kernels know these by address only; they must outlive whoever asked for them."""


class SymmetricMemory:
    """The heap of `group`. Construction and `take` are collective; all ranks take the same sizes in the same order.
    It stays until `close`, or to the process' end.
    """

    def __init__(self, group: Ranks, device: torch.device, size: int, far: Collection[int] = ()) -> None:
        """`size` in bytes; `far`: ranks across the network, which need a network transport of NVSHMEM. All other GPUs
        must reach one another's memory over NVLink or PCIe.

        Raises `ValueError` on every rank if the ranks disagree on the size, and `SymmetricMemoryError` if a near rank's
        memory can't be reached.
        """
        self.group, self.device = group, device
        self._agree("size", size)
        self._used, self._size = 0, -(-size // ALIGNMENT) * ALIGNMENT
        self._nvshmem = _start(group, device, self._size, network=bool(far))
        self._heap: torch.Tensor = self._nvshmem.bytetensor((self._size,))
        self._heap.zero_()
        _heaps.append(self._heap)
        torch.cuda.synchronize(device)
        self._bases = tuple(0 if rank in far else self._reach(rank) for rank in range(group.size))
        group.all_gather_objects("zeroed")

    def take(self, size: int) -> Region:
        """The next `size` bytes, zeroed on every rank. Raises `ValueError` on every rank if they disagree on `size`,
        and `SymmetricMemoryError` if that much is not left.
        """
        self._agree("size of a region", size)
        start, end = self._used, self._used + size
        if end > self._size:
            raise SymmetricMemoryError(
                f"{size} bytes wanted, {self._size - start} of {self._size} left: build a larger heap"
            )
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return Region(self._heap[start:end], tuple(base and base + start for base in self._bases))

    def close(self) -> None:
        """Collective. No kernel may still use the heap."""
        if self._nvshmem is not None:
            torch.cuda.synchronize(self.device)
            self.group.all_gather_objects("done")
            _heaps[:] = [heap for heap in _heaps if heap is not self._heap]
            self._nvshmem.free_tensor(self._heap)
            self._nvshmem.finalize()
            self._nvshmem = None

    def _reach(self, rank: int) -> int:
        if rank == self.group.rank:
            return self._heap.data_ptr()
        try:
            return int(self._nvshmem.get_peer_tensor(self._heap, rank).data_ptr())
        except Exception as error:
            raise SymmetricMemoryError(
                f"the memory of rank {rank} can't be reached from {self.device}: {error}"
            ) from error

    def _agree(self, what: str, size: int) -> None:
        given = self.group.all_gather_objects(size)
        if len(set(given)) > 1:
            raise ValueError(f"the ranks disagree on the {what}: {dict(enumerate(given))}")


def _start(group: Ranks, device: torch.device, size: int, *, network: bool) -> Any:
    """NVSHMEM with a heap of `size` bytes, its unique id sent round by `group`."""
    os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(size + _HEAP_SLACK)
    if not network:
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    import nvshmem.core as nvshmem  # noqa: PLC0415  reads the environment; belongs to the cuda extra
    from cuda.core import Device  # noqa: PLC0415

    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).synchronize()
    chosen = Device(device.index)
    chosen.set_current()
    uid = nvshmem.get_unique_id(empty=group.rank != 0)
    data = group.all_gather_objects(uid._data.tobytes() if group.rank == 0 else None)[0]
    if group.rank:
        uid._data.view(np.int8)[:] = np.frombuffer(data, np.int8)
    nvshmem.init(device=chosen, uid=uid, rank=group.rank, nranks=group.size, initializer_method="uid")
    return nvshmem
