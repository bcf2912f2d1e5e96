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
from rose_dist.comm.all_to_all.partial_sums import NOTE, ReceivedTokens, ReturnedSums, notes
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
    arrived: ReceivedTokens
    """With `partial_sums`, as `returned`."""
    returned: ReturnedSums


class Mpi(AllToAll):
    """Two exchanges a dispatch, the rows each rank has for each expert and the rows themselves, and one a combine.

    Rows travel once a (token, expert) pair, scales behind each row's data; the results come back unweighted, so that
    the sum at the source has the order of the top k. With `partial_sums` a `NOTE` stands behind each row too, and one
    row a (token, rank) comes back.
    """

    def __init__(self, config: AllToAllConfig, group: Group) -> None:
        agree(config, group)
        self.config = config
        self.group = group
        self.local_experts = even_split(config.num_experts, group.size, group.rank)
        self.rows_sent = torch.zeros(1, dtype=torch.int64)
        shares = [even_split(config.num_experts, group.size, rank) for rank in range(group.size)]
        self._width = len(shares[0])
        self._columns = np.concatenate(
            [np.arange(len(share)) + rank * self._width for rank, share in enumerate(shares)]
        )
        """Where each expert stands in rows of one width a rank."""
        self._owners = np.repeat(np.arange(group.size), [len(share) for share in shares])
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
        parts = [x.index_select(0, index)]
        if scales is not None:
            parts.append(scales.index_select(0, index))
        if self.config.partial_sums:
            parts.append(notes(packing, routing.weights[:live]))
        handle.outgoing = join_rows(*parts)
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
        incoming, top_k = handle.incoming, self.config.top_k
        if self.config.partial_sums:
            noted = incoming[:, -NOTE.itemsize :].contiguous()
            handle.arrived = ReceivedTokens.of(noted, handle.received, handle.order.numpy(), top_k)
        x, scales = split_rows(incoming.index_select(0, handle.order), self.config)
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
        if self.config.partial_sums:
            ids = handle.routing.ids[: handle.live].numpy()
            handle.returned = ReturnedSums.of(ids, self._owners, self.group.size)
            handle.outgoing, sent = handle.arrived.sums(expert_out), handle.arrived.counts
            received = handle.returned.counts
        else:
            handle.outgoing = expert_out.new_empty(expert_out.shape).index_copy_(0, handle.order, expert_out)
            sent, received = handle.received, handle.sent
        handle.incoming = expert_out.new_empty(sum(received), self.config.hidden)
        handle.request = self.group.start_all_to_all_rows(handle.outgoing, sent, handle.incoming, received)

    def combine_recv(self, dispatched: Dispatched, *, out: torch.Tensor, accumulate: bool = False) -> None:
        handle = dispatched.handle
        assert isinstance(handle, MpiHandle)
        check_out(self.config, out, handle.tokens)
        handle.enter(self, "combine_recv")
        handle.request.Wait()
        if self.config.partial_sums:
            total = handle.returned.total(handle.incoming)
        else:
            total = weighted_sum(handle.incoming, handle.packing.slots, handle.routing.weights[: handle.live])
        write_out(total, out, handle.live, accumulate)


def join_rows(x: torch.Tensor, *behind: torch.Tensor) -> torch.Tensor:
    """[rows, bytes]: each row's data, then what stands behind it; with nothing there, `x` itself."""
    return torch.cat([part.view(torch.uint8) for part in (x, *behind)], 1) if behind else x


def split_rows(joined: torch.Tensor, config: AllToAllConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales that `join_rows` joined, whatever stands behind them."""
    if joined.dtype == config.dtype and joined.shape[1] == config.hidden:
        return joined, None
    width, scale_bytes = config.hidden * config.dtype.itemsize, config.scale_dim * config.scale_dtype.itemsize
    x, scales = joined[:, :width].contiguous(), joined[:, width : width + scale_bytes].contiguous()
    return x.view(config.dtype), scales.view(config.scale_dtype) if scale_bytes else None
