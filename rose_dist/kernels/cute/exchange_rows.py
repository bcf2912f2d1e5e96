"""Dispatch and combine of many tokens: plain rows into the receivers' memory, a flag for every `CHUNK` tokens.

Before `PushRows`, `AssignSlots` numbers the pairs of each expert, and `AssignRecords` the records for each rank.
Receiving and returning: `exchange_receive`, `exchange_combine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, sync, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import (
    copy_of,
    count_sent,
    load_scale_word,
    owner,
    peer,
    place,
    send_headers,
)
from rose_dist.kernels.cute.expert_slots import local_expert, shared_integers
from rose_dist.kernels.cute.moe_dispatch_prefill import AssignSlots
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
from rose_dist.kernels.exchange_layout import CHUNK, NO_PLACE, ExchangeLayout
from rose_dist.kernels.peer_regions import RESULT_CHUNK_STAGE
from rose_dist.kernels.variants import WARP

THREADS = CHUNK * WARP
UNROLL = 4
AT_ONCE = 8
"""Results of one output place that a thread has in flight."""
SUM_BLOCKS = 2
"""Blocks that share a chunk's sums."""


@dataclass(frozen=True)
class AssignRecords(AssignSlots):
    """Numbers each token's records by the rank they go to: `experts` are the ranks, and a pair counts if no earlier
    place of its token goes to the same rank.
    """

    exchange: ExchangeLayout

    @cute.jit
    def key(self, ids: Int64, pair: Int32, first_expert: Int32) -> Int32:
        exchange = self.exchange
        expert = local_expert(ids, pair, first_expert, exchange.experts)
        rank = Int32(-1)
        if expert >= 0:
            rank = Int32(owner(self.exchange, expert))
        for earlier in range(pair // self.top_k * self.top_k, pair):
            other = local_expert(ids, earlier, first_expert, self.exchange.experts)
            if other >= 0:
                if owner(self.exchange, other) == rank:
                    rank = Int32(-1)
        return rank


@dataclass(frozen=True)
class PushRows(jit.Kernel):
    """Sends tokens as plain rows: a block a chunk, a warp a token."""

    layout: ExchangeLayout

    @cute.jit
    def __call__(
        self, x: Int64, scales: Int64, ids: Int64, live_rows: Int64, slots: Int64, counts: Int64, offsets: Int64,
        records: Int64, record_counts: Int64, record_offsets: Int64, sent: Int64, peers: Int64, state: Int64,
        rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x, scales, ids, live_rows, sent, peers as for `ExchangeDispatch`; slots, counts and offsets of
        `AssignSlots` over all experts, records, record_counts and record_offsets of `AssignRecords`. state: of
        `packets`, of dispatches sent. A block for every chunk of `tokens`.
        """
        self.kernel(
            x, scales, ids, live_rows, slots, counts, offsets, records, record_counts, record_offsets, sent, peers,
            state, rank, tokens,
        ).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, scales: Int64, ids: Int64, live_rows: Int64, slots: Int64, counts: Int64, offsets: Int64,
        records: Int64, record_counts: Int64, record_offsets: Int64, sent: Int64, peers: Int64, state: Int64,
        rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        chunk, blocks, thread = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], cute.arch.thread_idx()[0]
        counted = shared_integers(self.layout.experts + self.layout.ranks)
        rows = shared_integers(CHUNK * self.layout.ranks)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(state)
        if chunk < self.layout.ranks:
            self.load_counts(counts, record_counts, counted)
            send_headers(self.layout, counted, peers, rank, live, 1, epoch, THREADS)
            if chunk == 0:
                count_sent(self.layout, counted, sent, rank, THREADS)
        for at in range(thread, CHUNK * self.layout.ranks, THREADS):
            rows[at] = Int32(-1)
        cute.arch.sync_threads()
        token = chunk * CHUNK + thread // WARP
        if token < live:
            self.push(x, scales, ids, slots, offsets, records, record_offsets, peers, rank, token, epoch, rows)
        cute.arch.sync_threads()
        if (chunk * CHUNK < live) & (thread < self.layout.ranks):
            self.release(peers, rank, chunk, epoch, rows)
        packets.finish_epoch(state, chunk == 0, blocks, Boolean(True))

    @cute.jit
    def load_counts(self, counts: Int64, record_counts: Int64, counted: cute.Tensor) -> None:
        experts, thread = self.layout.experts, cute.arch.thread_idx()[0]
        for at in range(thread, experts + self.layout.ranks, THREADS):
            source = vector.select(at < experts, counts + Int64(at) * 4, record_counts + Int64(at - experts) * 4)
            counted[at] = vector.scalar(Int64(source), Int32)[0]
        cute.arch.sync_threads()

    @cute.jit
    def push(
        self, x: Int64, scales: Int64, ids: Int64, slots: Int64, offsets: Int64, records: Int64, record_offsets: Int64,
        peers: Int64, rank: Int32, token: Int32, epoch: Uint32, rows: cute.Tensor,
    ) -> None:  # fmt: skip
        """A token to all its destinations, by one warp, whose lane j knows about place j."""
        layout, lane, warp = self.layout, cute.arch.thread_idx()[0] % WARP, cute.arch.thread_idx()[0] // WARP
        to, word, row, target = Int32(-1), Uint32(NO_PLACE), Int32(-1), Int64(0)
        area = layout.start("records")
        area = area + (copy_of(epoch, layout.copies) * layout.ranks + rank) * layout.source_record_bytes
        if lane < self.layout.top_k:
            pair = token * self.layout.top_k + lane
            expert = local_expert(ids, pair, Int32(0), self.layout.experts)
            if expert >= 0:
                to = Int32(owner(self.layout, expert))
                ordinal = vector.scalar(slots + Int64(pair) * 4, Int32)[0] - Int32(
                    vector.scalar(offsets + Int64(expert) * 8, Int64)[0]
                )
                word = Uint32(place(self.layout, expert, ordinal))
                record = vector.scalar(records + Int64(pair) * 4, Int32)[0]
                if record >= 0:
                    row = record - Int32(vector.scalar(record_offsets + Int64(to) * 8, Int64)[0])
                    rows[warp * self.layout.ranks + to] = row
                    target = peer(peers, to) + area + Int64(row) * self.layout.record_bytes
        for j in range(layout.top_k):
            record, destination = Int64(cute.arch.shuffle_sync(target, j)), cute.arch.shuffle_sync(to, j)
            if record != 0:
                meta = record + self.layout.meta_offset
                if lane < self.layout.top_k:
                    mine = vector.select(to == destination, word, Uint32(NO_PLACE))
                    ptx.store_relaxed(meta + 4 * (1 + Int64(lane)), Uint32(mine), "sys")
                if lane == 0:
                    ptx.store_relaxed(meta, Uint32(token), "sys")
        self.copy_row(x + Int64(token) * layout.row_bytes, target)
        if const_expr(layout.scale_bytes > 0):
            self.copy_scales(scales + Int64(token) * layout.scale_bytes, target)

    @cute.jit
    def copy_row(self, source: Int64, target: Int64) -> None:
        """A row, loaded once, to each lane's target that is not 0."""
        lane, vectors = cute.arch.thread_idx()[0] % WARP, self.layout.row_bytes // 16
        for first in range(0, vectors, WARP * UNROLL):
            numbers = [vector.min_of(first + lane + i * WARP, Int32(vectors - 1)) for i in range(UNROLL)]
            values = [ptx.load_16b(source + Int64(number) * 16) for number in numbers]
            for j in range(self.layout.top_k):
                record = Int64(cute.arch.shuffle_sync(target, j))
                if record != 0:
                    for i in range_constexpr(UNROLL):
                        if first + lane + i * WARP < vectors:
                            ptx.store_packet(record + Int64(numbers[i]) * 16, values[i])

    @cute.jit
    def copy_scales(self, source: Int64, target: Int64) -> None:
        """A token's scales to each lane's target that is not 0."""
        lane, words = cute.arch.thread_idx()[0] % WARP, self.layout.data_words - self.layout.row_bytes // 4
        for first in range(0, words, WARP):
            at = vector.min_of(first + lane, Int32(words - 1))
            word = Uint32(load_scale_word(source, at, self.layout.scale_bytes))
            for j in range(self.layout.top_k):
                record = Int64(cute.arch.shuffle_sync(target, j))
                if record != 0:
                    if first + lane < words:
                        ptx.store_relaxed(record + self.layout.row_bytes + Int64(at) * 4, word, "sys")

    @cute.jit
    def release(self, peers: Int64, rank: Int32, chunk: Int32, epoch: Uint32, rows: cute.Tensor) -> None:
        """The chunk's run and flag for the rank that has this thread's number."""
        layout, to = self.layout, cute.arch.thread_idx()[0]
        first, count = Int32(0), Int32(0)
        for token in range(CHUNK):
            row = rows[token * layout.ranks + to]
            if row >= 0:
                if count == 0:
                    first = row
                count += 1
        copy = copy_of(epoch, layout.copies) * layout.ranks + rank
        run = peer(peers, to) + layout.start("runs") + copy * layout.source_run_bytes + Int64(chunk) * 8
        ptx.store_relaxed(run, Uint32(first << 8 | count), "sys")
        ptx.store_release(run + 4, epoch, "sys")


@dataclass(frozen=True)
class SumChunks(jit.Kernel):
    """Sums the results that came back as plain rows, in top-k order: `SUM_BLOCKS` blocks a chunk.

    dtype: of results, bf16 or fp32.
    """

    layout: ExchangeLayout
    dtype: torch.dtype
    out_dtype: torch.dtype
    accumulate: bool

    @property
    def vectors(self) -> int:
        """Of 16 bytes in a result."""
        return self.layout.result_bytes // 16

    @property
    def count(self) -> int:
        """Elements of such a vector."""
        return 16 // self.dtype.itemsize

    @cute.jit
    def __call__(
        self, ids: Int64, weights: Int64, live_rows: Int64, out: Int64, own: Int64, state: Int64, report: Int64,
        limit_ns: Int64, rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: ids, weights, live_rows, out, own as for `ExchangeCombine`; state: of `packets`, of combines
        received. `SUM_BLOCKS` blocks for every chunk of `tokens`.
        """
        self.kernel(ids, weights, live_rows, out, own, state, report, limit_ns, rank, tokens).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, ids: Int64, weights: Int64, live_rows: Int64, out: Int64, own: Int64, state: Int64, report: Int64,
        limit_ns: Int64, rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        block, blocks, thread = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], cute.arch.thread_idx()[0]
        chunk, part = block // SUM_BLOCKS, block % SUM_BLOCKS
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(state)
        copy = copy_of(epoch, self.layout.result_copies)
        flags = own + self.layout.start("result_flags") + copy * self.layout.result_flag_bytes
        results = own + self.layout.start("results") + copy * self.layout.result_row_bytes
        mine = vector.min_of(live - chunk * CHUNK, Int32(CHUNK))
        if (mine > 0) & (thread < self.layout.ranks):
            flag = flags + (Int64(thread) * self.layout.chunks + chunk) * 4
            sync.wait(flag, epoch, "sys", limit_ns, report, rank, thread, RESULT_CHUNK_STAGE, True)
        cute.arch.sync_threads()
        for at in range(part * THREADS + thread, mine * self.vectors, SUM_BLOCKS * THREADS):
            self.sum(chunk * CHUNK + at // self.vectors, at % self.vectors, ids, weights, results, out)
        packets.finish_epoch(state, block == 0, blocks, Boolean(True))

    @cute.jit
    def sum(self, token: Int32, column: Int32, ids: Int64, weights: Int64, results: Int64, out: Int64) -> None:
        """One vector of a token's weighted sum."""
        layout: Any = self.layout
        pairs, total = Int64(token) * layout.top_k, [Float32(0.0)] * self.count
        for first in range_constexpr(0, layout.top_k, AT_ONCE):
            places = list(range(first, vector.const_min(first + AT_ONCE, layout.top_k)))
            experts = [vector.scalar(ids + (pairs + j) * 4, Int32)[0] for j in places]
            loaded = [ptx.load_packet(results + (pairs + j) * layout.result_bytes + Int64(column) * 16) for j in places]
            for number, j in enumerate(places):
                valid = Boolean((experts[number] >= 0) & (experts[number] < layout.experts))
                weight = vector.scalar(weights + (pairs + j) * 4, Float32)[0]
                values = [v for word in loaded[number] for v in packets.widen(Uint32(word), self.dtype)]
                summed = [a + ptx.product(weight, b) for a, b in zip(total, values, strict=True)]
                total = [Float32(vector.select(valid, new, old)) for new, old in zip(summed, total, strict=True)]
        kind, size = TYPES[self.out_dtype], self.count * self.out_dtype.itemsize
        target = out + (Int64(token) * self.vectors + column) * size
        if const_expr(self.accumulate):
            before = vector.load(target, kind, self.count, 16).to(Float32)
            total = [before[i] + value for i, value in enumerate(total)]
        vector.store_words(target, [value.to(kind) for value in total], kind, 16)
