"""Which hosts, and which GPUs of them, the replicas of a server get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rose_dist.errors import RoseError


@dataclass(frozen=True)
class Placement:
    """One replica's."""

    hosts: tuple[str, ...]
    """`name:ranks` each; empty is this host."""
    devices: range | None
    """The numbers of its GPUs on its one host, which it shares with others; None: it has its hosts for itself."""


def place_replicas(hosts: Sequence[str], ranks: int, replicas: int) -> list[Placement]:
    """
    Args:
        hosts: `name` or `name:ranks`; they are filled in this order. Empty: all on this host.
        ranks: of each replica.

    Raises:
        RoseError: there is too little room, or a replica would have parts of several hosts of which it shares one.
    """
    total = ranks * replicas
    slots = [(name, slot) for name, count in _counted(hosts, total).items() for slot in range(count)]
    if len(slots) < total:
        raise RoseError(f"{replicas} replicas of {ranks} ranks need {total} places, but --hosts has {len(slots)}")
    parts = [slots[number * ranks : (number + 1) * ranks] for number in range(replicas)]
    users = Counter(name for part in parts for name in dict.fromkeys(name for name, _ in part))
    return [_place(number, part, users) for number, part in enumerate(parts)]


def _counted(hosts: Sequence[str], total: int) -> Counter[str]:
    if not hosts:
        return Counter({"": total})
    share = -(-total // len(hosts))
    counts = Counter[str]()
    for name, _, count in (host.partition(":") for host in hosts):
        counts[name] += int(count or share)
    return counts


def _place(number: int, part: Sequence[tuple[str, int]], users: Counter[str]) -> Placement:
    counts = Counter(name for name, _ in part)
    shared = [name for name in counts if users[name] > 1]
    if shared and len(counts) > 1:
        raise RoseError(
            f"replica {number} would have {', '.join(counts)} and share {shared[0]} with another replica: "
            "a replica has either whole hosts or a part of one; choose -n and --hosts so"
        )
    hosts = tuple(f"{name}:{count}" for name, count in counts.items() if name)
    first = part[0][1]
    return Placement(hosts, range(first, first + len(part)) if shared else None)
