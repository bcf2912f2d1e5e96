"""How a job's ranks share the work: which ranks hold which heads, tokens and experts. Pure arithmetic, no MPI."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rose_dist.errors import RoseError

MoeMode = Literal["tensor_parallel", "data_parallel"]


class LayoutError(RoseError, ValueError):
    """The sizes asked for don't divide the world; the message lists those that do."""


def even_split(total: int, parts: int, index: int) -> range:
    """Part `index` of `range(total)` cut into `parts` contiguous parts; the first `total % parts` have one more."""
    size, longer = divmod(total, parts)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


@dataclass(frozen=True)
class Layout:
    """tp · dp = world ranks. `Layout.of` fills in what is not given.

    Attention: rank = dp_rank · tp + tp_rank; the tp ranks of a data-parallel replica are neighbours and hold the
    same tokens. Experts are held by groups of `ep` ranks, ep any divisor of the world, so that the world holds
    world / ep copies of every expert:

    - `tensor_parallel` (ep divides tp): the tokens are there already, on every rank of the TP group. Experts are
      split over ep shards, each expert's intermediate dimension over expert_tp = tp / ep slices, and the sum over
      the TP group completes the layer. Replicas exchange nothing.
    - `data_parallel` (any other ep): experts are whole. EP groups are contiguous blocks of ep ranks. Each rank
      stands for a contiguous slice of its replica's tokens, sends them to the experts and takes the results back;
      the TP group then gathers its slices.
    """

    world: int
    tp: int
    dp: int
    ep: int

    def __post_init__(self) -> None:
        if min(self.world, self.tp, self.dp, self.ep) < 1:
            raise LayoutError(f"world, tp, dp and ep are at least 1, got {self} over {self.world} ranks")
        if self.tp * self.dp != self.world or self.world % self.ep:
            raise LayoutError(f"{self} does not divide {_ranks(self.world)}. {describe_choices(self.world)}")

    @classmethod
    def of(cls, world: int, tp: int | None = None, dp: int | None = None, ep: int | None = None) -> Layout:
        """The layout with the sizes given; tp defaults to world / dp, or 1, dp to world / tp and ep to the world.

        Raises `LayoutError` if they don't divide the world.
        """
        for name, size in (("tp", tp), ("dp", dp), ("ep", ep)):
            if size is not None and (size < 1 or world % size):
                raise LayoutError(f"{name} {size} does not divide {_ranks(world)}. {describe_choices(world)}")
        if tp is None:
            tp = 1 if dp is None else world // dp
        return cls(world, tp, world // tp if dp is None else dp, world if ep is None else ep)

    def __str__(self) -> str:
        return f"tp{self.tp} dp{self.dp} ep{self.ep}"

    @property
    def moe_mode(self) -> MoeMode:
        return "tensor_parallel" if self.tp % self.ep == 0 else "data_parallel"

    @property
    def expert_tp(self) -> int:
        """Slices of each expert's intermediate dimension."""
        return self.tp // self.ep if self.moe_mode == "tensor_parallel" else 1

    @property
    def lockstep(self) -> int:
        """Ranks that must run the same number of steps: contiguous blocks of this many.

        A border between two blocks must be one of TP groups and of EP groups alike.
        """
        return math.lcm(self.tp, self.ep)

    def expert_range(self, ep_rank: int, num_experts: int) -> range:
        """The experts of one shard: contiguous, the first `num_experts % ep` shards hold one more."""
        return even_split(num_experts, self.ep, ep_rank)

    def at(self, rank: int) -> Place:
        """One rank's place."""
        return Place(self, rank)


@dataclass(frozen=True)
class Place:
    """One rank's coordinates, and the world ranks it shares each group with, in group order."""

    layout: Layout
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.layout.world:
            raise LayoutError(f"rank {self.rank} is not in 0…{self.layout.world - 1}")

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.layout.tp

    @property
    def ep_rank(self) -> int:
        """The expert shard that this rank holds (all of it, or one slice)."""
        if self.layout.moe_mode == "tensor_parallel":
            return self.tp_rank // self.layout.expert_tp
        return self.rank % self.layout.ep

    @property
    def expert_slice(self) -> int:
        """Which of the `expert_tp` slices of its experts' intermediate dimension this rank holds."""
        return self.tp_rank % self.layout.expert_tp

    @cached_property
    def tp_members(self) -> range:
        return block(self.rank, self.layout.tp)

    @cached_property
    def ep_members(self) -> range:
        """The ranks that hold the other shards: of the same slice where experts are sliced, by ep_rank."""
        if self.layout.moe_mode == "tensor_parallel":
            return self.tp_members[self.expert_slice :: self.layout.expert_tp]
        return block(self.rank, self.layout.ep)

    @cached_property
    def lockstep_members(self) -> range:
        return block(self.rank, self.layout.lockstep)

    def expert_range(self, num_experts: int) -> range:
        """The experts that this rank holds, whole or one slice of each."""
        return self.layout.expert_range(self.ep_rank, num_experts)


def block(rank: int, size: int) -> range:
    """The contiguous block of `size` ranks that holds `rank`."""
    start = rank - rank % size
    return range(start, start + size)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def choices(world: int) -> Iterator[Layout]:
    """Every layout of `world` ranks."""
    for tp in divisors(world):
        for ep in divisors(world):
            yield Layout(world, tp, world // tp, ep)


def describe_choices(world: int) -> str:
    """For error messages: the sizes that divide `world` ranks."""
    if world == 1:
        return "More ranks are started by `rose launch -n RANKS -- …`, mpirun or srun."
    pairs = ", ".join(f"tp{tp} dp{world // tp}" for tp in divisors(world))
    sizes = ", ".join(str(ep) for ep in divisors(world))
    return f"Possible on {world} ranks: {pairs}; each with ep one of {sizes}."


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
