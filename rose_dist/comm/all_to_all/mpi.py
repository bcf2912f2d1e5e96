"""Rows by MPI between CPU ranks; the reference that every other all-to-all is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rose_dist.comm.all_to_all.agreement import agree
from rose_dist.comm.all_to_all.packing import (
    Int64Array,
    Packing,
    check_combine,
    check_dispatch,
    check_out,
    starts,
    weighted_sum,
    write_out,
)
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Dispatched, Handle, Routing
from rose_dist.comm.group import Group
from rose_dist.comm.layout import even_split

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiHandle(Handle):
    packing: Packing
    sent: list[int]
    """Rows to each rank, in rank order."""
    received: list[int]
    """Rows from each rank."""
    counts: Int64Array
    """[ranks, local experts], rows received."""
    outgoing: torch.Tensor
    incoming: torch.Tensor
    request: MPI.Request
    order: torch.Tensor
    """The received row that stands at each place in expert order."""


class Mpi(AllToAll):
    """Two exchanges a dispatch, the rows each rank has for each expert and the rows themselves, and one a combine.

    Rows travel once a (token, expert) pair, scales behind each row's data; the results come back unweighted, so that
    the sum at the source has the order of the top k.
    """

    def __init__(self, config: AllToAllConfig, group: Group) -> None:
        agree(config, group)
        self.config = config
        self.group = group
        self.local_experts = even_split(config.num_experts, group.size, group.rank)
        self.rows_sent = 0
        shares = [even_split(config.num_experts, group.size, rank) for rank in range(group.size)]
        self._expert_counts = [len(share) for share in shares]
        self._first_experts = [share.start for share in shares]

    def dispatch_send(
        self,
        x: torch.Tensor,
        routing: Routing,
        *,
        scales: torch.Tensor | None = None,
        rows: torch.Tensor | int | None = None,
    ) -> MpiHandle:
        live = check_dispatch(self.config, x, routing, scales, rows)
        handle = MpiHandle(self, routing, x.shape[0], live)
        handle.packing = packing = Packing.of(routing.ids[:live].numpy(), range(self.config.num_experts))
        handle.counts = self._exchange_counts(packing.counts)
        borders = starts(packing.counts)
        handle.sent = np.diff(borders[self._first_experts], append=borders[-1]).tolist()
        handle.received = handle.counts.sum(1).tolist()
        self.rows_sent += sum(handle.sent) - handle.sent[self.group.rank]
        index = torch.from_numpy(packing.tokens)
        handle.outgoing = join_rows(x.index_select(0, index), None if scales is None else scales.index_select(0, index))
        handle.incoming = handle.outgoing.new_empty(sum(handle.received), handle.outgoing.shape[1])
        handle.request = self.group.start_all_to_all_rows(
            handle.outgoing, handle.sent, handle.incoming, handle.received
        )
        return handle

    def _exchange_counts(self, counts: Int64Array) -> Int64Array:
        """This rank's rows for every expert to all ranks' rows for this rank's experts, [ranks, local experts]."""
        mine = len(self.local_experts)
        received = torch.empty(self.group.size * mine, dtype=torch.int64)
        self.group.all_to_all_rows(torch.from_numpy(counts), self._expert_counts, received, [mine] * self.group.size)
        result: Int64Array = received.numpy().reshape(self.group.size, mine)
        return result

    def dispatch_recv(self, handle: Handle) -> Dispatched:
        assert isinstance(handle, MpiHandle)
        handle.enter(self, "dispatch_recv")
        handle.request.Wait()
        handle.order = torch.from_numpy(expert_order(handle.counts))
        x, scales = split_rows(handle.incoming.index_select(0, handle.order), self.config)
        counts = handle.counts.sum(0)
        return Dispatched(
            x=x,
            scales=scales,
            counts=torch.from_numpy(counts).int(),
            offsets=torch.from_numpy(starts(counts)),
            handle=handle,
        )

    def combine_send(self, expert_out: torch.Tensor, dispatched: Dispatched) -> None:
        handle = dispatched.handle
        assert isinstance(handle, MpiHandle)
        check_combine(self.config, expert_out, dispatched.x.shape[0])
        handle.enter(self, "combine_send")
        handle.outgoing = torch.empty_like(expert_out).index_copy_(0, handle.order, expert_out)
        handle.incoming = expert_out.new_empty(sum(handle.sent), self.config.hidden)
        handle.request = self.group.start_all_to_all_rows(
            handle.outgoing, handle.received, handle.incoming, handle.sent
        )

    def combine_recv(self, dispatched: Dispatched, *, out: torch.Tensor, accumulate: bool = False) -> None:
        handle = dispatched.handle
        assert isinstance(handle, MpiHandle)
        check_out(self.config, out, handle.tokens)
        handle.enter(self, "combine_recv")
        handle.request.Wait()
        weights = handle.routing.weights[: handle.live]
        write_out(weighted_sum(handle.incoming, handle.packing.slots, weights), out, handle.live, accumulate)


def expert_order(counts: Int64Array) -> Int64Array:
    """[ranks, experts] rows received, by rank and then by expert, to the index that puts them by expert, then rank."""
    lengths = counts.T.ravel()
    received = starts(counts.ravel())[:-1].reshape(counts.shape).T.ravel()
    packed = starts(lengths)
    return np.repeat(received - packed[:-1], lengths) + np.arange(packed[-1])


def join_rows(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """[rows, bytes]: each row's data, then its scales; without scales, `x` itself."""
    return x if scales is None else torch.cat([x.view(torch.uint8), scales.view(torch.uint8)], 1)


def split_rows(joined: torch.Tensor, config: AllToAllConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `join_rows` joined."""
    if not config.scale_dim:
        return joined, None
    width = config.hidden * config.dtype.itemsize
    x, scales = joined[:, :width].contiguous(), joined[:, width:].contiguous()
    return x.view(config.dtype), scales.view(config.scale_dtype)
