"""Ranks built for different sizes would hang or read each other's rows wrongly: find out at construction."""

from __future__ import annotations

from dataclasses import fields

from rose_dist.comm.all_to_all.protocol import AllToAllConfig
from rose_dist.comm.symmetric_memory import Ranks
from rose_dist.kernels.exchange_layout import ExchangeLayout


def agree(config: AllToAllConfig | ExchangeLayout, group: Ranks) -> None:
    """Raise `ValueError` on every rank if any rank's sizes differ from the others'. Collective."""
    given = group.all_gather_objects(config)
    for field in fields(config):
        values = [getattr(other, field.name) for other in given]
        if len(set(values)) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"the ranks of this all-to-all disagree on {field.name}: {listing}")
