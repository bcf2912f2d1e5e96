"""Combine between the GPUs of one NVLink domain: results to their tokens' ranks, which sum them in top-k order.

See `rose_dist.kernels.exchange_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import Arrivals, copy_of, owner, peer
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.dsl import (
    TYPES,
    Boolean,
    Float32,
    Int32,
    Int64,
    Stream,
    Uint32,
    const_expr,
    cute,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.exchange_layout import HEADER_WORDS, ExchangeLayout
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.peer_regions import PACKET_BYTES, PACKET_WORDS, RESULT_STAGE
from rose_dist.kernels.variants import WARP

AT_ONCE = 8
"""Packets of one output place that a thread has in flight."""
UNROLL = 4


@dataclass(frozen=True)
class ExchangeCombine(jit.Kernel):
    """Sends this rank's results, if `send`, and, if `receive`, sums what comes back as packets for this rank's tokens.
    The grid must be co-resident.

    dtype: of results, bf16 or fp32. most: of `PacketTiling`.
    """

    layout: ExchangeLayout
    dtype: torch.dtype
    out_dtype: torch.dtype
    accumulate: bool
    most: int
    send: bool
    receive: bool

    @property
    def tiling(self) -> PacketTiling:
        """Of a result."""
        return PacketTiling(self.layout.result_packets, self.most)

    @property
    def each(self) -> int:
        """Elements of a word."""
        return 4 // self.dtype.itemsize

    @property
    def words(self) -> int:
        """Of a result."""
        return self.layout.result_bytes // 4

    @cute.jit
    def __call__(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        ids: Int64, weights: Int64, live_rows: Int64, out: Int64, peers: Int64, own: Int64, send_state: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses. To send: expert_out, whose rows are row_stride bytes apart, and sources, tokens_of, slots and runs
        as `ExchangeDispatch` wrote them. To receive: ids int32 and weights fp32 [tokens, top_k], live_rows int32 [1] or
        0, out [tokens, hidden]. peers, own: as for `ExchangeDispatch`. States: of `packets`, of combines sent and
        received.
        """
        self.kernel(
            expert_out, row_stride, sources, tokens_of, slots, runs, ids, weights, live_rows, out, peers, own,
            send_state, receive_state, report, limit_ns, rank, tokens,
        ).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        ids: Int64, weights: Int64, live_rows: Int64, out: Int64, peers: Int64, own: Int64, send_state: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        first, blocks = cute.arch.block_idx()[0] == 0, cute.arch.grid_dim()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.send):
            epoch = packets.current_epoch(send_state)
            self.push(expert_out, row_stride, sources, tokens_of, slots, runs, peers, epoch, rank)
            packets.finish_epoch(send_state, first, blocks, Boolean(True))
        if const_expr(self.receive):
            live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(receive_state)
            inbox = own + self.inbox(epoch)
            alive, splits = Boolean(True), self.tiling.splits
            for item in range(cute.arch.block_idx()[0], live * splits, blocks):
                alive = self.sum(
                    item // splits, item % splits, inbox, ids, weights, out, epoch, alive, limit_ns, report, rank
                )
            packets.finish_epoch(receive_state, first, blocks, Boolean(True))

    def inbox(self, epoch: Any) -> Any:
        """Where an exchange's result packets start in a region."""
        layout = self.layout
        return layout.start("result_packets") + copy_of(epoch, layout.result_copies) * layout.result_packet_bytes

    # --- Sending -----------------------------------------------------------------------------------------------------

    @cute.jit
    def push(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        peers: Int64, epoch: Uint32, rank: Int32,
    ) -> None:  # fmt: skip
        """Every result to its token's rank, as that rank sent the token: in packets or as a plain row."""
        layout, tiling, thread = self.layout, self.tiling, cute.arch.thread_idx()[0]
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        headers, chosen = shared_integers(layout.ranks * HEADER_WORDS), shared_integers(layout.top_k + 2)
        for at in range(thread, layout.ranks * HEADER_WORDS, tiling.threads):
            headers[at] = vector.scalar(sources + Int64(at) * 4, Int32)[0]
        cute.arch.sync_threads()
        arrivals = Arrivals(layout.ranks, HEADER_WORDS)
        for item in range(block, arrivals.total(headers, 0) * tiling.splits, blocks):
            source, row = arrivals.locate(headers, 0, item // tiling.splits, rank)
            record = Int64(source) * layout.max_tokens + row
            self.choose(tokens_of, slots, record, chosen)
            inbox = peer(peers, source) + self.inbox(epoch)
            self.push_packets(expert_out, row_stride, slots, record, item % tiling.splits, chosen, inbox, epoch)
        if const_expr(layout.has_rows):
            for item in range(block, arrivals.total(headers, 1), blocks):
                source, chunk = arrivals.locate(headers, 1, item, rank)
                self.push_chunk(
                    expert_out, row_stride, source, chunk, tokens_of, slots, runs, peer(peers, source), epoch, rank
                )

    @cute.jit
    def choose(self, tokens_of: Int64, slots: Int64, record: Int64, chosen: cute.Tensor) -> None:
        """The record's places that are here: their number, its token, the places."""
        top_k, thread = self.layout.top_k, cute.arch.thread_idx()[0]
        cute.arch.sync_threads()
        if thread < WARP:
            valid = Boolean(False)
            if thread < top_k:
                valid = Boolean(vector.scalar(slots + (record * top_k + thread) * 4, Int32)[0] != -1)
            mask = Uint32(cute.arch.vote_ballot_sync(valid))
            if valid:
                chosen[2 + Int32(cute.arch.popc(mask & Uint32(cute.arch.lanemask_lt())))] = thread
            if thread == 0:
                chosen[0] = Int32(cute.arch.popc(mask))
                chosen[1] = vector.scalar(tokens_of + record * 4, Int32)[0]
        cute.arch.sync_threads()

    @cute.jit
    def push_packets(
        self, expert_out: Int64, row_stride: Int64, slots: Int64, record: Int64, split: Int32, chosen: cute.Tensor,
        inbox: Int64, epoch: Uint32,
    ) -> None:  # fmt: skip
        """A part of each of the record's results, several of which are loaded at a time."""
        tiling, thread, top_k = self.tiling, cute.arch.thread_idx()[0], self.layout.top_k
        inside = [tiling.inside(split, thread, i) for i in range(tiling.turns)]
        numbers = [
            vector.min_of(tiling.packet(split, thread, i), Int32(tiling.packets - 1)) for i in range(tiling.turns)
        ]
        count, token, group = chosen[0], chosen[1], vector.const_min(AT_ONCE // tiling.turns, top_k)
        for first in range(0, count, group):
            places = [chosen[2 + vector.min_of(first + i, count - 1)] for i in range(group)]
            rows = [vector.scalar(slots + (record * top_k + place) * 4, Int32)[0] for place in places]
            words = [[self.result_words(expert_out, row_stride, row, number) for number in numbers] for row in rows]
            for i in range_constexpr(group):
                at = (Int64(token) * top_k + places[i]) * (self.layout.result_packets * PACKET_BYTES)
                for turn in range_constexpr(tiling.turns):
                    if inside[turn] & (first + i < count):
                        packets.send([inbox + at], Int64(numbers[turn]) * PACKET_BYTES, words[i][turn], epoch)

    def result_words(self, expert_out: Any, row_stride: Any, row: Any, packet: Any) -> Any:
        """A packet's words; zeros for a row that its expert had no room for."""
        dropped = row < 0
        source = expert_out + Int64(vector.select(dropped, Int32(0), row)) * row_stride
        found = []
        for i in range(PACKET_WORDS):
            at = vector.min_of(packet * PACKET_WORDS + i, Int32(self.words - 1))
            word = Uint32(vector.scalar(source + Int64(at) * 4, Uint32)[0])
            found.append(Uint32(vector.select(dropped, Uint32(0), word)))
        return found

    @cute.jit
    def push_chunk(
        self, expert_out: Int64, row_stride: Int64, source: Int32, chunk: Int32, tokens_of: Int64, slots: Int64,
        runs: Int64, region: Int64, epoch: Uint32, rank: Int32,
    ) -> None:  # fmt: skip
        """All results for a source's chunk as plain rows, a warp for each record, and their flag."""
        layout, thread = self.layout, cute.arch.thread_idx()[0]
        run = vector.scalar(runs + (Int64(source) * layout.chunks + chunk) * 4, Int32)[0]
        copy = copy_of(epoch, layout.result_copies)
        results = region + layout.start("results") + copy * layout.result_row_bytes
        for number in range(thread // WARP, run & 255, self.tiling.threads // WARP):
            record = Int64(source) * layout.max_tokens + (run >> 8) + number
            token = vector.scalar(tokens_of + record * 4, Int32)[0]
            for j in range(layout.top_k):
                row = vector.scalar(slots + (record * layout.top_k + j) * 4, Int32)[0]
                if row != -1:
                    target = results + (Int64(token) * layout.top_k + j) * layout.result_bytes
                    self.push_row(expert_out + Int64(vector.max_of(row, Int32(0))) * row_stride, row < 0, target)
        cute.arch.sync_threads()
        if thread == 0:
            flags = region + layout.start("result_flags") + copy * layout.result_flag_bytes
            ptx.store_release(flags + (Int64(rank) * layout.chunks + chunk) * 4, epoch, "sys")

    @cute.jit
    def push_row(self, row: Int64, dropped: Boolean, target: Int64) -> None:
        """By one warp; zeros for a row that its expert had no room for."""
        lane, vectors = cute.arch.thread_idx()[0] % WARP, self.layout.result_bytes // 16
        for first in range(0, vectors, WARP * UNROLL):
            numbers = [vector.min_of(first + lane + i * WARP, Int32(vectors - 1)) for i in range(UNROLL)]
            values = [ptx.load_16b(row + Int64(number) * 16) for number in numbers]
            for i in range_constexpr(UNROLL):
                words = tuple(Uint32(vector.select(dropped, Int32(0), word)) for word in values[i])
                if first + lane + i * WARP < vectors:
                    ptx.store_packet(target + Int64(numbers[i]) * 16, words)

    # --- Receiving packets -------------------------------------------------------------------------------------------

    @cute.jit
    def sum(
        self, token: Int32, split: Int32, inbox: Int64, ids: Int64, weights: Int64, out: Int64, epoch: Uint32,
        alive: Boolean, limit_ns: Int64, report: Int64, rank: Int32,
    ) -> Boolean:  # fmt: skip
        """A part of a token's weighted sum."""
        tiling, thread = self.tiling, cute.arch.thread_idx()[0]
        pairs = Int64(token) * self.layout.top_k
        for turn in range_constexpr(tiling.turns):
            inside = Boolean(tiling.inside(split, thread, turn))
            packet = vector.select(inside, tiling.packet(split, thread, turn), Int32(0))
            total = [Float32(0.0)] * (PACKET_WORDS * self.each)
            for first in range_constexpr(0, self.layout.top_k, AT_ONCE):
                places = list(range(first, vector.const_min(first + AT_ONCE, self.layout.top_k)))
                experts = [vector.scalar(ids + (pairs + j) * 4, Int32)[0] for j in places]
                wanted = [Boolean((e >= 0) & (e < self.layout.experts) & inside) for e in experts]
                addresses = [inbox + ((pairs + j) * self.layout.result_packets + packet) * PACKET_BYTES for j in places]
                senders = [
                    owner(self.layout, vector.select(w, e, Int32(0))) for w, e in zip(wanted, experts, strict=True)
                ]
                received = cute.make_rmem_tensor(4 * len(places), Uint32)
                alive = packets.receive(
                    addresses, wanted, senders, epoch, received, alive, limit_ns, report, rank, RESULT_STAGE
                )
                total = self.add(total, received, wanted, [weights + (pairs + j) * 4 for j in places])
            self.write(token, packet, inside, total, out)
        return alive

    def add(self, total: Any, received: Any, wanted: Any, weights: Any) -> Any:
        """The sums with the received results, in order."""
        for number, (valid, address) in enumerate(zip(wanted, weights, strict=True)):
            weight = vector.scalar(address, Float32)[0]
            words = [received[4 * number + i] for i in range(PACKET_WORDS)]
            values = [value for word in words for value in packets.widen(word, self.dtype)]
            summed = [a + ptx.product(weight, b) for a, b in zip(total, values, strict=True)]
            total = [Float32(vector.select(valid, new, old)) for new, old in zip(summed, total, strict=True)]
        return total

    @cute.jit
    def write(self, token: Int32, packet: Int32, inside: Boolean, total: list[Any], out: Int64) -> None:
        """A packet's sums, rounded, to `out`."""
        kind, size = TYPES[self.out_dtype], self.each * self.out_dtype.itemsize
        for i in range_constexpr(PACKET_WORDS):
            at = packet * PACKET_WORDS + i
            if inside & (at < self.words):
                target = out + (Int64(token) * self.words + at) * size
                values = total[i * self.each : (i + 1) * self.each]
                if const_expr(self.accumulate):
                    before = vector.load(target, kind, self.each, size).to(Float32)
                    values = [before[n] + value for n, value in enumerate(values)]
                vector.store_words(target, [value.to(kind) for value in values], kind, size)
