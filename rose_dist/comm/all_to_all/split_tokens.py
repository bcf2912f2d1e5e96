"""Data-parallel experts under tensor-parallel attention: the TP ranks share out the tokens that they all hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from rose_dist.comm.all_to_all.agreement import agree
from rose_dist.comm.all_to_all.packing import check_dispatch, check_out
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Dispatched, Handle, Routing
from rose_dist.comm.group import Group
from rose_dist.comm.layout import even_split


class SplitHandle(Handle):
    part: slice
    """This rank's rows of the live ones."""
    inner: Handle
    dispatched: Dispatched


class SplitTokens(AllToAll):
    """Each TP rank takes a contiguous slice of the live rows, perhaps an empty one, through the all-to-all that `inner`
    builds; `combine` gathers the slices' sums from the TP group.
    """

    def __init__(self, config: AllToAllConfig, tp: Group, inner: Callable[[AllToAllConfig], AllToAll]) -> None:
        agree(config, tp)
        self.config = config
        self.tp = tp
        self.inner = inner(replace(config, max_tokens=-(-config.max_tokens // tp.size)))
        self.local_experts = self.inner.local_experts

    @property
    def rows_sent(self) -> int:  # type: ignore[override]  # read-only here
        return self.inner.rows_sent

    def dispatch_send(
        self,
        x: torch.Tensor,
        routing: Routing,
        *,
        scales: torch.Tensor | None = None,
        rows: torch.Tensor | int | None = None,
    ) -> SplitHandle:
        live = check_dispatch(self.config, x, routing, scales, rows)
        mine = even_split(live, self.tp.size, self.tp.rank)
        handle = SplitHandle(self, routing, x.shape[0], live)
        handle.part = part = slice(mine.start, mine.stop)
        handle.inner = self.inner.dispatch_send(
            x[part],
            Routing(routing.ids[part], routing.weights[part]),
            scales=None if scales is None else scales[part],
        )
        return handle

    def dispatch_recv(self, handle: Handle) -> Dispatched:
        assert isinstance(handle, SplitHandle)
        handle.enter(self, "dispatch_recv")
        handle.dispatched = self.inner.dispatch_recv(handle.inner)
        return replace(handle.dispatched, handle=handle)

    def combine_send(self, expert_out: torch.Tensor, dispatched: Dispatched) -> None:
        handle = dispatched.handle
        assert isinstance(handle, SplitHandle)
        self.inner.combine_send(expert_out, handle.dispatched)
        handle.enter(self, "combine_send")

    def combine_recv(self, dispatched: Dispatched, *, out: torch.Tensor, accumulate: bool = False) -> None:
        handle = dispatched.handle
        assert isinstance(handle, SplitHandle)
        check_out(self.config, out, handle.tokens)
        handle.enter(self, "combine_recv")
        self.inner.combine_recv(handle.dispatched, out=out[handle.part], accumulate=accumulate)
        counts = [len(even_split(handle.live, self.tp.size, rank)) for rank in range(self.tp.size)]
        out[: handle.live].copy_(self.tp.all_gather_rows(out[handle.part].contiguous(), counts))
