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
    travelling,
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
        self._width = len(shares[0])
        self._columns = np.concatenate(
            [np.arange(len(share)) + rank * self._width for rank, share in enumerate(shares)]
        )
        """Where each expert stands in rows of one width a rank."""
        self._sources = np.tile(np.arange(len(self.local_experts)), group.size)

    def dispatch_send(
        self,
        x: torch.Tensor,
        routing: Routing,
        *,
        scales: torch.Tensor | None = None,
        rows: torch.Tensor | int | None = None,
    ) -> MpiHandle:
        live = check_dispatch(self.config, x, routing, scales, rows)
        x, scales = travelling(self.config, x, scales)
        handle = MpiHandle(self, routing, x.shape[0], live)
        experts = range(self.config.num_experts)
        handle.packing = packing = Packing.of(routing, live, self.config.num_experts, experts)
        counts = np.zeros((self.group.size, self._width), np.int64)
        counts.ravel()[self._columns] = packing.counts
        handle.counts = self.group.all_to_all_integers(counts)[:, : len(self.local_experts)]
        handle.sent = counts.sum(1).tolist()
        handle.received = handle.counts.sum(1).tolist()
        self.rows_sent += sum(handle.sent) - handle.sent[self.group.rank]
        index = torch.from_numpy(packing.tokens)
        handle.outgoing = join_rows(x.index_select(0, index), None if scales is None else scales.index_select(0, index))
        handle.incoming = handle.outgoing.new_empty(sum(handle.received), handle.outgoing.shape[1])
        handle.request = self.group.start_all_to_all_rows(
            handle.outgoing, handle.sent, handle.incoming, handle.received
        )
        return handle

    def dispatch_recv(self, handle: Handle) -> Dispatched:
        assert isinstance(handle, MpiHandle)
        handle.enter(self, "dispatch_recv")
        handle.request.Wait()
        experts = np.repeat(self._sources, handle.counts.ravel())
        handle.order = torch.from_numpy(experts.argsort(kind="stable"))
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
        handle.outgoing = expert_out.new_empty(expert_out.shape).index_copy_(0, handle.order, expert_out)
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
