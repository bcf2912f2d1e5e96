"""From addresses to memory: state spaces, the generic address space and its windows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.ptx.allocation import LOCAL_WINDOW, PARAM_WINDOW, SHARED_STRIDE, SHARED_WINDOW, Allocation, check_alignment
from tests.ptx.errors import OutOfBounds, PtxError, UnknownInstruction
from tests.ptx.gang import Cta, Gang
from tests.ptx.memory_model import Access
from tests.ptx.number_formats import Array

SPACES = {"global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const"}


def space_of(parts: tuple[str, ...]) -> str:
    """The state space named in an opcode; "generic" if none is."""
    found = [p for p in parts if p in SPACES]
    return found[0].split("::")[0] if found else "generic"


def words(values: Array, size: int) -> Array:
    """(n, size) bytes as n words or void records."""
    kind = np.dtype(f"u{size}") if size <= 8 else np.dtype((np.void, size))
    return np.ascontiguousarray(values).view(kind).reshape(-1)


def load(g: Gang, space: str, addresses: Array, access: Access, lanes: Array) -> Array:
    """Words or void records of access.size bytes, one for each of `lanes`."""
    check_alignment(addresses, access.size)
    if len(addresses) == 0:
        return np.zeros(0, np.dtype((np.void, access.size)))
    pieces = [
        (where, _load_region(g, region, addresses[where], access, lanes=lanes[where]))
        for region, where in _regions(space, addresses)
    ]
    if len(pieces) == 1:
        return pieces[0][1]
    result = np.zeros(len(addresses), pieces[0][1].dtype)
    for where, values in pieces:
        result[where] = values
    return result


def store(g: Gang, space: str, addresses: Array, values: Array, access: Access, lanes: Array) -> None:
    check_alignment(addresses, access.size)
    for region, where in _regions(space, addresses):
        target, by = addresses[where], lanes[where]
        if region == "local":
            _local(g, target, access.size)[(target - np.uint64(LOCAL_WINDOW)).astype(np.int64) // access.size] = values[
                where
            ]
        elif region in ("param", "const"):
            raise OutOfBounds(f"{region} space is read only")
        else:
            for memory, part, offsets in _allocations(g, region, target, access.size):
                g.machine.memory.write(memory, offsets, values[where][part], access, g.threads[by[part]])


def locate(g: Gang, space: str, address: int, size: int) -> tuple[Allocation, int]:
    """The allocation and offset of one lane's address, for atomic operations."""
    addresses = np.array([address], np.uint64)
    check_alignment(addresses, size)
    (region, _), *_ = _regions(space, addresses)
    if region not in ("global", "shared"):
        raise UnknownInstruction(f"atomic operations on {region} space are not modelled")
    memory, _, offsets = next(_allocations(g, region, addresses, size))
    return memory, int(offsets[0])


def _regions(space: str, addresses: Array) -> list[tuple[str, slice | Array]]:
    """(space, lanes) parts of an access; only generic ones can have more than one part."""
    if space != "generic":
        return [(space, slice(None))]
    bounds = np.array([PARAM_WINDOW, SHARED_WINDOW, LOCAL_WINDOW], np.uint64)
    which = np.searchsorted(bounds, addresses, side="right")
    names = ("global", "param", "shared", "local")
    if which[0] == which[-1] and (which == which[0]).all():
        return [(names[which[0]], slice(None))]
    return [(names[w], np.flatnonzero(which == w)) for w in np.unique(which)]


def _local(g: Gang, addresses: Array, size: int) -> Array:
    per_thread = g.launch.program.local_size
    offsets = (addresses - np.uint64(LOCAL_WINDOW)).astype(np.int64)
    if (offsets < 0).any() or (offsets + size > g.lanes * per_thread).any():
        raise OutOfBounds("an access outside the thread's local memory")
    return g.local.view(words(np.zeros(size, np.uint8), size).dtype)


