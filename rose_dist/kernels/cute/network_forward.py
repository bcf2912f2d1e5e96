"""Plain rows of ranks of other nodes, brought to the members of this one; see `rose_dist.kernels.network_layout`."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.exchange_parts import arrived
from rose_dist.kernels.cute.exchange_push import RowPusher
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.network_parts import (
    await_signal,
    first_member,
    group_of,
    message_at,
    place_of,
    signal_at,
    wait_signal,
)
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, cute
from rose_dist.kernels.exchange_sizes import NO_PLACE, ROWS
from rose_dist.kernels.network_layout import NetworkLayout
from rose_dist.kernels.peer_regions import NETWORK_RECORD_STAGE
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class RowForwarder:
    """Part of a kernel. A block waits for a chunk at a time and pushes its rows on as their source pushes those of its
    own node: a destination is a member.
    """

    layout: NetworkLayout
    threads: int

    @property
    def pusher(self) -> RowPusher:
        return RowPusher(self.layout.exchange, self.threads)

    @cute.jit
    def take(
        self, far: Int64, far_count: Int32, network: Int64, peers: Int64, epoch: Uint32, limit_ns: Int64, report: Int64,
        rank: Int32, count: cute.Tensor,
    ) -> None:  # fmt: skip
        """All chunks of the sources `far` that have many tokens, first ones of all before second ones. Arguments: as
        for `LandRecords`; count: Int32 [1] in shared memory, scratch.
        """
        layout, exchange, alive = self.layout, self.layout.exchange, Boolean(True)
        chunks, masks = shared_integers(layout.groups), shared_integers(exchange.chunk)
        self.count_chunks(far, far_count, network, epoch, limit_ns, report, rank, chunks)
        most = Int32(0)
        for number in range(far_count):
            most = vector.max_of(most, chunks[number])
        signals = network + layout.start("row_signals")
        for item in range(cute.arch.block_idx()[0], far_count * most, cute.arch.grid_dim()[0]):
            source, chunk = vector.scalar(far + Int64(item % far_count) * 4, Int32)[0], item // far_count
            if chunk < chunks[item % far_count]:
                group = group_of(layout, epoch, source)
                alive = wait_signal(
                    signals + group * exchange.source_run_bytes + Int64(chunk) * 8, epoch, count, alive, limit_ns,
                    report, rank, source, NETWORK_RECORD_STAGE,
                )  # fmt: skip
                if alive:
                    inbox = network + layout.start("row_inbox") + group * exchange.source_record_bytes
                    self.forward(inbox, peers, source, chunk, count[0] & 255, epoch, rank, masks)

    @cute.jit
    def count_chunks(
        self, far: Int64, far_count: Int32, network: Int64, epoch: Uint32, limit_ns: Int64, report: Int64, rank: Int32,
        chunks: cute.Tensor,
    ) -> None:  # fmt: skip
        """By the headers; 0 of a source whose records are packets. A thread a source."""
        layout, chunk = self.layout, self.layout.exchange.chunk
        for number in range(cute.arch.thread_idx()[0], far_count, self.threads):
            source, found = vector.scalar(far + Int64(number) * 4, Int32)[0], Int32(0)
            place = place_of(layout, "record", epoch, source, 0)
            signal = network + signal_at(layout, "record", place)
            if await_signal(signal, epoch, limit_ns, report, rank, source, NETWORK_RECORD_STAGE) >= 0:
                header = network + message_at(layout, "record", "inbox", place)
                if vector.scalar(header + 8, Int32)[0] == ROWS:
                    found = (vector.scalar(header + 4, Int32)[0] + (chunk - 1)) // chunk
            chunks[number] = found
        cute.arch.sync_threads()

    @cute.jit
    def forward(
        self, inbox: Int64, peers: Int64, source: Int32, chunk: Int32, records: Int32, epoch: Uint32, rank: Int32,
        masks: cute.Tensor,
    ) -> None:  # fmt: skip
        """A chunk's `records`, then its flags. inbox: where the source's records start."""
        exchange, pusher, thread = self.layout.exchange, self.pusher, cute.arch.thread_idx()[0]
        warp, lane, first = thread // WARP, thread % WARP, first_member(self.layout, rank)
        start = inbox + Int64(chunk * exchange.chunk) * exchange.record_bytes
        self.find_members(start, records, first, masks)
        members, area = peers + Int64(first) * 8, pusher.area(source, epoch)
        for number in range(warp // pusher.share, records, pusher.warps // pusher.share):
            record, by, word = start + Int64(number) * exchange.record_bytes, Int32(-1), Uint32(NO_PLACE)
            if lane < exchange.top_k:
                by, word = self.place(record, lane)
            token = Int32(ptx.load_relaxed(record + exchange.meta_offset, "sys"))
            to = vector.max_of(by - first, Int32(-1))
            weights = record + exchange.meta_offset + 4 * (1 + exchange.top_k)
            pusher.push_record(
                record, record + exchange.row_bytes, token, weights, to, word, members, area, chunk, number, masks,
                Int32(0), warp % pusher.share,
            )  # fmt: skip
        cute.arch.sync_threads()
        if thread < self.layout.members:
            pusher.release(members, thread, source, chunk, epoch, masks, Int32(0))

    @cute.jit
    def find_members(self, start: Int64, records: Int32, first: Int32, masks: cute.Tensor) -> None:
        """Which members each record is for, as bits."""
        exchange, pusher, thread = self.layout.exchange, self.pusher, cute.arch.thread_idx()[0]
        lane = thread % WARP
        for number in range(thread // WARP, exchange.chunk, pusher.warps):
            mask = Uint32(0)
            if (number < records) & (lane < exchange.top_k):
                by, _ = self.place(start + Int64(number) * exchange.record_bytes, lane)
                if by >= 0:
                    mask = Uint32(1) << Uint32(by - first)
            mask = cute.arch.warp_redux_sync(mask, "or")
            if lane == 0:
                masks[number] = Int32(mask)
        cute.arch.sync_threads()

    @cute.jit
    def place(self, record: Int64, place: Int32) -> tuple[Int32, Uint32]:
        """Of a record's place: its rank, −1 for none here, and that rank's word."""
        meta = record + self.layout.exchange.meta_offset
        return arrived(self.layout.exchange, ptx.load_relaxed(meta + (1 + Int64(place)) * 4, "sys"))
