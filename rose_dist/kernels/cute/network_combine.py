"""Combine with ranks of other nodes: results as messages, and their landing. See `rose_dist.kernels.network_layout`."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import jit, nvshmem, ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import copy_of
from rose_dist.kernels.cute.exchange_send import PacketSender
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.network_parts import load_words, message_at, place_of, signal_at, signal_of, wait_signal
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, const_expr, cute
from rose_dist.kernels.exchange_sizes import HEADER_WORDS, ROWS
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.network_layout import RECORDS, NetworkLayout
from rose_dist.kernels.peer_regions import NETWORK_RESULT_STAGE, PACKET_BYTES, PACKET_WORDS
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class SendResults(nvshmem.NetworkKernel):
    """A block lays out and sends the results for up to `RECORDS` records of one source. It counts no exchange."""

    layout: NetworkLayout
    threads: int = 256

    @cute.jit
    def __call__(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        far: Int64, far_count: Int32, network: Int64, send_state: Int64, rank: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: expert_out, row_stride, sources, tokens_of, slots, runs and send_state as for `ExchangeCombine`;
        far, network: as for `SendRecords`.
        """
        self.kernel(
            expert_out, row_stride, sources, tokens_of, slots, runs, far, far_count, network, send_state, rank
        ).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        far: Int64, far_count: Int32, network: Int64, send_state: Int64, rank: Int32,
    ) -> None:  # fmt: skip
        layout, exchange = self.layout, self.layout.exchange
        chosen, total = shared_integers(RECORDS * exchange.top_k), shared_integers(1)
        epoch = packets.current_epoch(send_state)
        for item in range(cute.arch.block_idx()[0], far_count * layout.result_messages, cute.arch.grid_dim()[0]):
            source, message = vector.scalar(far + Int64(item % far_count) * 4, Int32)[0], item // far_count
            header = sources + Int64(source) * (4 * HEADER_WORDS)
            plain = vector.scalar(header + 8, Int32)[0] == ROWS
            begin = message * RECORDS
            records = vector.min_of(vector.scalar(header, Int32)[0] - begin, Int32(RECORDS))
            due = records > 0
            if const_expr(exchange.has_rows):
                if plain:
                    run = vector.scalar(runs + (Int64(source) * exchange.chunks + message) * 4, Int32)[0]
                    due = message * RECORDS < vector.scalar(header + 4, Int32)[0]
                    begin, records = run >> 8, run & 255
            if due:
                first = Int64(source) * exchange.max_records + begin
                pairs = records * exchange.top_k
                self.choose(slots + first * (4 * exchange.top_k), pairs, chosen, total)
                place = place_of(layout, "result", epoch, source, message)
                outbox = network + message_at(layout, "result", "outbox", place)
                for number in range(total[0]):
                    pair = chosen[number]
                    token = vector.scalar(tokens_of + (first + pair // exchange.top_k) * 4, Int32)[0]
                    slot = vector.scalar(slots + (first * exchange.top_k + pair) * 4, Int32)[0]
                    index = token * exchange.top_k + pair % exchange.top_k
                    self.write_result(expert_out, row_stride, slot, index, outbox + Int64(number) * layout.result_bytes)
                place = place_of(layout, "result", epoch, rank, message)
                size = vector.max_of(Int64(total[0]) * layout.result_bytes, Int64(16))
                nvshmem.put_signal_block(
                    self.arch, network + message_at(layout, "result", "inbox", place), outbox, size,
                    network + signal_at(layout, "result", place), signal_of(total[0], epoch), source,
                )  # fmt: skip

    @cute.jit
    def choose(self, slots: Int64, pairs: Int32, chosen: cute.Tensor, total: cute.Tensor) -> None:
        """The pairs of record and place that are here, in their order."""
        thread, before = cute.arch.thread_idx()[0], Int32(0)
        cute.arch.sync_threads()
        if thread < WARP:
            for start in range(0, pairs, WARP):
                pair, here = start + thread, Boolean(False)
                if pair < pairs:
                    here = Boolean(vector.scalar(slots + Int64(pair) * 4, Int32)[0] != -1)
                found = Uint32(cute.arch.vote_ballot_sync(here))
                if here:
                    chosen[before + Int32(cute.arch.popc(found & Uint32(cute.arch.lanemask_lt())))] = pair
                before += Int32(cute.arch.popc(found))
            if thread == 0:
                total[0] = before
        cute.arch.sync_threads()

    @cute.jit
    def write_result(self, expert_out: Int64, row_stride: Int64, slot: Int32, index: Int32, target: Int64) -> None:
        """Zeros for a row that its expert had no room for."""
        thread, dropped = cute.arch.thread_idx()[0], slot < 0
        row = expert_out + Int64(vector.max_of(slot, Int32(0))) * row_stride
        if thread == 0:
            vector.scalar(target, Int32)[0] = index
        for at in range(thread, self.layout.exchange.result_bytes // 4, self.threads):
            word = vector.scalar(row + Int64(at) * 4, Uint32)[0]
            vector.scalar(target + 16 + Int64(at) * 4, Uint32)[0] = vector.select(dropped, Uint32(0), word)


@dataclass(frozen=True)
class LandResults(jit.Kernel):
    """A block waits for a message and copies its results, as packets, to where an NVLink peer would have written them.
    How many messages come, it knows from the routing.
    """

    layout: NetworkLayout

    @property
    def tiling(self) -> PacketTiling:
        return PacketTiling(self.layout.exchange.result_packets, 1024)

    @cute.jit
    def __call__(
        self, ids: Int64, live_rows: Int64, far: Int64, far_count: Int32, network: Int64, own: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: ids, live_rows and receive_state as for `ExchangeCombine`; the others as for `LandRecords`."""
        self.kernel(ids, live_rows, far, far_count, network, own, receive_state, report, limit_ns, rank, tokens).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, ids: Int64, live_rows: Int64, far: Int64, far_count: Int32, network: Int64, own: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        layout, exchange = self.layout, self.layout.exchange
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(receive_state)
        counted, count = shared_integers(exchange.experts + exchange.ranks), shared_integers(1)
        experts, masks = (
            shared_integers(exchange.packet_tokens * exchange.top_k),
            shared_integers(exchange.packet_tokens),
        )
        PacketSender(self.arch, exchange, self.tiling).count(ids, live, counted, experts, masks)
        if const_expr(layout.sums):
            self.count_groups(masks, live, counted)
        alive = Boolean(True)
        for item in range(cute.arch.block_idx()[0], far_count * layout.result_messages, cute.arch.grid_dim()[0]):
            peer, message = vector.scalar(far + Int64(item % far_count) * 4, Int32)[0], item // far_count
            if message * RECORDS < counted[exchange.experts + peer]:
                place = place_of(layout, "result", epoch, peer, message)
                alive = wait_signal(
                    network + signal_at(layout, "result", place), epoch, count, alive, limit_ns, report, rank, peer,
                    NETWORK_RESULT_STAGE,
                )  # fmt: skip
                inbox = network + message_at(layout, "result", "inbox", place)
                for number in range(count[0]):
                    self.land(inbox + Int64(number) * layout.result_bytes, own, epoch)

    @cute.jit
    def count_groups(self, masks: cute.Tensor, live: Int32, counted: cute.Tensor) -> None:
        """Tokens that go to each rank's group, in place of those that go to the rank."""
        layout, thread = self.layout, cute.arch.thread_idx()[0]
        lane, members = thread % WARP, Uint32((1 << layout.members) - 1)
        for group in range(thread // WARP, layout.groups, self.tiling.threads // WARP):
            first, count = group * layout.members, Int32(0)
            for token in range(lane, live, WARP):
                if (Uint32(masks[token]) >> Uint32(first)) & members != 0:
                    count += 1
            count = cute.arch.warp_redux_sync(count, "add")
            if lane < layout.members:
                counted[layout.exchange.experts + first + lane] = count
        cute.arch.sync_threads()

    @cute.jit
    def land(self, result: Int64, own: Int64, epoch: Uint32) -> None:
        exchange = self.layout.exchange
        index = Int64(vector.scalar(result, Int32)[0])
        area = (
            own
            + exchange.start("result_packets")
            + copy_of(epoch, exchange.result_copies) * exchange.result_packet_bytes
        )
        target = area + index * (exchange.result_packets * PACKET_BYTES)
        for packet in range(cute.arch.thread_idx()[0], exchange.result_packets, self.tiling.threads):
            words = load_words(result + 16, packet * PACKET_WORDS, PACKET_WORDS, exchange.result_bytes // 4)
            packets.send([target], Int64(packet) * PACKET_BYTES, words, epoch)


@dataclass(frozen=True)
class LandResultRows(jit.Kernel):
    """The same for a source of many tokens: a message's results become plain rows, and their chunk's flag is set."""

    layout: NetworkLayout
    threads: int = 512

    @cute.jit
    def __call__(
        self, live_rows: Int64, far: Int64, far_count: Int32, network: Int64, own: Int64, receive_state: Int64,
        report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Arguments: as for `LandResults`."""
        self.kernel(live_rows, far, far_count, network, own, receive_state, report, limit_ns, rank, tokens).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, live_rows: Int64, far: Int64, far_count: Int32, network: Int64, own: Int64, receive_state: Int64,
        report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        layout, exchange, count = self.layout, self.layout.exchange, shared_integers(1)
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(receive_state)
        copy, alive = copy_of(epoch, exchange.result_copies), Boolean(True)
        flags = own + exchange.start("result_flags") + copy * exchange.result_flag_bytes
        results = own + exchange.start("results") + copy * exchange.result_row_bytes
        chunks = (live + (RECORDS - 1)) // RECORDS
        for item in range(cute.arch.block_idx()[0], far_count * chunks, cute.arch.grid_dim()[0]):
            peer, chunk = vector.scalar(far + Int64(item % far_count) * 4, Int32)[0], item // far_count
            place = place_of(layout, "result", epoch, peer, chunk)
            alive = wait_signal(
                network + signal_at(layout, "result", place), epoch, count, alive, limit_ns, report, rank, peer,
                NETWORK_RESULT_STAGE,
            )  # fmt: skip
            inbox = network + message_at(layout, "result", "inbox", place)
            for number in range(count[0]):
                result = inbox + Int64(number) * layout.result_bytes
                target = results + Int64(vector.scalar(result, Int32)[0]) * exchange.result_bytes
                for at in range(cute.arch.thread_idx()[0], exchange.result_bytes // 16, self.threads):
                    ptx.store_packet(target + Int64(at) * 16, ptx.load_16b(result + 16 + Int64(at) * 16))
            cute.arch.sync_threads()
            senders = layout.members if layout.sums else 1
            if (cute.arch.thread_idx()[0] < senders) & alive:
                # For the launch that follows, which sees all of this one's writes. A node's sums are all its ranks'.
                sender = peer - peer % senders + cute.arch.thread_idx()[0]
                ptx.store_relaxed(flags + (Int64(sender) * exchange.max_records + chunk) * 4, epoch, "sys")
