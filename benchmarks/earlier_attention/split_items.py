"""The work of decode attention, on the device: items are (request, split, key head), numbered in this order."""

from __future__ import annotations

from typing import Any

from benchmarks.earlier_attention.paged_attention import MIN_TILES, TILE
from rose_dist.kernels import vector
from rose_dist.kernels.dsl import Int32, Int64, cute
from rose_dist.kernels.variants import WARP


@cute.jit
def find(
    wanted: Int32, first: Int32, before: Int32, lengths: Int64, requests: Int32, live: Int32, window: Int32,
    most_splits: Int32,
) -> Any:  # fmt: skip
    """The request and split that number `wanted` of all requests' splits is. By whole warps.

    first, before: a request, and the splits of all requests before it, from where on to look; 0 at first, then what the
    last call returned, as long as `wanted` grows.

    Returns:
        first, before, request (−1: there are not so many), its length, split, and its number of splits.
    """
    lane = cute.arch.thread_idx()[0] % WARP
    request, length, split, splits = Int32(-1), Int32(0), Int32(0), Int32(1)
    # 32 requests at a time, a lane for each.
    while (first < requests) & (request < 0):
        mine = _length(lengths, first + lane, live)
        shares = vector.select(first + lane < requests, _splits(mine, window, most_splits), Int32(0))
        total = cute.arch.warp_redux_sync(shares, "add")
        if wanted >= before + total:
            first += WARP
            before += total
        else:
            start = before + _exclusive_sum(shares, lane)
            owner = cute.arch.warp_redux_sync(vector.select(start <= wanted, lane, Int32(0)), "max")
            request, length = first + owner, cute.arch.shuffle_sync(mine, owner)
            split = wanted - cute.arch.shuffle_sync(start, owner)
            splits = cute.arch.shuffle_sync(shares, owner)
    return first, before, request, length, split, splits


def tiles_of(length: Any, window: Any, split: Any, splits: Any) -> tuple[Any, Any, Any]:
    """The first key that the query sees, and the split's first tile and end."""
    low = vector.max_of(length - window, Int32(0))
    tiles = _count(length, low)
    return low, low // TILE + split * tiles // splits, low // TILE + (split + 1) * tiles // splits


def _length(lengths: Any, request: Any, live: Any) -> Any:
    """Of a live request; 0 of any other."""
    known = vector.min_of(request, vector.max_of(live - 1, Int32(0)))
    return vector.select(request < live, vector.scalar(lengths + Int64(known) * 4, Int32)[0], Int32(0))


def _count(length: Any, low: Any) -> Any:
    return (length + (TILE - 1)) // TILE - low // TILE


def _splits(length: Any, window: Any, most: Any) -> Any:
    """Blocks that share the keys of a request for one key head: they depend on nothing but its own length."""
    tiles = _count(length, vector.max_of(length - window, Int32(0)))
    return vector.max_of(vector.min_of(tiles // MIN_TILES, most), Int32(1))


def _exclusive_sum(value: Any, lane: Any) -> Any:
    """Of the lanes before this one."""
    total, offset = value, 1
    while offset < WARP:
        below = cute.arch.shuffle_sync_up(total, offset, mask_and_clamp=0)
        total = total + vector.select(lane >= offset, below, Int32(0))
        offset *= 2
    return total - value
