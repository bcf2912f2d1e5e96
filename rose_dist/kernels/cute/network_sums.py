"""A node's results for sources of other nodes, added up by the rank on each source's rail; see `network_layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import nvshmem, ptx, sync, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_combine import AT_ONCE, add_received
from rose_dist.kernels.cute.exchange_partial import UNROLL, PartialSums, lowest, rounded, zeros
from rose_dist.kernels.cute.exchange_parts import arrived, copy_of
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.network_parts import (
    first_member,
    group_of,
    message_at,
    place_of,
    signal_at,
    signal_of,
    wait_signal,
)
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Stream, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_sizes import NO_PLACE, ROWS
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.network_layout import RECORDS, NetworkLayout
from rose_dist.kernels.peer_regions import (
    NETWORK_RECORD_STAGE,
    PACKET_BYTES,
    PACKET_WORDS,
    RESULT_CHUNK_STAGE,
    RESULT_STAGE,
)
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class SumNode(nvshmem.NetworkKernel):
    """A block makes the sums for up to `RECORDS` records that this rank has forwarded, as their results come, and sends
    them to their source. It counts no exchange; the kernel that returns this rank's own results, which precedes, does.

    dtype: of results, bf16 or fp32.
    """

    layout: NetworkLayout
    dtype: torch.dtype
    threads: int = 512

    @property
    def each(self) -> int:
        """Elements of a word."""
        return 4 // self.dtype.itemsize

    @cute.jit
    def __call__(
        self, far: Int64, far_count: Int32, network: Int64, own: Int64, send_state: Int64, report: Int64,
        limit_ns: Int64, rank: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: far and network as for `SendRecords`, own: this rank's exchange region; send_state as for
        `ExchangeCombine`.
        """
        self.kernel(far, far_count, network, own, send_state, report, limit_ns, rank).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, far: Int64, far_count: Int32, network: Int64, own: Int64, send_state: Int64, report: Int64,
        limit_ns: Int64, rank: Int32,
    ) -> None:  # fmt: skip
        layout, exchange = self.layout, self.layout.exchange
        count, passed = shared_integers(1), shared_integers(1)
        epoch, alive = packets.current_epoch(send_state) - Uint32(1), Boolean(True)
        for item in range(cute.arch.block_idx()[0], far_count * layout.result_messages, cute.arch.grid_dim()[0]):
            source, message = vector.scalar(far + Int64(item % far_count) * 4, Int32)[0], item // far_count
            place = place_of(layout, "record", epoch, source, 0)
            alive = wait_signal(
                network + signal_at(layout, "record", place), epoch, count, alive, limit_ns, report, rank, source,
                NETWORK_RECORD_STAGE,
            )  # fmt: skip
            header = network + message_at(layout, "record", "inbox", place)
            here = vector.min_of(count[0] - message * RECORDS, Int32(RECORDS))
            records = header + Int64(message) * layout.record_message_bytes + layout.headers_bytes
            plain, due = vector.scalar(header + 8, Int32)[0] == ROWS, here > 0
            if const_expr(layout.forwards_rows):
                if plain:
                    due = message * RECORDS < vector.scalar(header + 4, Int32)[0]
                    if due:
                        group = group_of(layout, epoch, source)
                        signals = network + layout.start("row_signals") + group * exchange.source_run_bytes
                        alive = wait_signal(
                            signals + Int64(message) * 8, epoch, count, alive, limit_ns, report, rank, source,
                            NETWORK_RECORD_STAGE,
                        )  # fmt: skip
                        here = count[0] & 255
                        records = network + layout.start("row_inbox") + group * exchange.source_record_bytes
                        records = records + Int64(message * RECORDS) * exchange.record_bytes
            if due & alive:
                outbox = network + message_at(
                    layout, "result", "outbox", place_of(layout, "result", epoch, source, message)
                )
                returned = own + exchange.node_region(Int64(source // layout.members))
                if cute.arch.thread_idx()[0] == 0:
                    passed[0] = Int32(1)
                cute.arch.sync_threads()
                if plain:
                    if const_expr(layout.forwards_rows):
                        self.sum_rows(records, here, message, returned, outbox, epoch, limit_ns, report, rank, passed)
                else:
                    self.sum_packets(records, here, returned, outbox, epoch, limit_ns, report, rank, passed)
                cute.arch.sync_threads()
                alive = Boolean(passed[0] != 0)
                if alive:
                    place = place_of(layout, "result", epoch, rank, message)
                    size = vector.max_of(Int64(here) * layout.result_bytes, Int64(16))
                    nvshmem.put_signal_block(
                        self.arch, network + message_at(layout, "result", "inbox", place), outbox, size,
                        network + signal_at(layout, "result", place), signal_of(here, epoch), source,
                    )  # fmt: skip

    # --- Packets -----------------------------------------------------------------------------------------------------

    @cute.jit
    def sum_packets(
        self, records: Int64, here: Int32, returned: Int64, outbox: Int64, epoch: Uint32, limit_ns: Int64,
        report: Int64, rank: Int32, passed: cute.Tensor,
    ) -> None:  # fmt: skip
        """All threads a record at a time. returned: what stands for a region in which results are this source's."""
        layout, exchange, thread = self.layout, self.layout.exchange, cute.arch.thread_idx()[0]
        copy = copy_of(epoch, exchange.result_copies)
        inbox = returned + exchange.start("result_packets") + copy * exchange.result_packet_bytes
        alive = Boolean(passed[0] != 0)
        for number in range(here):
            record, target = records + Int64(number) * layout.record_bytes, outbox + Int64(number) * layout.result_bytes
            token = vector.scalar(record, Int32)[0]
            pairs = Int64(token) * exchange.top_k
            for packet in range(thread, exchange.result_packets, self.threads):
                total, first = [Float32(0.0)] * (PACKET_WORDS * self.each), Int32(-1)
                for start in range_constexpr(0, exchange.top_k, AT_ONCE):
                    places = list(range(start, vector.const_min(start + AT_ONCE, exchange.top_k)))
                    words = [vector.scalar(record + 4 * (1 + j), Uint32)[0] for j in places]
                    wanted = [Boolean(word != Uint32(NO_PLACE)) for word in words]
                    for j, valid in zip(places, wanted, strict=True):
                        first = Int32(vector.select(valid & (first < 0), Int32(j), first))
                    received = cute.make_rmem_tensor(4 * len(places), Uint32)
                    addresses = [
                        inbox + ((pairs + j) * exchange.result_packets + packet) * PACKET_BYTES for j in places
                    ]
                    senders = [arrived(exchange, word)[0] for word in words]
                    alive = packets.receive(
                        addresses, wanted, senders, epoch, received, alive, limit_ns, report, rank, RESULT_STAGE
                    )
                    behind = record + 4 * (1 + exchange.top_k)
                    weights = [vector.scalar(behind + 4 * j, Float32)[0] for j in places]
                    total = add_received(total, received, wanted, weights, self.dtype)
                if packet == 0:
                    vector.scalar(target, Int32)[0] = token * exchange.top_k + first
                self.write_words(target + 16, packet, total)
        if not alive:
            passed[0] = Int32(0)

    @cute.jit
    def write_words(self, target: Int64, packet: Int32, total: list[Any]) -> None:
        for i in range_constexpr(PACKET_WORDS):
            at = packet * PACKET_WORDS + i
            if at < self.layout.exchange.result_bytes // 4:
                word = packets.narrow(total[i * self.each : (i + 1) * self.each], self.dtype)
                vector.scalar(target + Int64(at) * 4, Uint32)[0] = Uint32(word)

    # --- Plain rows --------------------------------------------------------------------------------------------------

    @cute.jit
    def sum_rows(
        self, records: Int64, here: Int32, chunk: Int32, returned: Int64, outbox: Int64, epoch: Uint32, limit_ns: Int64,
        report: Int64, rank: Int32, passed: cute.Tensor,
    ) -> None:  # fmt: skip
        """A warp a record, once the members' flags of the chunk have come."""
        layout, exchange, thread = self.layout, self.layout.exchange, cute.arch.thread_idx()[0]
        copy = copy_of(epoch, exchange.result_copies)
        flags = returned + exchange.start("result_flags") + copy * exchange.result_flag_bytes
        if thread < layout.members:
            sender = first_member(layout, rank) + thread
            flag = flags + (Int64(sender) * exchange.max_records + chunk) * 4
            if not sync.wait(flag, epoch, "sys", limit_ns, report, rank, sender, RESULT_CHUNK_STAGE, True):
                passed[0] = Int32(0)
        cute.arch.sync_threads()
        results = returned + exchange.start("results") + copy * exchange.result_row_bytes
        for number in range(thread // WARP, here, self.threads // WARP):
            record = records + Int64(number) * exchange.record_bytes + exchange.meta_offset
            self.sum_record(record, results, outbox + Int64(number) * layout.result_bytes)

    @cute.jit
    def sum_record(self, meta: Int64, results: Int64, target: Int64) -> None:
        """Lane j knows about place j."""
        exchange, lane = self.layout.exchange, cute.arch.thread_idx()[0] % WARP
        token, weight, there = vector.scalar(meta, Int32)[0], Float32(0.0), Boolean(False)
        if lane < exchange.top_k:
            there = Boolean(vector.scalar(meta + 4 * (1 + Int64(lane)), Uint32)[0] != Uint32(NO_PLACE))
            weight = vector.scalar(meta + 4 * (1 + exchange.top_k + Int64(lane)), Float32)[0]
        here, vectors = Uint32(cute.arch.vote_ballot_sync(there)), exchange.result_bytes // 16
        partial = PartialSums(exchange, self.dtype, PacketTiling(exchange.result_packets, 1))
        row = token * exchange.top_k + lane
        if lane == 0:
            vector.scalar(target, Int32)[0] = token * exchange.top_k + lowest(here)
        for first in range(0, vectors, WARP * UNROLL):
            numbers = [vector.min_of(first + lane + i * WARP, Int32(vectors - 1)) for i in range(UNROLL)]
            total = zeros(UNROLL * 4 * self.each)
            partial.add_places(total, results, Int64(exchange.result_bytes), row, weight, here, numbers)
            summed = rounded(total, self.dtype)
            for i in range_constexpr(UNROLL):
                if first + lane + i * WARP < vectors:
                    ptx.store_16b(target + 16 + Int64(numbers[i]) * 16, tuple(summed[4 * i : 4 * i + 4]))
