"""Which ranks of a group share an NVLink domain, and which are across the network. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rose_dist.comm.layout import LayoutError


@dataclass(frozen=True)
class Topology:
    """A group's ranks by node. A node is an NVLink domain: its ranks reach one another's memory.

    nodes: the node number of every rank of the group; numbers count up from 0 in the order of the nodes' first ranks.
    rank: this one, in the group.
    """

    nodes: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, machines: Sequence[str], rank: int, force_remote: int | None = None) -> Topology:
        """The topology of the ranks on `machines`, one name a rank, equal for ranks of one machine.

        force_remote: take every so many ranks of a machine for a node, so that the others there count as remote; on
        two GPUs of one machine 1 makes all traffic take the network's way.
        """
        if force_remote is not None and force_remote < 1:
            raise ValueError(f"an emulated node has at least 1 rank, got {force_remote}")
        seen: dict[str, int] = {}
        numbers: dict[tuple[str, int], int] = {}
        nodes = []
        for machine in machines:
            place = seen.get(machine, 0)
            seen[machine] = place + 1
            part = 0 if force_remote is None else place // force_remote
            nodes.append(numbers.setdefault((machine, part), len(numbers)))
        return cls(tuple(nodes), rank)

    @property
    def node(self) -> int:
        """This rank's."""
        return self.nodes[self.rank]

    @property
    def node_count(self) -> int:
        return max(self.nodes) + 1

    @property
    def one_domain(self) -> bool:
        """No rank is across the network."""
        return self.node_count == 1

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """By node, its ranks in rank order."""
        return tuple(
            tuple(rank for rank, node in enumerate(self.nodes) if node == number) for number in range(self.node_count)
        )

    @cached_property
    def near(self) -> tuple[int, ...]:
        """The ranks of this node, this one among them, in rank order."""
        return self.members[self.node]

    @cached_property
    def far(self) -> tuple[int, ...]:
        """The ranks of other nodes in the order in which this one sends to them: the following node first, and in each
        node first the rank of its own place, so that no rank is everybody's first.
        """
        place = self.near.index(self.rank)
        order = []
        for step in range(1, self.node_count):
            others = self.members[(self.node + step) % self.node_count]
            turn = place % len(others)
            order += [*others[turn:], *others[:turn]]
        return tuple(order)

    def is_far(self, peer: int) -> bool:
        return self.nodes[peer] != self.node

    @property
    def alike(self) -> bool:
        """Nodes are equally many neighbours in rank order."""
        size = len(self.members[0])
        return self.nodes == tuple(rank // size for rank in range(len(self.nodes))) and len(self.nodes) % size == 0

    def require_rails(self) -> None:
        """Raises `LayoutError` unless every rank has one on its rail in every node, as rail forwarding needs."""
        if not self.alike:
            raise LayoutError(
                f"rail forwarding needs nodes of equally many ranks, neighbours in rank order, not {self}: "
                "place ranks by node, as many on each, or leave it out"
            )

    @property
    def rails(self) -> tuple[int, ...]:
        """Of every other node the rank on this one's rail, the following node first."""
        return tuple(self.rail((self.node + step) % self.node_count) for step in range(1, self.node_count))

    def rail(self, node: int) -> int:
        """The rank of `node` with this rank's place in its own: it sits on the same rail of the network, where the
        nodes are wired alike.
        """
        others = self.members[node]
        return others[self.near.index(self.rank) % len(others)]

    def __str__(self) -> str:
        return f"nodes of {', '.join(str(len(ranks)) for ranks in self.members)} ranks"
