"""Memory of the emulated machine: allocations at real process addresses, with guard bytes around each."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.errors import Misaligned, OutOfBounds
from tests.ptx.number_formats import Array

ALIGNMENT = 256
GUARD = 256

# Windows of the generic address space that no process address can fall into.
SHARED_WINDOW = 1 << 60
SHARED_STRIDE = 1 << 24
LOCAL_WINDOW = 1 << 61
PARAM_WINDOW = 1 << 59
MULTICAST_WINDOW = 1 << 58


@dataclass(eq=False)
class Shadow:
    """Per granule: who wrote last (−1: the host, before the run), who read last, and where the older values are.

    A granule is as small as the smallest access so far; `kind` is the last write's scope (0: weak), `record` its
    history entry.
    """

    granule: int
    writer: Array
    epoch: Array
    kind: Array
    record: Array
    reader: Array
    read_epoch: Array
    read_kind: Array

    READERS = 2

    @classmethod
    def fresh(cls, size: int, granule: int) -> "Shadow":
        n = -(-size // granule)
        return cls(
            granule,
            np.full(n, -1, np.int32),
            np.zeros(n, np.int32),
            np.zeros(n, np.int8),
            np.full(n, -1, np.int32),
            np.full((cls.READERS, n), -1, np.int32),
            np.zeros((cls.READERS, n), np.int32),
            np.zeros((cls.READERS, n), np.int8),
        )

    def refine(self, granule: int) -> None:
        """Splits granules so that an access of `granule` bytes has its own."""
        factor = self.granule // granule
        for name in ("writer", "epoch", "kind", "record", "reader", "read_epoch", "read_kind"):
            setattr(self, name, np.repeat(getattr(self, name), factor, axis=-1))
        self.granule = granule


@dataclass(eq=False)
class Allocation:
    """`data` is padded past `size` to a multiple of 32 bytes; `unwritten` flags bytes nobody wrote, where that is
    checked.
    """

    name: str
    base: int
    size: int
    data: Array
    gpu: int
    unwritten: Array | None = None
    shadow: Shadow | None = None
    _words: dict[int, Array] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.base + self.size

    def words(self, size: int) -> Array:
        """The data as unsigned words of 1, 2, 4 or 8 bytes, or void records of 16 or 32: fast to gather and scatter."""
        if size not in self._words:
            kind = np.dtype(f"u{size}") if size <= 8 else np.dtype((np.void, size))
            self._words[size] = self.data.view(kind)
        return self._words[size]

    def shadow_for(self, granule: int) -> Shadow:
        if self.shadow is None:
            self.shadow = Shadow.fresh(len(self.data), min(granule, 16))
        elif granule < self.shadow.granule:
            self.shadow.refine(granule)
        return self.shadow


def allocate(name: str, size: int, gpu: int, *, base: int | None = None, check_unwritten: bool = False) -> Allocation:
    """A zeroed allocation. Without `base` it lives at its real address (256-byte aligned, with guards)."""
    padded = -(-max(size, 1) // 32) * 32
    store = np.zeros(padded + 2 * GUARD + ALIGNMENT, np.uint8)
    start = -store.ctypes.data % ALIGNMENT + GUARD
    data = store[start : start + padded]
    unwritten = np.ones(padded, np.bool_) if check_unwritten else None
    return Allocation(name, data.ctypes.data if base is None else base, size, data, gpu, unwritten)


@dataclass(frozen=True)
class Multicast:
    """A multicast object: offset o stands for offset o of every member."""

    name: str
    base: int
    members: tuple[Allocation, ...]

    @property
    def size(self) -> int:
        return min(m.size for m in self.members)


class AddressMap:
    """All allocations, by address."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._allocations: list[Allocation] = []
        self.multicasts: list[Multicast] = []

    def add(self, allocation: Allocation) -> Allocation:
        at = bisect.bisect(self._bases, allocation.base)
        self._bases.insert(at, allocation.base)
        self._allocations.insert(at, allocation)
        return allocation

    def remove(self, allocation: Allocation) -> None:
        at = self._allocations.index(allocation)
        del self._bases[at], self._allocations[at]

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._allocations)

    def find(self, address: int, size: int) -> Allocation:
        at = bisect.bisect(self._bases, address) - 1
        if at >= 0:
            found = self._allocations[at]
            if address + size <= found.end:
                return found
        raise OutOfBounds(self._explain(address, size, at))

    def _explain(self, address: int, size: int, at: int) -> str:
        text = f"{size} bytes at 0x{address:x} lie in no allocation"
        if at >= 0 and address - self._allocations[at].base < (1 << 32):
            near = self._allocations[at]
            text += f"; the nearest below is {near.name} ({near.size} bytes), at its offset {address - near.base}"
        return text

    def find_multicast(self, address: int, size: int) -> tuple[Multicast, int]:
        for multicast in self.multicasts:
            offset = address - multicast.base
            if offset >= 0 and offset + size <= multicast.size:
                return multicast, offset
        raise OutOfBounds(f"{size} bytes at 0x{address:x} lie in no multicast object")


def check_alignment(addresses: Array, size: int) -> None:
    if size > 1:
        off = addresses & np.uint64(size - 1)
        if off.any():
            lane = int(np.argmax(off != 0))
            error = Misaligned(f"an access of {size} bytes at 0x{int(addresses[lane]):x} needs {size}-byte alignment")
            error.lane = lane
            raise error