def _load_region(g: Gang, region: str, addresses: Array, access: Access, lanes: Array) -> Array:
    size = access.size
    if region == "local":
        return _local(g, addresses, size)[(addresses - np.uint64(LOCAL_WINDOW)).astype(np.int64) // size]
    if region == "param":
        offsets = (addresses - np.uint64(PARAM_WINDOW)).astype(np.int64)
        params = g.launch.params
        if (offsets + size > len(params)).any():
            raise OutOfBounds(f"parameter bytes {int(offsets.max())}..+{size} of {len(params)}")
        return words(params[offsets[:, None] + np.arange(size)], size)
    result: Array | None = None
    for memory, part, offsets in _allocations(g, region, addresses, size):
        values = g.machine.memory.read(memory, offsets, access, g.threads[lanes[part]])
        if isinstance(part, slice):
            return values
        result = np.zeros(len(addresses), values.dtype) if result is None else result
        result[part] = values
    assert result is not None
    return result


def _allocations(
    g: Gang, region: str, addresses: Array, size: int
) -> Iterator[tuple[Allocation, slice | Array, Array]]:
    """(allocation, which of the lanes, offsets) for each allocation that the lanes touch, in the order of its first
    lane: a replay must not depend on where memory happens to lie.
    """
    if region == "shared":
        yield from _shared(g, addresses, size)
        return
    found = g.machine.addresses
    low, high = int(addresses.min()), int(addresses.max())
    memory = _find(g, low, size, addresses)
    if high + size <= memory.end:
        yield memory, slice(None), (addresses - np.uint64(memory.base)).astype(np.int64)
        return
    left = np.ones(len(addresses), np.bool_)
    while left.any():
        memory = _find(g, int(addresses[np.argmax(left)]), size, addresses)
        inside = left & (addresses >= np.uint64(memory.base)) & (addresses < np.uint64(memory.end))
        top = int(addresses[inside].max())
        if top + size > memory.end:
            found.find(top, size)
        yield memory, np.flatnonzero(inside), (addresses[inside] - np.uint64(memory.base)).astype(np.int64)
        left &= ~inside


def _find(g: Gang, address: int, size: int, addresses: Array) -> Allocation:
    try:
        return g.machine.addresses.find(address, size)
    except PtxError as error:
        error.lane = int(np.argmax(addresses == np.uint64(address)))
        raise


def _shared(g: Gang, addresses: Array, size: int) -> Iterator[tuple[Allocation, slice | Array, Array]]:
    """Own shared memory by plain offsets; a peer's in the cluster by mapa addresses; any by generic addresses."""
    if (addresses < np.uint64(SHARED_STRIDE)).all():
        yield g.cta.shared, slice(None), _bounded(g.cta.shared, addresses, size)
        return
    window = addresses >= np.uint64(SHARED_WINDOW)
    stripped = np.where(window, addresses - np.uint64(SHARED_WINDOW), addresses)
    owner = (stripped >> np.uint64(24)).astype(np.int64)
    for number in np.unique(owner[window]):
        part = np.flatnonzero(window & (owner == number))
        memory = _living(g.machine.ctas[int(number)]).shared
        yield memory, part, _bounded(memory, stripped[part] & np.uint64(SHARED_STRIDE - 1), size)
    for number in np.unique(owner[~window]):
        part = np.flatnonzero(~window & (owner == number))
        memory = g.cta.shared if number == 0 else _living(g.cta.peer(int(number) - 1)).shared
        yield memory, part, _bounded(memory, stripped[part] & np.uint64(SHARED_STRIDE - 1), size)


def _living(cta: Cta) -> Cta:
    """A CTA's shared memory lasts as long as any of its threads."""
    if cta.live == 0:
        raise OutOfBounds(f"{cta.shared.name} is used after that CTA has left the kernel")
    return cta


def _bounded(memory: Allocation, addresses: Array, size: int) -> Array:
    offsets = addresses.astype(np.int64)
    beyond = offsets + size > memory.size
    if beyond.any():
        lane = int(np.argmax(beyond))
        error = OutOfBounds(f"{size} bytes at offset {int(offsets[lane])} of {memory.name}, which has {memory.size}")
        error.lane = lane
        raise error
    return offsets
