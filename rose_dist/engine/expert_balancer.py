"""How evenly the experts' work falls on the ranks, and rearranging it between two steps."""

from __future__ import annotations

import logging
import time

import torch

from rose_dist.comm.expert_moves import move_experts
from rose_dist.comm.expert_placement import balance, solve
from rose_dist.comm.world import Groups
from rose_dist.engine.transfer import ToHost
from rose_dist.models.gpt_oss import GptOssForCausalLM

logger = logging.getLogger(__name__)


class ExpertBalancer:
    """Rearranges the experts by the load since the last time, or since start."""

    def __init__(self, model: GptOssForCausalLM, groups: Groups) -> None:
        self._model = model
        self._groups = groups
        self._before = torch.zeros_like(model.expert_load, device="cpu")
        self.rebalances = 0
        self.bytes_received = 0
        """By this rank, of weights that were moved."""

    def load(self) -> ToHost:
        """int64 [layers, experts] of this rank's tokens since start."""
        return ToHost.of(self._model.expert_load)

    def rows_sent(self) -> ToHost:
        """int64 [1], to experts of other ranks since start."""
        return ToHost.of(self._model.rows_sent)

    def balance(self, load: torch.Tensor) -> float:
        """Of [layers, experts] under the present placement: see `expert_placement.balance`."""
        return balance((layer.expert_map.placement for layer in self._model.moe_layers), load.numpy())

    def rebalance(self) -> None:
        """Collective over the lockstep group, between two steps. Tokens don't change by it, except for rounding where
        experts are summed rank by rank (`TensorParallel`).
        """
        started = time.monotonic()
        groups, layers = self._groups, self._model.moe_layers
        now = self.load().result().clone()
        own = (now - self._before) * (groups.tp.rank == 0)  # tensor-parallel ranks count the same tokens
        self._before = now
        load = torch.tensor(groups.lockstep.all_reduce_sum(own.flatten().tolist())).view_as(own)
        if not load.any():
            return
        uneven = self.balance(load)
        received = 0
        for layer, counts in zip(layers, load.numpy(), strict=True):
            placement = layer.expert_map.placement
            after = solve(counts, placement.ranks, len(placement.slots), placement)
            received += move_experts(placement, after, groups.ep, list(layer.experts.parameters()))
            layer.expert_map.place(after)
        self.rebalances += 1
        self.bytes_received += received
        logger.info(
            "experts rearranged in %.2f s: evenness of the ranks' work %.2f, before %.2f; %.1f MB came to this rank",
            time.monotonic() - started,
            self.balance(load),
            uneven,
            received / 1e6,
        )
