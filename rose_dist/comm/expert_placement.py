"""Which rank holds which experts, where popular ones may be held several times. Pure data.

Tokens choose experts; a rank holds *slots*, each with one expert's weights. There are as many slots as experts, and the
redundant ones; rank r of the expert group has those that `even_split` gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rose_dist.comm.layout import LayoutError, even_split

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """The experts of one layer.

    slots: by slot, the expert that it holds; every expert has at least one slot.
    """

    num_experts: int
    ranks: int
    slots: tuple[int, ...]

    @classmethod
    def initial(cls, num_experts: int, ranks: int, redundant: int = 0) -> Placement:
        """Before any load is known. Raises `LayoutError` for a number of redundant slots that can't be of use."""
        most = num_experts * (ranks - 1)
        if not 0 <= redundant <= most:
            raise LayoutError(
                f"{redundant} redundant experts, but {num_experts} experts over {ranks} ranks have use for 0 to "
                f"{most}: a rank never holds the same expert twice"
            )
        if not redundant:
            return cls(num_experts, ranks, tuple(range(num_experts)))
        return solve(np.ones(num_experts), ranks, num_experts + redundant)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The experts that a rank holds, by its slots."""
        mine = even_split(len(self.slots), self.ranks, rank)
        return self.slots[mine.start : mine.stop]

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """By expert, its slots."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slots):
            found[expert].append(slot)
        return tuple(map(tuple, found))

    @property
    def width(self) -> int:
        """Columns of `table`: the same for every placement of so many slots."""
        return 1 + min(self.ranks, 1 + len(self.slots) - self.num_experts)

    def table(self) -> Int32Array:
        """[experts, width]: the number of an expert's slots, then these slots; the rest is −1."""
        table = np.full((self.num_experts, self.width), -1, np.int32)
        for expert, slots in enumerate(self.replicas):
            table[expert, 0] = len(slots)
            table[expert, 1 : 1 + len(slots)] = slots
        return table

    def rank_loads(self, load: npt.ArrayLike) -> FloatArray:
        """[ranks], from the experts' [experts]: an expert's slots share its load."""
        loads: FloatArray = np.asarray(load, np.float64) @ self._shares
        return loads

    @cached_property
    def _shares(self) -> FloatArray:
        """[experts, ranks]: what part of an expert's load falls on each rank."""
        shares = np.zeros((self.num_experts, self.ranks))
        for rank in range(self.ranks):
            for expert in self.of_rank(rank):
                shares[expert, rank] += 1 / len(self.replicas[expert])
        return shares


def balance(placements: Iterable[Placement], loads: Iterable[npt.ArrayLike]) -> float:
    """How even the ranks' work is, over layers: Σ mean / Σ maximum of the ranks' loads. 1 is even; 1 / ranks is all on
    one. Every layer waits for its busiest rank.
    """
    rows = [placement.rank_loads(load) for placement, load in zip(placements, loads, strict=True)]
    busiest = sum(row.max() for row in rows)
    return float(sum(row.mean() for row in rows) / busiest) if busiest else 1.0


def solve(load: npt.ArrayLike, ranks: int, slots: int, before: Placement | None = None) -> Placement:
    """A placement that evens out the ranks' loads, greedily, as DeepSeek's EPLB does: each redundant slot goes to the
    expert with the largest load a slot; then, the largest first, each replica to the least loaded rank that has room
    and not yet this expert.

    The result depends on the arguments alone. `before` keeps experts where they are as far as that changes no load:
    which rank takes which bundle, and which slot of the rank.
    """
    weights = np.asarray(load, np.float64)
    counts = _replicate(weights, ranks, slots)
    sizes = [len(even_split(slots, ranks, rank)) for rank in range(ranks)]
    bundles = _pack(weights / counts, counts, sizes)
    if before is not None:
        bundles = _stay(bundles, before)
    return Placement(len(weights), ranks, tuple(expert for bundle in bundles for expert in bundle))


def _replicate(weights: FloatArray, ranks: int, slots: int) -> npt.NDArray[np.int64]:
    """[experts], slots of each, at most one a rank."""
    counts = np.ones(len(weights), np.int64)
    for _ in range(slots - len(weights)):
        counts[np.where(counts < ranks, weights / counts, -1.0).argmax()] += 1
    return counts


def _pack(shares: FloatArray, counts: npt.NDArray[np.int64], sizes: Sequence[int]) -> list[list[int]]:
    """By rank, the experts of its slots."""
    bundles: list[list[int]] = [[] for _ in sizes]
    loads = [0.0] * len(sizes)
    for expert in np.argsort(-shares, kind="stable").tolist():
        for _ in range(int(counts[expert])):
            room = [rank for rank, size in enumerate(sizes) if len(bundles[rank]) < size]
            free = [rank for rank in room if expert not in bundles[rank]]
            rank = min(free, key=lambda rank: (loads[rank], rank), default=None)
            if rank is None:
                rank = _swap_in(expert, bundles, loads, shares, room[0])
            else:
                bundles[rank].append(expert)
            loads[rank] += shares[expert]
    return bundles


def _swap_in(expert: int, bundles: list[list[int]], loads: list[float], shares: FloatArray, room: int) -> int:
    """Every rank with room has `expert`: a full rank without it takes it and gives another to rank `room`.

    There is such a pair: a full rank whose experts `room` all had would have fewer slots than `room`, by more than one.
    """
    for rank, bundle in enumerate(bundles):
        if expert not in bundle:
            for place, other in enumerate(bundle):
                if other not in bundles[room]:
                    bundle[place] = expert
                    bundles[room].append(other)
                    loads[rank] -= shares[other]
                    loads[room] += shares[other]
                    return rank
    raise AssertionError("no rank can give way")


def _stay(bundles: list[list[int]], before: Placement) -> list[list[int]]:
    """The bundles, handed to those ranks of the same size that hold most of each; kept experts keep their slots."""
    held = [before.of_rank(rank) for rank in range(before.ranks)]
    overlaps = sorted(
        (-len({*bundle} & {*held[rank]}), rank, number)
        for number, bundle in enumerate(bundles)
        for rank in range(before.ranks)
        if len(bundle) == len(held[rank])
    )
    chosen: dict[int, int] = {}
    for _, rank, number in overlaps:
        if rank not in chosen and number not in chosen.values():
            chosen[rank] = number
    return [_keep_slots(bundles[chosen[rank]], held[rank]) for rank in range(before.ranks)]


def _keep_slots(bundle: list[int], held: Sequence[int]) -> list[int]:
    new = iter(expert for expert in bundle if expert not in held)
    return [expert if expert in bundle else next(new) for expert in held]
