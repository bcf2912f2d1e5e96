"""Dispatch to ranks of other nodes: records as messages, and their landing. See `rose_dist.kernels.network_layout`."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import jit, nvshmem, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import ORDINAL_MASK, across, arrived, copy_of, peer
from rose_dist.kernels.cute.exchange_send import PacketSender
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.network_forward import RowForwarder
from rose_dist.kernels.cute.network_parts import (
    first_member,
    load_words,
    message_at,
    place_of,
    signal_at,
    signal_of,
    wait_signal,
    write_headers,
)
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, const_expr, cute
from rose_dist.kernels.exchange_sizes import HEADER_WORDS, NO_PLACE, PACKETS
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.network_layout import RECORDS, NetworkLayout
from rose_dist.kernels.peer_regions import NETWORK_RECORD_STAGE, PACKET_BYTES, PACKET_WORDS
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class SendRecords(nvshmem.NetworkKernel):
    """A block lays out and sends one message at a time. It counts no exchange: the kernel that sends to NVLink peers,
    which follows, does.
    """

    layout: NetworkLayout

    @property
    def tiling(self) -> PacketTiling:
        return PacketTiling(self.layout.exchange.data_packets, 1024)

    @property
    def sender(self) -> PacketSender:
        return PacketSender(self.arch, self.layout.exchange, self.tiling)

    @cute.jit
    def __call__(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live_rows: Int64, far: Int64, far_count: Int32,
        network: Int64, send_state: Int64, rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x, scales, ids, weights, live_rows and send_state as for `ExchangeDispatch`; far int32
        [far_count], the ranks of other nodes in the order of sending, one a group; network: this rank's network region.
        """
        self.kernel(x, scales, ids, weights, live_rows, far, far_count, network, send_state, rank, tokens).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live_rows: Int64, far: Int64, far_count: Int32,
        network: Int64, send_state: Int64, rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        exchange, sender = self.layout.exchange, self.sender
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(send_state)
        counted = shared_integers(exchange.experts + exchange.ranks)
        experts, masks = (
            shared_integers(exchange.packet_tokens * exchange.top_k),
            shared_integers(exchange.packet_tokens),
        )
        places, owners, rows = (shared_integers(n) for n in (exchange.top_k, exchange.top_k, exchange.ranks))
        chosen = shared_integers(RECORDS + 1)
        sender.count(ids, live, counted, experts, masks)
        for item in range(cute.arch.block_idx()[0], far_count * self.layout.record_messages, cute.arch.grid_dim()[0]):
            to, first = vector.scalar(far + Int64(item % far_count) * 4, Int32)[0], item // far_count * RECORDS
            self.choose(to, first, live, masks, chosen)
            records = chosen[RECORDS]
            if (first == 0) | (first < records):
                here = vector.min_of(records - first, Int32(RECORDS))
                place = place_of(self.layout, "record", epoch, to, item // far_count)
                message = network + message_at(self.layout, "record", "outbox", place)
                write_headers(self.layout, counted, to, live, PACKETS, message, self.tiling.threads)
                for number in range(here):
                    token = chosen[number]
                    sender.find(token, experts, masks, places, owners, rows)
                    cute.arch.sync_threads()
                    record = message + self.layout.headers_bytes + Int64(number) * self.layout.record_bytes
                    self.write_meta(token, to, experts, places, owners, rows, weights, record)
                    self.write_row(x, scales, token, record + self.layout.meta_bytes)
                    cute.arch.sync_threads()
                place = place_of(self.layout, "record", epoch, rank, item // far_count)
                nvshmem.put_signal_block(
                    self.arch, network + message_at(self.layout, "record", "inbox", place), message,
                    self.layout.headers_bytes + Int64(here) * self.layout.record_bytes,
                    network + signal_at(self.layout, "record", place), signal_of(records, epoch), to,
                )  # fmt: skip

    @cute.jit
    def choose(self, to: Int32, first: Int32, live: Int32, masks: cute.Tensor, chosen: cute.Tensor) -> None:
        """The tokens of records `first` and on of those to the group of `to`; then how many there are in all."""
        thread, before = cute.arch.thread_idx()[0], Int32(0)
        group, member = Uint32((1 << self.layout.members) - 1), Uint32(first_member(self.layout, to))
        cute.arch.sync_threads()
        if thread < WARP:
            for start in range(0, live, WARP):
                token, goes = start + thread, Boolean(False)
                if token < live:
                    goes = Boolean((Uint32(masks[token]) >> member) & group != 0)
                found = Uint32(cute.arch.vote_ballot_sync(goes))
                number = before + Int32(cute.arch.popc(found & Uint32(cute.arch.lanemask_lt()))) - first
                if goes & (number >= 0) & (number < RECORDS):
                    chosen[number] = token
                before += Int32(cute.arch.popc(found))
            if thread == 0:
                chosen[RECORDS] = before
        cute.arch.sync_threads()

    @cute.jit
    def write_meta(
        self, token: Int32, to: Int32, experts: cute.Tensor, places: cute.Tensor, owners: cute.Tensor,
        rows: cute.Tensor, weights: Int64, record: Int64,
    ) -> None:  # fmt: skip
        layout, top_k, behind = self.layout, self.layout.exchange.top_k, self.layout.exchange.meta_words
        first = first_member(layout, to)
        for at in range(cute.arch.thread_idx()[0], layout.meta_words, self.tiling.threads):
            word = Uint32(token)
            if at >= behind:
                word = Uint32(rows[first + at - behind])
            elif at > top_k:
                word = Uint32(vector.scalar(weights + (Int64(token) * top_k + at - 1 - top_k) * 4, Uint32)[0])
            elif at > 0:
                by, word = owners[at - 1], Uint32(NO_PLACE)
                if (by >= first) & (by < first + layout.members):
                    word = across(experts[token * top_k + at - 1], places[at - 1] & Int32(ORDINAL_MASK))
            vector.scalar(record + Int64(at) * 4, Uint32)[0] = word

    @cute.jit
    def write_row(self, x: Int64, scales: Int64, token: Int32, data: Int64) -> None:
        for at in range(cute.arch.thread_idx()[0], self.layout.exchange.data_words, self.tiling.threads):
            vector.scalar(data + Int64(at) * 4, Uint32)[0] = self.sender.word(x, scales, token, at)


@dataclass(frozen=True)
class LandRecords(jit.Kernel):
    """A block waits for a message and copies it, as packets, to where an NVLink peer would have written them: to each
    member that it is for. Then it does so with chunks of plain rows, if `layout.forwards_rows`.
    """

    layout: NetworkLayout
    threads: int = 256

    @cute.jit
    def __call__(
        self, far: Int64, far_count: Int32, network: Int64, peers: Int64, receive_state: Int64, report: Int64,
        limit_ns: Int64, rank: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: far and network as for `SendRecords`; peers: int64 [ranks], the members' exchange regions."""
        self.kernel(far, far_count, network, peers, receive_state, report, limit_ns, rank).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, far: Int64, far_count: Int32, network: Int64, peers: Int64, receive_state: Int64, report: Int64,
        limit_ns: Int64, rank: Int32,
    ) -> None:  # fmt: skip
        layout, count = self.layout, shared_integers(1)
        rows = shared_integers(RECORDS * layout.members)
        epoch, alive = packets.current_epoch(receive_state), Boolean(True)
        for item in range(cute.arch.block_idx()[0], far_count * layout.record_messages, cute.arch.grid_dim()[0]):
            source, message = vector.scalar(far + Int64(item % far_count) * 4, Int32)[0], item // far_count
            place = place_of(layout, "record", epoch, source, 0)
            alive = wait_signal(
                network + signal_at(layout, "record", place), epoch, count, alive, limit_ns, report, rank, source,
                NETWORK_RECORD_STAGE,
            )  # fmt: skip
            here = vector.min_of(count[0] - message * RECORDS, Int32(RECORDS))
            place += message
            if (message > 0) & (here > 0):
                alive = wait_signal(
                    network + signal_at(layout, "record", place), epoch, count, alive, limit_ns, report, rank, source,
                    NETWORK_RECORD_STAGE,
                )  # fmt: skip
            inbox = network + message_at(layout, "record", "inbox", place)
            if alive:
                index = copy_of(epoch, layout.exchange.copies) * layout.exchange.ranks + source
                if message == 0:
                    self.land_headers(inbox, peers, rank, index, epoch)
                self.land_records(inbox + layout.headers_bytes, peers, rank, index, here, epoch, rows)
        if const_expr(layout.forwards_rows):
            RowForwarder(layout, self.threads).take(
                far, far_count, network, peers, epoch, limit_ns, report, rank, count
            )

    @cute.jit
    def land_headers(self, inbox: Int64, peers: Int64, rank: Int32, index: Int64, epoch: Uint32) -> None:
        """index: of copy and source."""
        layout, exchange = self.layout, self.layout.exchange
        start = exchange.start("headers") + index * exchange.header_bytes
        for number in range(cute.arch.thread_idx()[0], layout.members * exchange.header_packets, self.threads):
            member, packet = number // exchange.header_packets, number % exchange.header_packets
            words = load_words(
                inbox + Int64(member) * layout.header_bytes, packet * PACKET_WORDS, PACKET_WORDS,
                HEADER_WORDS + exchange.width,
            )  # fmt: skip
            header = peer(peers, first_member(layout, rank) + member) + start
            packets.send([header], Int64(packet) * PACKET_BYTES, words, epoch)

    @cute.jit
    def land_records(
        self, records: Int64, peers: Int64, rank: Int32, index: Int64, here: Int32, epoch: Uint32, rows: cute.Tensor
    ) -> None:
        """rows: Int32 [RECORDS, members] in shared memory, scratch."""
        layout, exchange, thread = self.layout, self.layout.exchange, cute.arch.thread_idx()[0]
        first, size = first_member(layout, rank), exchange.record_packets * PACKET_BYTES
        area = exchange.start("record_packets") + index * exchange.packet_tokens * size
        self.find_rows(records, first, here, rows)
        for number in range(here):
            record = records + Int64(number) * layout.record_bytes
            for member in range(layout.members):
                row = rows[number * layout.members + member]
                if row >= 0:
                    target = peer(peers, first + member) + area + Int64(row) * size
                    for packet in range(thread, exchange.meta_packets, self.threads):
                        words = [self.meta_word(record, packet * 3 + i, first + member) for i in range(PACKET_WORDS)]
                        packets.send([target], Int64(packet) * PACKET_BYTES, words, epoch)
            data = record + layout.meta_bytes
            for packet in range(thread, exchange.data_packets, self.threads):
                words = load_words(data, packet * PACKET_WORDS, PACKET_WORDS, exchange.data_words)
                for member in range(layout.members):
                    row = rows[number * layout.members + member]
                    if row >= 0:
                        target = peer(peers, first + member) + area + Int64(row) * size
                        packets.send([target], Int64(packet + exchange.meta_packets) * PACKET_BYTES, words, epoch)

    @cute.jit
    def find_rows(self, records: Int64, first: Int32, here: Int32, rows: cute.Tensor) -> None:
        """Each record's number among those of each member; −1: it is not for it."""
        layout, top_k = self.layout, self.layout.exchange.top_k
        for at in range(cute.arch.thread_idx()[0], here * layout.members, self.threads):
            number, member = at // layout.members, at % layout.members
            record, row = records + Int64(number) * layout.record_bytes, Int32(-1)
            for j in range(top_k):
                by, _ = arrived(layout.exchange, vector.scalar(record + (1 + Int64(j)) * 4, Uint32)[0])
                if by == first + member:
                    row = vector.scalar(record + (layout.exchange.meta_words + Int64(member)) * 4, Int32)[0]
            rows[at] = row
        cute.arch.sync_threads()

    @cute.jit
    def meta_word(self, record: Int64, at: Int32, to: Int32) -> Uint32:
        """Of the record for rank `to`; any beyond its meta."""
        inside = Int64(vector.min_of(at, Int32(self.layout.meta_words - 1)))
        word = Uint32(vector.scalar(record + inside * 4, Uint32)[0])
        if (at > 0) & (at <= self.layout.exchange.top_k):
            by, mine = arrived(self.layout.exchange, word)
            word = Uint32(vector.select(by == to, mine, Uint32(NO_PLACE)))
        return word
