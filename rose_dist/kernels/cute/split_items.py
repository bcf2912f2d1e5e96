"""The work of decode attention, on the device.

A request's keys are split into parts of whole tiles, as many and as large as its own length says. The requests' tiles,
one request after another, are a line, of which every team of blocks takes a run of about the same length: the parts
that begin in it. A team has a block for each head group, and they go through the run side by side: what lies together
in memory, a token's heads, is so read at about the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import vector
from rose_dist.kernels.attention_tiling import MIN_TILES, TILE
from rose_dist.kernels.dsl import Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.variants import WARP

AT_ONCE = 4
"""Lengths that a lane asks for before it adds up."""


@dataclass(frozen=True)
class Batch:
    """What the split of work depends on; traced values. groups: head groups. most_splits: of any request."""

    lengths: Any
    requests: Any
    live: Any
    window: Any
    most_splits: Any
    groups: Any

    def length(self, request: Any) -> Any:
        """Of a live request; 0 of any other."""
        known = vector.max_of(vector.min_of(request, self.requests - 1), Int32(0))
        stored = vector.scalar(self.lengths + Int64(known) * 4, Int32)[0]
        return vector.select(request < self.live, stored, Int32(0))

    def low(self, length: Any) -> Any:
        """The first key that the query sees."""
        return vector.max_of(length - self.window, Int32(0))

    def first(self, length: Any) -> Any:
        """That key's tile."""
        return self.low(length) // TILE

    def tiles(self, length: Any) -> Any:
        """On the line: at least one, as every request has a result."""
        return vector.max_of(self._seen(length), Int32(1))

    def splits(self, length: Any) -> Any:
        """Parts of a request's keys: they depend on nothing but its own length."""
        return vector.max_of(vector.min_of(self.tiles(length) // MIN_TILES, self.most_splits), Int32(1))

    def begins(self, length: Any, split: Any) -> Any:
        """Where a part begins in its request's tiles."""
        return Int32(Uint32(split * self.tiles(length)) // Uint32(self.splits(length)))

    def part(self, request: Any, length: Any, split: Any, place: Any, begin: Any) -> Part:
        """Part number `split` of a request whose tiles start at `place` of the line."""
        end = vector.min_of(self.begins(length, split + 1), self._seen(length))
        return Part(request, length, split, place, begin, end)

    def _seen(self, length: Any) -> Any:
        return (length + (TILE - 1)) // TILE - self.first(length)


@dataclass(frozen=True)
class Part:
    """A part of the line; traced values. request: −1 if there is none. place: where its request begins. begin, end:
    which of the request's tiles it has.
    """

    request: Any
    length: Any
    split: Any
    place: Any
    begin: Any
    end: Any

    @property
    def values(self) -> tuple[Any, ...]:
        return self.request, self.length, self.split, self.place, self.begin, self.end


def group_of_block(batch: Batch) -> Any:
    """Which head group is this block's."""
    return cute.arch.block_idx()[0] % batch.groups


def run_of_block(batch: Batch) -> tuple[Part, Any]:
    """The first part that begins in this block's run, and the run's end. By whole warps."""
    *part, end = _first_part(
        batch.lengths, batch.requests, batch.live, batch.window, batch.most_splits, batch.groups
    )  # fmt: skip
    return Part(*part), end


def after(batch: Batch, part: Part, end: Any) -> Part:
    """The part after `part`, if it begins before `end`."""
    done = part.split + 1 >= batch.splits(part.length)
    request = vector.select(done, part.request + 1, part.request)
    length = vector.select(done, batch.length(request), part.length)
    split = vector.select(done, Int32(0), part.split + 1)
    place = vector.select(done, part.place + batch.tiles(part.length), part.place)
    begin = vector.select(done, Int32(0), part.end)
    there = (request < batch.requests) & (place + begin < end)
    return batch.part(vector.select(there, request, Int32(-1)), length, split, place, begin)


def is_whole(batch: Batch, part: Part, end: Any) -> Any:
    """Whether `part` is its request's first one and all of them begin before `end`."""
    splits = batch.splits(part.length)
    return (part.split == 0) & ((splits - 1) * batch.tiles(part.length) < (end - part.place) * splits)


@cute.jit
def _first_part(
    lengths: Int64, requests: Int32, live: Int32, window: Int32, most_splits: Int32, groups: Int32
) -> Any:  # fmt: skip
    batch = Batch(lengths, requests, live, window, most_splits, groups)
    lane = cute.arch.thread_idx()[0] % WARP
    own, first = Int32(0), Int32(0)
    while first < requests:
        # Lengths of several requests are asked for at once.
        for more in range_constexpr(AT_ONCE):
            own += _tiles_of_lane(batch, first + (more * WARP) + lane)
        first += AT_ONCE * WARP
    total = cute.arch.warp_redux_sync(own, "add")
    runs = _runs(vector.max_of(live, Int32(1)), cute.arch.grid_dim()[0] // groups)
    team = cute.arch.block_idx()[0] // groups
    begin, end = _border(total, runs, team), _border(total, runs, team + 1)
    # 32 requests at a time, a lane for each.
    request, length, before, first = Int32(-1), Int32(0), Int32(0), Int32(0)
    while (first < requests) & (request < 0):
        tiles = _tiles_of_lane(batch, first + lane)
        upto = _sum_up_to(tiles, lane)
        count = cute.arch.shuffle_sync(upto, WARP - 1)
        if begin >= before + count:
            first += WARP
            before += count
        else:
            begun = before + upto - tiles
            owner = cute.arch.warp_redux_sync(vector.select(begun <= begin, lane, Int32(0)), "max")
            request, before = first + owner, cute.arch.shuffle_sync(begun, owner)
            length = batch.length(request)
    part = _from(batch, request, length, before, begin, end)
    there = vector.select(request >= 0, part.request, Int32(-1))
    return there, *part.values[1:], end


def _from(batch: Batch, request: Any, length: Any, place: Any, begin: Any, end: Any) -> Part:
    """The first part from `begin` on, which lies in the work of `request`; that begins at `place`."""
    # The last part that begins before, −1 for none.
    split = ((begin - place) * batch.splits(length) + batch.tiles(length) - 1) // batch.tiles(length) - 1
    return after(batch, batch.part(request, length, split, place, Int32(0)), end)


def _runs(live: Any, teams: Any) -> Any:
    """Into how many runs the line is cut: one a team, or up to a sixteenth fewer so that requests of one length have
    whole runs, or runs whole requests. Less is then merged through memory.
    """
    each = _divide(live + teams - 1, teams)
    even = vector.select(live < teams, _divide(teams, live) * live, _divide(live, each))
    return vector.select(even * 16 >= teams * 15, even, teams)


def _border(tiles: Any, runs: Any, run: Any) -> Any:
    """Where a run begins of `runs` of equal length; from the last one's end on behind the line."""
    each = _divide(tiles, runs)
    return run * each + _divide(run * (tiles - each * runs), runs)


def _divide(value: Any, by: Any) -> Any:
    """Neither is negative."""
    return Int32(Uint32(value) // Uint32(by))


def _tiles_of_lane(batch: Batch, request: Any) -> Any:
    return vector.select(request < batch.requests, batch.tiles(batch.length(request)), Int32(0))


def _sum_up_to(value: Any, lane: Any) -> Any:
    """Of the lanes up to this one."""
    total, offset = value, 1
    while offset < WARP:
        below = cute.arch.shuffle_sync_up(total, offset, mask_and_clamp=0)
        total = total + vector.select(lane >= offset, below, Int32(0))
        offset *= 2
    return total
