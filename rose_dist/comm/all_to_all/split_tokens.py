"""Data-parallel experts under tensor-parallel attention: the TP ranks share out the tokens that they all hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from rose_dist.comm.all_to_all.agreement import agree
from rose_dist.comm.all_to_all.packing import check_dispatch, check_out, check_shapes
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Dispatched, Handle, Routing
from rose_dist.comm.all_to_all.tensor_parallel import check_fits
from rose_dist.comm.group import Group
from rose_dist.comm.layout import even_split
from rose_dist.comm.symmetric_memory import Ranks
from rose_dist.kernels.all_reduce import AllReduce


class SplitHandle(Handle):
    part: slice
    """This rank's rows of the live ones; on a GPU, of all."""
    live_rows: torch.Tensor | None
    inner: Handle
    dispatched: Dispatched


class SplitTokens(AllToAll):
    """Each TP rank takes a contiguous slice of the live rows, perhaps an empty one, through the all-to-all that `inner`
    builds; `combine` gathers the slices' sums from the TP group.

    On a GPU, where the host doesn't know how many rows are live, slices are of all rows, and the gathering is a sum in
    which other ranks' rows are −0: x + −0 has the bits of x, whatever x is. `out` then has the all-reduce's dtype.
    """

    def __init__(
        self, config: AllToAllConfig, tp: Ranks, inner: Callable[[AllToAllConfig], AllToAll],
        all_reduce: AllReduce | None = None,
    ) -> None:  # fmt: skip
        """`all_reduce`: of the TP group, for rows of `config.hidden` and `config.max_tokens`; needed on GPUs, else `tp`
        must be a `Group`.
        """
        agree(config, tp)
        if all_reduce is not None:
            check_fits(all_reduce, config)
        self.config = config
        self.tp = tp
        self.all_reduce = all_reduce
        self.inner = inner(part_of(config, tp.size))
        self.local_experts = self.inner.local_experts

    @property
    def rows_sent(self) -> torch.Tensor:  # type: ignore[override]  # read-only here
        return self.inner.rows_sent

    def dispatch_send(
        self,
        x: torch.Tensor,
        routing: Routing,
        *,
        scales: torch.Tensor | None = None,
        rows: torch.Tensor | int | None = None,
    ) -> SplitHandle:
        if isinstance(rows, torch.Tensor) and x.is_cuda:
            check_shapes(self.config, x, routing, scales)
            live, live_rows = x.shape[0], rows
        else:
            live, live_rows = check_dispatch(self.config, x, routing, scales, rows), None
        mine = even_split(live, self.tp.size, self.tp.rank)
        handle = SplitHandle(self, routing, x.shape[0], live)
        handle.part, handle.live_rows = slice(mine.start, mine.stop), live_rows
        part = handle.part
        handle.inner = self.inner.dispatch_send(
            x[part],
            Routing(routing.ids[part], routing.weights[part]),
            scales=None if scales is None else scales[part],
            rows=None if live_rows is None else _rows_of(live_rows, mine),
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
        if self.all_reduce is not None:
            self._gather_by_sum(self.all_reduce, handle, out, accumulate)
            return
        assert isinstance(self.tp, Group)
        self.inner.combine_recv(handle.dispatched, out=out[handle.part], accumulate=accumulate)
        counts = [len(even_split(handle.live, self.tp.size, rank)) for rank in range(self.tp.size)]
        out[: handle.live].copy_(self.tp.all_gather_rows(out[handle.part].contiguous(), counts))

    def check(self) -> None:
        self.inner.check()
        if self.all_reduce is not None:
            self.all_reduce.check()

    def _gather_by_sum(self, all_reduce: AllReduce, handle: SplitHandle, out: torch.Tensor, accumulate: bool) -> None:
        whole = torch.empty(handle.live, self.config.hidden, dtype=out.dtype, device=out.device).fill_(-0.0)
        if accumulate:
            whole[handle.part].copy_(out[handle.part])
        self.inner.combine_recv(handle.dispatched, out=whole[handle.part], accumulate=accumulate)
        if handle.live:
            all_reduce(whole, out[: handle.live], live_rows=handle.live_rows)


def _rows_of(live_rows: torch.Tensor, part: range) -> torch.Tensor:
    """int32 [1], how many rows of `part` are live."""
    rows = torch.empty(1, dtype=torch.int32, device=live_rows.device)
    return torch.sub(live_rows, part.start, out=rows).clamp_(0, len(part))


def part_of(config: AllToAllConfig, tp: int) -> AllToAllConfig:
    """What one of `tp` ranks that share out the tokens needs."""
    return replace(config, max_tokens=-(-config.max_tokens // tp))
