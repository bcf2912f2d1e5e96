"""Where the experts of one layer are, and how much each was chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.comm.expert_placement import Placement
from rose_dist.kernels.expert_map import map_experts
from rose_dist.kernels.routing import Router, route

COUNTED_BY_ROUTER = 256
"""Tokens. Of more a launch of its own counts: the router adds with a few lanes of each warp, and its ids come only when
all has been added. H200, from a prompt's logits to slots: 10.1 instead of 15.2 us for 1,024 tokens, 14.2 instead of
23.3 for 4,000; in a decode step of 128 it is 0.8 us the other way.
"""


class ExpertMap:
    """From the experts that the router names to the slots that the exchange knows, and the experts' load.

    The tensors stay where they are, so that captured graphs see a new placement.
    """

    def __init__(self, placement: Placement, replica: int, load: Tensor) -> None:
        """
        Args:
            replica: number of the data-parallel replica; replicas begin with different slots of an expert.
            load: int64 [experts], pairs of token and place that chose each since start.
        """
        self.replica = replica
        self.load = load
        self.placement = placement
        self._table = torch.from_numpy(placement.table()).to(load.device)
        self._single = placement.ranks == 1

    @property
    def table(self) -> Tensor | None:
        """As `map_experts` takes it; None: slots are experts."""
        return None if self._single else self._table

    def route(self, logits: Tensor, router: Router, live_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The slots that each token goes to, int32 [tokens, top_k], −1 from token `live_rows` on, and their weights,
        fp32; counts the live ones.
        """
        if self.table is None and len(logits) <= COUNTED_BY_ROUTER:
            chosen = route(logits, router, load=self.load, live_rows=live_rows)
            return chosen.ids, chosen.weights
        chosen = route(logits, router, live_rows=live_rows)
        slots = map_experts(chosen.ids, self.load, self.table, turn=self.replica, live_rows=live_rows)
        return slots, chosen.weights

    def place(self, placement: Placement) -> None:
        """From now on experts are there; it has as many slots as the one before."""
        self.placement = placement
        self._table.copy_(torch.from_numpy(placement.table()))
