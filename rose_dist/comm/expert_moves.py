"""Moving experts' weights between ranks, so that every slot holds what a new placement says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rose_dist.comm.expert_placement import Placement
from rose_dist.comm.group import Group
from rose_dist.comm.layout import even_split


@dataclass(frozen=True)
class Move:
    """One slot's new content, from a slot of the old placement. Slots count over all ranks."""

    source_rank: int
    source: int
    target_rank: int
    target: int


def plan(before: Placement, after: Placement) -> list[Move]:
    """A move for every slot whose expert changes, in the order of source ranks, then of target ranks, then of slots.

    A rank that holds the expert already copies it; else the expert's old slots serve in turn.
    """
    slots, ranks = len(before.slots), before.ranks
    owners = [rank for rank in range(ranks) for _ in even_split(slots, ranks, rank)]
    moves = []
    for target, expert in enumerate(after.slots):
        if before.slots[target] != expert:
            sources = before.replicas[expert]
            near = [source for source in sources if owners[source] == owners[target]]
            source = near[0] if near else sources[target % len(sources)]
            moves.append(Move(owners[source], source, owners[target], target))
    return sorted(moves, key=lambda move: (move.source_rank, move.target_rank, move.target))


def move_experts(before: Placement, after: Placement, group: Group, tensors: Sequence[torch.Tensor]) -> int:
    """Rewrite `tensors` in place, each [this rank's slots, …], on any device. Collective over `group`, the ranks of
    both placements.

    Returns:
        Bytes that this rank received from others.
    """
    moves = plan(before, after)
    first = even_split(len(before.slots), before.ranks, group.rank).start
    mine = [move for move in moves if move.target_rank == group.rank]
    outgoing = [move for move in moves if move.source_rank == group.rank != move.target_rank]
    incoming = [move for move in mine if move.source_rank != group.rank]
    local = [move for move in mine if move.source_rank == group.rank]
    to = [sum(move.target_rank == rank for move in outgoing) for rank in range(group.size)]
    source = [sum(move.source_rank == rank for move in incoming) for rank in range(group.size)]
    received = 0
    for tensor in tensors:

        def slots(numbers: Iterable[int], tensor: torch.Tensor = tensor) -> torch.Tensor:
            return torch.tensor([number - first for number in numbers], dtype=torch.int64, device=tensor.device)

        kept = tensor[slots(move.source for move in local)]  # a copy: what is written next may be a source too
        size = tensor.element_size() * math.prod(tensor.shape[1:])
        # Of usual strides: what indexing returns can't be taken as bytes where its last dimension is 1.
        leaving = torch.empty(len(outgoing), *tensor.shape[1:], dtype=tensor.dtype)
        leaving.copy_(tensor[slots(move.source for move in outgoing)])
        sent = leaving.view(torch.uint8).reshape(len(outgoing), size)
        arrived = sent.new_empty(len(incoming), size)
        group.all_to_all_rows(sent, to, arrived, source)
        rows = arrived.view(tensor.dtype).view(len(incoming), *tensor.shape[1:])
        tensor[slots(move.target for move in local)] = kept
        tensor[slots(move.target for move in incoming)] = rows.to(tensor.device)
        received += arrived.nbytes
    return received
