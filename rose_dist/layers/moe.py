"""The mixture-of-experts block: router, exchange, experts."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from rose_dist.comm.all_to_all.protocol import AllToAll, Dispatched, Routing
from rose_dist.kernels import layer_meeting, mxfp4_e4m3
from rose_dist.kernels.combine_norm import takes as takes_rows
from rose_dist.kernels.formats import FP8
from rose_dist.kernels.handover import Handover
from rose_dist.kernels.handover import takes as takes_choice
from rose_dist.kernels.moe_dispatch import PackedRows
from rose_dist.kernels.mxfp4_experts import ExpertRows
from rose_dist.kernels.quantize import quantize
from rose_dist.kernels.route_rows import route_rows
from rose_dist.kernels.route_rows import takes as takes_router
from rose_dist.kernels.routing import Router
from rose_dist.kernels.swiglu import Rows
from rose_dist.kernels.variants import EXPERT_GEMM_ROWS, Ranges
from rose_dist.layers.expert_map import ExpertMap
from rose_dist.layers.expert_matrices import MoeActivations
from rose_dist.layers.experts import Experts
from rose_dist.layers.linear import Linear
from rose_dist.layers.norm import RMSNorm


class MoE(nn.Module):
    """router → dispatch → experts → combine."""

    def __init__(
        self, hidden: int, experts: Experts, top_k: int, exchange: AllToAll, expert_map: ExpertMap, *,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden = hidden
        self.expert_map = expert_map
        self.router = Linear(hidden, experts.held.num_experts, dtype=dtype)
        self.experts = experts
        self.rule = Router(top_k)
        self.exchange = exchange

    def add(
        self, x: Tensor, residual: Tensor, after: RMSNorm, live_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """after(total) and total, which is `residual` plus the block's results for `x`, complete on every rank.

        Args:
            x, residual: [tokens, hidden]; `residual` may be overwritten.
            live_rows: int32 [1]; rows from there on hold anything.
        """
        routing = Routing(*self.expert_map.route(self.router(x), self.rule, live_rows))
        dispatched = self._dispatch(x, routing, live_rows)
        rows = ExpertRows(
            dispatched.counts, dispatched.offsets, self._most_rows(x.shape[0]), dispatched.layout,
            self._listed(dispatched, routing), dispatched.groups,
        )  # fmt: skip
        expert_out = self.experts(dispatched.x, rows, dispatched.scales)
        if self.exchange.packs_only and takes_rows(self.hidden, x.dtype):
            return self.exchange.combine_norm(expert_out, dispatched, residual, after.weight, after.eps), residual
        out = torch.empty_like(x)
        self.exchange.combine(expert_out, dispatched, out=out, bias=self.experts.late_bias)
        return after.add(out, residual)

    def _dispatch(self, x: Tensor, routing: Routing, live_rows: Tensor | None) -> Dispatched:
        """Rows travel in FP8 where the exchange has room for scales: they are quantised once, not once an expert."""
        if not self.exchange.config.scale_dim:
            return self.exchange.dispatch(x, routing, rows=live_rows)
        codes, scales = quantize(x, FP8, live_rows=live_rows)
        return self.exchange.dispatch(codes, routing, scales=scales, rows=live_rows)

    def _listed(self, dispatched: Dispatched, routing: Routing) -> Rows | None:
        """Experts that take quantised rows go by the pairs, and not by rows of which many are padding."""
        if dispatched.scales is None or dispatched.slots is None:
            return None
        first = self.exchange.local_experts.start
        return Rows(places=dispatched.slots.flatten(), experts=routing.ids.flatten(), first_expert=first)

    @property
    def takes_few(self) -> bool:
        """Whether `add_few` serves this block on a GPU."""
        few = self.exchange.packs_only
        return few and takes_router(self.router.weight, self.rule) and takes_rows(self.hidden, self.router.weight.dtype)

    def add_few(
        self, x: Tensor, norm: RMSNorm, after: RMSNorm, live_rows: Tensor | None, ahead: Tensor | None
    ) -> Tensor:
        """Add the block's results for norm(x) to `x`, in place; returns after(x).

        x: [tokens, hidden], up to `MAX_ROWS` tokens. As `add` behind the norm before it, in two besides the
        experts', three or more with several ranks. ahead: the weights that are read next.
        """
        router, expert_map, handover = self.router, self.expert_map, self._handover(x)

        def pack(packed: PackedRows) -> Routing:
            routed = route_rows(
                x, norm.weight, norm.eps, router.weight, router.bias, self.rule, expert_map.load, packed,
                first_expert=self.exchange.local_experts.start, table=expert_map.table, turn=expert_map.replica,
                live_rows=live_rows, handover=handover,
            )  # fmt: skip
            return Routing(routed.ids, routed.weights)

        dispatched = self.exchange.dispatch_packed(x.shape[0], pack)
        rows = ExpertRows(dispatched.counts, dispatched.offsets, self._most_rows(x.shape[0]), handover=handover)
        expert_out = self.experts(dispatched.x, rows, ahead=ahead)
        return self.exchange.combine_norm(expert_out, dispatched, x, after.weight, after.eps)

    def _handover(self, x: Tensor) -> Handover | None:
        """For a single token, where its experts take one."""
        if x.shape[0] != 1 or not self.experts.takes_handover:
            return None
        if not takes_choice(len(self.exchange.local_experts), self.rule.k):
            return None
        return layer_meeting.meeting(x.device).handover(self.hidden)

    def _most_rows(self, tokens: int) -> int:
        return most_rows(tokens, self.rule.k, self.experts.held.num_experts)


def most_rows(tokens: int, top_k: int, experts: int) -> int:
    """Rows of the largest expert, three standard deviations above the mean of an even spread, and one a token at most:
    a single token then takes the kernel for one row whatever the number of experts.
    """
    mean = tokens * top_k / experts
    return min(tokens, math.ceil(mean + 3 * math.sqrt(mean)))


def many_rows(top_k: int, experts: int, activations: MoeActivations) -> Ranges[torch.dtype | None]:
    """By tokens, the dtype of the rows, in groups, that Hopper's MXFP4 kernels of many rows take; None: of few rows."""
    chosen = {0: None, EXPERT_GEMM_ROWS: torch.bfloat16}
    if activations == "fp8":
        chosen[mxfp4_e4m3.LEAST_ROWS] = torch.uint8
    by_tokens = {
        next(tokens for tokens in itertools.count() if most_rows(tokens, top_k, experts) >= rows): dtype
        for rows, dtype in chosen.items()
    }
    return Ranges(tuple(by_tokens), tuple(by_tokens.values()))
