"""Dispatch to ranks of other nodes: records as messages, and their landing. See `rose_dist.kernels.network_layout`."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import jit, nvshmem, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import copy_of, header_word
from rose_dist.kernels.cute.exchange_send import PacketSender
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.network_parts import load_words, message_at, place_of, signal_at, signal_of, wait_signal
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, cute
from rose_dist.kernels.exchange_layout import HEADER_WORDS, PACKETS
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
        self, x: Int64, scales: Int64, ids: Int64, live_rows: Int64, far: Int64, far_count: Int32, network: Int64,
        send_state: Int64, rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x, scales, ids, live_rows and send_state as for `ExchangeDispatch`; far int32 [far_count], the
        ranks of other nodes in the order of sending; network: this rank's network region.
        """
        self.kernel(x, scales, ids, live_rows, far, far_count, network, send_state, rank, tokens).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, x: Int64, scales: Int64, ids: Int64, live_rows: Int64, far: Int64, far_count: Int32, network: Int64,
        send_state: Int64, rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        exchange, sender = self.layout.exchange, self.sender
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(send_state)
        counted = shared_integers(exchange.experts + exchange.ranks)
        experts, masks = (
            shared_integers(exchange.packet_tokens * exchange.top_k),
            shared_integers(exchange.packet_tokens),
        )
        places, owners, rows = (shared_integers(n) for n in (exchange.top_k, exchange.top_k, exchange.ranks))
        chosen = shared_integers(RECORDS)
        sender.count(ids, live, counted, experts, masks)
        for item in range(cute.arch.block_idx()[0], far_count * self.layout.record_messages, cute.arch.grid_dim()[0]):
            to = vector.scalar(far + Int64(item % far_count) * 4, Int32)[0]
            first, records = item // far_count * RECORDS, counted[exchange.experts + to]
            if (first == 0) | (first < records):
                here = vector.min_of(records - first, Int32(RECORDS))
                place = place_of(self.layout, "record", epoch, to, item // far_count)
                message = network + message_at(self.layout, "record", "outbox", place)
                self.choose(to, first, live, masks, chosen)
                self.write_header(counted, to, live, message)
                for number in range(here):
                    token = chosen[number]
                    sender.find(token, experts, masks, places, owners, rows)
                    cute.arch.sync_threads()
                    record = message + self.layout.header_bytes + Int64(number) * self.layout.record_bytes
                    self.write_record(x, scales, token, to, places, owners, record)
                    cute.arch.sync_threads()
                place = place_of(self.layout, "record", epoch, rank, item // far_count)
                nvshmem.put_signal_block(
                    self.arch, network + message_at(self.layout, "record", "inbox", place), message,
                    self.layout.header_bytes + Int64(here) * self.layout.record_bytes,
                    network + signal_at(self.layout, "record", place), signal_of(records, epoch), to,
                )  # fmt: skip

    @cute.jit
    def choose(self, to: Int32, first: Int32, live: Int32, masks: cute.Tensor, chosen: cute.Tensor) -> None:
        """The tokens of records `first` and on of those to rank `to`."""
        thread, before = cute.arch.thread_idx()[0], Int32(0)
        cute.arch.sync_threads()
        if thread < WARP:
            for start in range(0, live, WARP):
                token, goes = start + thread, Boolean(False)
                if token < live:
                    goes = Boolean((Uint32(masks[token]) >> Uint32(to)) & Uint32(1) != 0)
                found = Uint32(cute.arch.vote_ballot_sync(goes))
                number = before + Int32(cute.arch.popc(found & Uint32(cute.arch.lanemask_lt()))) - first
                if goes & (number >= 0) & (number < RECORDS):
                    chosen[number] = token
                before += Int32(cute.arch.popc(found))
        cute.arch.sync_threads()

    @cute.jit
    def write_header(self, counted: cute.Tensor, to: Int32, live: Int32, message: Int64) -> None:
        exchange = self.layout.exchange
        for at in range(cute.arch.thread_idx()[0], HEADER_WORDS + exchange.width, self.tiling.threads):
            vector.scalar(message + Int64(at) * 4, Uint32)[0] = header_word(exchange, counted, to, at, live, PACKETS)

    @cute.jit
    def write_record(
        self, x: Int64, scales: Int64, token: Int32, to: Int32, places: cute.Tensor, owners: cute.Tensor, record: Int64
    ) -> None:
        exchange, sender = self.layout.exchange, self.sender
        thread, threads = cute.arch.thread_idx()[0], self.tiling.threads
        for at in range(thread, exchange.meta_words, threads):
            vector.scalar(record + Int64(at) * 4, Uint32)[0] = sender.meta_word(token, to, at, places, owners)
        data = record + self.layout.meta_bytes
        for at in range(thread, exchange.data_words, threads):
            vector.scalar(data + Int64(at) * 4, Uint32)[0] = sender.word(x, scales, token, at)


@dataclass(frozen=True)
class LandRecords(jit.Kernel):
    """A block waits for a message and copies it, as packets, to where an NVLink peer would have written them."""

    layout: NetworkLayout
    threads: int = 256

    @cute.jit
    def __call__(
        self, far: Int64, far_count: Int32, network: Int64, own: Int64, receive_state: Int64, report: Int64,
        limit_ns: Int64, rank: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: far and network as for `SendRecords`; own: this rank's exchange region."""
        self.kernel(far, far_count, network, own, receive_state, report, limit_ns, rank).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, far: Int64, far_count: Int32, network: Int64, own: Int64, receive_state: Int64, report: Int64,
        limit_ns: Int64, rank: Int32,
    ) -> None:  # fmt: skip
        layout, count = self.layout, shared_integers(1)
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
                self.land(inbox, own, source, message, here, epoch)

    @cute.jit
    def land(self, inbox: Int64, own: Int64, source: Int32, message: Int32, here: Int32, epoch: Uint32) -> None:
        """The header, of a first message, and `here` records."""
        exchange, thread = self.layout.exchange, cute.arch.thread_idx()[0]
        index = copy_of(epoch, exchange.copies) * exchange.ranks + source
        if message == 0:
            header = own + exchange.start("headers") + index * exchange.header_bytes
            for packet in range(thread, exchange.header_packets, self.threads):
                words = load_words(inbox, packet * PACKET_WORDS, PACKET_WORDS, HEADER_WORDS + exchange.width)
                packets.send([header], Int64(packet) * PACKET_BYTES, words, epoch)
        size = exchange.record_packets * PACKET_BYTES
        first = own + exchange.start("record_packets") + (index * exchange.packet_tokens + message * RECORDS) * size
        for number in range(here):
            record = inbox + self.layout.header_bytes + Int64(number) * self.layout.record_bytes
            target = first + Int64(number) * size
            for packet in range(thread, exchange.meta_packets, self.threads):
                words = load_words(record, packet * PACKET_WORDS, PACKET_WORDS, exchange.meta_words)
                packets.send([target], Int64(packet) * PACKET_BYTES, words, epoch)
            data = record + self.layout.meta_bytes
            for packet in range(thread, exchange.data_packets, self.threads):
                words = load_words(data, packet * PACKET_WORDS, PACKET_WORDS, exchange.data_words)
                packets.send([target], Int64(packet + exchange.meta_packets) * PACKET_BYTES, words, epoch)
