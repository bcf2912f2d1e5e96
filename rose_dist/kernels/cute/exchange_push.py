"""The sending half of a dispatch of many tokens: plain rows into the receivers' memory, a flag for every chunk.

Before it, `AssignSlots` numbers the pairs of each expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.exchange_parts import (
    across,
    copy_of,
    count_sent,
    load_scale_word,
    owner,
    peer,
    place,
    send_headers,
)
from rose_dist.kernels.cute.expert_slots import local_expert, shared_integers
from rose_dist.kernels.dsl import Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import NO_PLACE, ROWS
from rose_dist.kernels.variants import WARP

UNROLL = 4


@dataclass(frozen=True)
class RowPusher:
    """Part of a kernel. A block takes a chunk at a time, to all its destinations at once: a warp a token, or several
    where a block has more warps than a chunk has tokens. The warps go on to the next chunk while one of them releases
    this one's flags.
    """

    layout: ExchangeLayout
    threads: int
    members: int = 1
    """Ranks that share a destination, where rows are sent to be forwarded; their records then name experts as `across`
    does."""

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def share(self) -> int:
        """Warps that share a token's row."""
        return max(1, self.warps // self.layout.chunk)

    @cute.jit
    def push(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, slots: Int64, counts: Int64, offsets: Int64,
        sent: Int64, peers: Int64, live: Int32, epoch: Uint32, rank: Int32, block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        """All records of the `live` tokens and the headers, by `blocks` blocks, of which this is number `block`.
        Arguments: as for `DispatchRows`.
        """
        layout, thread = self.layout, cute.arch.thread_idx()[0]
        counted, masks = shared_integers(layout.experts + layout.ranks), shared_integers(2 * layout.chunk)
        if block < layout.ranks:
            self.load_counts(counts, counted)
            send_headers(layout, counted, peers, rank, live, Int32(ROWS), epoch, block, blocks, self.threads)
            if block == 0:
                count_sent(layout, counted, sent, rank, self.threads)
        half = Int32(0)
        for chunk in range(block, (live + (layout.chunk - 1)) // layout.chunk, blocks):
            self.find_destinations(ids, chunk, live, masks, half)
            cute.arch.sync_threads()
            area = self.area(rank, epoch)
            self.push_tokens(x, scales, ids, weights, slots, offsets, peers, area, chunk, live, masks, half)
            cute.arch.sync_threads()
            if thread < layout.ranks:
                self.release(peers, thread, rank, chunk, epoch, masks, half)
            half = layout.chunk - half

    def area(self, rank: Any, epoch: Any) -> Any:
        """Where the records of a source start in a region."""
        layout = self.layout
        return layout.start("records") + (copy_of(epoch, layout.copies) * layout.ranks + rank) * (
            layout.source_record_bytes
        )

    @cute.jit
    def load_counts(self, counts: Int64, counted: cute.Tensor) -> None:
        """Pairs for each expert; records for each rank are not known and nobody asks."""
        layout, thread = self.layout, cute.arch.thread_idx()[0]
        for at in range(thread, layout.experts, self.threads):
            counted[at] = vector.scalar(counts + Int64(at) * 4, Int32)[0]
        for to in range(thread, layout.ranks, self.threads):
            counted[layout.experts + to] = Int32(0)
        cute.arch.sync_threads()

    @cute.jit
    def find_destinations(self, ids: Int64, chunk: Int32, live: Int32, masks: cute.Tensor, half: Int32) -> None:
        """Which destinations each token of the chunk has, as bits, into `masks` from `half` on."""
        layout, lane, warp = self.layout, cute.arch.thread_idx()[0] % WARP, cute.arch.thread_idx()[0] // WARP
        for number in range(warp, layout.chunk, self.warps):
            token, mask = chunk * layout.chunk + number, Uint32(0)
            if (token < live) & (lane < layout.top_k):
                expert = local_expert(ids, token * layout.top_k + lane, Int32(0), layout.experts)
                if expert >= 0:
                    mask = Uint32(1) << Uint32(owner(layout, expert) // self.members)
            mask = cute.arch.warp_redux_sync(mask, "or")
            if lane == 0:
                masks[half + number] = Int32(mask)

    @cute.jit
    def push_tokens(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, slots: Int64, offsets: Int64, peers: Int64,
        area: Int64, chunk: Int32, live: Int32, masks: cute.Tensor, half: Int32,
    ) -> None:  # fmt: skip
        """peers: int64 [destinations], 0 for those that are left out; area: where this source's records start there."""
        layout, warp, lane = self.layout, cute.arch.thread_idx()[0] // WARP, cute.arch.thread_idx()[0] % WARP
        for number in range(warp // self.share, layout.chunk, self.warps // self.share):
            token = chunk * layout.chunk + number
            if token < live:
                to, word = Int32(-1), Uint32(NO_PLACE)
                if lane < layout.top_k:
                    pair = token * layout.top_k + lane
                    expert = local_expert(ids, pair, Int32(0), layout.experts)
                    if expert >= 0:
                        to = Int32(owner(layout, expert) // self.members)
                        ordinal = vector.scalar(slots + Int64(pair) * 4, Int32)[0] - Int32(
                            vector.scalar(offsets + Int64(expert) * 8, Int64)[0]
                        )
                        word = self.word(expert, ordinal)
                row, given = x + Int64(token) * layout.row_bytes, scales + Int64(token) * layout.scale_bytes
                mine = weights + Int64(token) * (4 * layout.top_k)
                self.push_record(
                    row, given, token, mine, to, word, peers, area, chunk, number, masks, half, warp % self.share
                )

    def word(self, expert: Any, ordinal: Any) -> Any:
        return place(self.layout, expert, ordinal) if self.members == 1 else across(expert, ordinal)

    @cute.jit
    def push_record(
        self, row: Int64, scales: Int64, token: Int32, weights: Int64, to: Int32, word: Uint32, peers: Int64,
        area: Int64, chunk: Int32, number: Int32, masks: cute.Tensor, half: Int32, part: Int32,
    ) -> None:  # fmt: skip
        """A warp's part of a token's row to all its destinations, the chunk's number `number`; lane j knows about place
        j: its destination, −1 for none, and its word. weights: the token's.
        """
        target = self.target(to, peers, area, chunk, number, masks, half)
        if part == 0:
            self.write_meta(token, to, word, weights, target)
            if const_expr(self.layout.scale_bytes > 0):
                self.copy_scales(scales, target)
        self.copy_row(row, target, part)

    @cute.jit
    def target(
        self, to: Int32, peers: Int64, area: Int64, chunk: Int32, number: Int32, masks: cute.Tensor, half: Int32
    ) -> Int64:
        """Where the record of the chunk's number `number` goes, for the first of the lanes with one destination."""
        layout, lane, target = self.layout, cute.arch.thread_idx()[0] % WARP, Int64(0)
        if to >= 0:
            before, region = chunk * layout.chunk, peer(peers, to)
            for earlier in range(number):
                before += Int32(Uint32(masks[half + earlier]) >> Uint32(to) & Uint32(1))
            if region != 0:
                target = region + area + Int64(before) * layout.record_bytes
        for j in range(layout.top_k):
            if (cute.arch.shuffle_sync(to, j) == to) & (j < lane):
                target = Int64(0)  # an earlier place's lane has the same destination
        return target

    @cute.jit
    def write_meta(self, token: Int32, to: Int32, word: Uint32, weights: Int64, target: Int64) -> None:
        """`word` is this lane's place for destination `to`."""
        layout, lane, weight = self.layout, cute.arch.thread_idx()[0] % WARP, Uint32(0)
        if const_expr(layout.weighted):
            place = Int64(vector.min_of(lane, Int32(layout.top_k - 1)))
            weight = Uint32(vector.scalar(weights + place * 4, Uint32)[0])
        for j in range(layout.top_k):
            record, destination = Int64(cute.arch.shuffle_sync(target, j)), cute.arch.shuffle_sync(to, j)
            if record != 0:
                meta = record + layout.meta_offset
                if lane < self.layout.top_k:
                    mine = vector.select(to == destination, word, Uint32(NO_PLACE))
                    ptx.store_relaxed(meta + 4 * (1 + Int64(lane)), Uint32(mine), "sys")
                    if const_expr(layout.weighted):
                        ptx.store_relaxed(meta + 4 * (1 + layout.top_k + Int64(lane)), weight, "sys")
                if lane == 0:
                    ptx.store_relaxed(meta, Uint32(token), "sys")

    @cute.jit
    def copy_row(self, source: Int64, target: Int64, part: Int32) -> None:
        """A warp's part of a row, loaded once, to each lane's target that is not 0."""
        lane, vectors = cute.arch.thread_idx()[0] % WARP, self.layout.row_bytes // 16
        for first in range(part * (WARP * UNROLL), vectors, self.share * WARP * UNROLL):
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
    def run(self, chunk: Int32, to: Int32, masks: cute.Tensor, half: Int32) -> Int32:
        """The chunk's run of records for destination `to`, as `runs` has it."""
        count = Int32(0)
        for number in range(self.layout.chunk):
            count += Int32(Uint32(masks[half + number]) >> Uint32(to) & Uint32(1))
        return (chunk * self.layout.chunk) << 8 | count

    @cute.jit
    def release(
        self, peers: Int64, to: Int32, rank: Int32, chunk: Int32, epoch: Uint32, masks: cute.Tensor, half: Int32
    ) -> None:
        """The chunk's run and flag, of source `rank`, for destination `to`."""
        layout = self.layout
        copy = copy_of(epoch, layout.copies) * layout.ranks + rank
        at = peer(peers, to) + layout.start("runs") + copy * layout.source_run_bytes + Int64(chunk) * 8
        if peer(peers, to) != 0:
            ptx.store_relaxed(at, Uint32(self.run(chunk, to, masks, half)), "sys")
            ptx.store_release(at + 4, epoch, "sys")
