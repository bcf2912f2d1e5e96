"""The sending half of a combine: every result to its token's rank, in the form that its source asked for.

See `rose_dist.kernels.exchange_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_partial import PartialSums, result_words
from rose_dist.kernels.cute.exchange_parts import Arrivals, copy_of, peer
from rose_dist.kernels.cute.exchange_return_rows import ResultMover
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import HEADER_WORDS, PACKETS, RETURNS, ROWS
from rose_dist.kernels.exchange_tiling import MoverTiling, PacketTiling
from rose_dist.kernels.peer_regions import PACKET_BYTES
from rose_dist.kernels.variants import WARP

AT_ONCE = 8
"""Packets of one output place that a thread has in flight."""
UNROLL = 4
SHARE = 2
"""Warps that share a plain result row."""


@dataclass(frozen=True)
class ResultSender:
    """Part of a kernel. dtype: of results, bf16 or fp32. tiling: of a result's packets."""

    layout: ExchangeLayout
    dtype: torch.dtype
    tiling: PacketTiling
    skip_own: bool = False
    """Leave out what is for this rank's own plain rows."""
    moves: MoverTiling | None = None
    """Plain rows go by bulk copies, and none to this rank itself."""

    @property
    def sums(self) -> PartialSums:
        return PartialSums(self.layout, self.dtype, self.tiling)

    @property
    def groups(self) -> int:
        """Of `SHARE` warps in a block; a warp left over has nothing to do."""
        return self.tiling.threads // WARP // SHARE

    @cute.jit
    def push(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        peers: Int64, epoch: Uint32, rank: Int32, block: Int32, blocks: Int32, shared: Int32 = 0,
    ) -> None:  # fmt: skip
        """By `blocks` blocks, of which this is number `block`. Arguments: as for `ExchangeCombine`; shared: of
        `RowMover`, with `moves`.
        """
        layout, tiling, thread = self.layout, self.tiling, cute.arch.thread_idx()[0]
        headers, chosen = shared_integers(layout.ranks * HEADER_WORDS), shared_integers(layout.top_k + 2)
        for at in range(thread, layout.ranks * HEADER_WORDS, tiling.threads):
            headers[at] = vector.scalar(sources + Int64(at) * 4, Int32)[0]
        cute.arch.sync_threads()
        arrivals = Arrivals(layout, HEADER_WORDS)
        for item in range(block, arrivals.total(headers, (PACKETS,)) * tiling.splits, blocks):
            source, row = arrivals.locate(headers, (PACKETS,), item // tiling.splits, rank)
            if peer(peers, source) != 0:
                record = Int64(source) * layout.max_records + row
                self.choose(tokens_of, slots, record, chosen)
                inbox = peer(peers, source) + layout.start("result_packets")
                inbox = inbox + copy_of(epoch, layout.result_copies) * layout.result_packet_bytes
                split = item % tiling.splits
                if const_expr(layout.partial_sums):
                    self.sums.push_packets(expert_out, row_stride, slots, record, split, chosen, inbox, epoch)
                else:
                    self.push_packets(expert_out, row_stride, slots, record, split, chosen, inbox, epoch)
        if const_expr(layout.has_returns):
            for item in range(block, self.turns(arrivals, headers, RETURNS), blocks):
                source, row, there = self.by_turns(arrivals, headers, RETURNS, item, rank)
                if there & (peer(peers, source) != 0):
                    record = Int64(source) * layout.max_records + row
                    self.push_record(expert_out, row_stride, tokens_of, slots, record, peer(peers, source), epoch, rank)
        moves: Any = self.moves
        if const_expr(moves is not None):
            ResultMover(layout, moves, tiling.threads).push(
                shared, expert_out, row_stride, headers, tokens_of, slots, runs, peers, epoch, rank, block, blocks
            )
        elif const_expr(layout.has_rows):
            for item in range(block, self.turns(arrivals, headers, ROWS), blocks):
                source, chunk, there = self.by_turns(arrivals, headers, ROWS, item, rank)
                if there & (peer(peers, source) != 0):
                    self.push_chunk(
                        expert_out, row_stride, source, chunk, tokens_of, slots, runs, peer(peers, source), epoch, rank
                    )

    def turns(self, arrivals: Arrivals, headers: Any, form: int) -> Any:
        return arrivals.turns_of_others(headers, (form,)) if self.skip_own else arrivals.turns(headers, (form,))

    def by_turns(self, arrivals: Arrivals, headers: Any, form: int, item: Any, rank: Any) -> Any:
        """An item's source, its number there, and whether there is one."""
        turns = arrivals.others_by_turns if self.skip_own else arrivals.by_turns
        return turns(headers, (form,), item, rank)

    # --- Packets -----------------------------------------------------------------------------------------------------

    @cute.jit
    def choose(self, tokens_of: Int64, slots: Int64, record: Int64, chosen: cute.Tensor) -> None:
        """The record's places that are here: their number, its token, the places."""
        top_k, words, thread = self.layout.top_k, self.layout.note_words, cute.arch.thread_idx()[0]
        cute.arch.sync_threads()
        if thread < WARP:
            valid = Boolean(False)
            if thread < top_k:
                valid = Boolean(vector.scalar(slots + (record * words + thread) * 4, Int32)[0] != -1)
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
            words = [
                [result_words(self.layout, expert_out, row_stride, row, number) for number in numbers] for row in rows
            ]
            for i in range_constexpr(group):
                at = (Int64(token) * top_k + places[i]) * (self.layout.result_packets * PACKET_BYTES)
                for turn in range_constexpr(tiling.turns):
                    if inside[turn] & (first + i < count):
                        packets.send([inbox + at], Int64(numbers[turn]) * PACKET_BYTES, words[i][turn], epoch)

    # --- Plain rows --------------------------------------------------------------------------------------------------

    @cute.jit
    def push_record(
        self, expert_out: Int64, row_stride: Int64, tokens_of: Int64, slots: Int64, record: Int64, region: Int64,
        epoch: Uint32, rank: Int32,
    ) -> None:  # fmt: skip
        """All results for a record, or their sum, and their token's flag."""
        warp, warps = cute.arch.thread_idx()[0] // WARP, self.tiling.threads // WARP
        token = vector.scalar(tokens_of + record * 4, Int32)[0]
        if const_expr(self.layout.partial_sums):
            self.sums.push_row(expert_out, row_stride, slots, record, token, self.results(region, epoch), warp, warps)
        else:
            self.push_places(expert_out, row_stride, slots, record, token, region, epoch)
        self.release(region, token, epoch, rank)

    @cute.jit
    def push_places(
        self, expert_out: Int64, row_stride: Int64, slots: Int64, record: Int64, token: Int32, region: Int64,
        epoch: Uint32,
    ) -> None:  # fmt: skip
        warp = cute.arch.thread_idx()[0] // WARP
        places = vector.select(warp < self.groups * SHARE, Int32(self.layout.top_k), Int32(0))
        for j in range(warp // SHARE, places, self.groups):
            self.push_result(expert_out, row_stride, slots, record, token, j, region, epoch, warp % SHARE)

    @cute.jit
    def push_chunk(
        self, expert_out: Int64, row_stride: Int64, source: Int32, chunk: Int32, tokens_of: Int64, slots: Int64,
        runs: Int64, region: Int64, epoch: Uint32, rank: Int32,
    ) -> None:  # fmt: skip
        """All results for a source's chunk, or their sums, and their flag."""
        layout, warp = self.layout, cute.arch.thread_idx()[0] // WARP
        run = vector.scalar(runs + (Int64(source) * layout.chunks + chunk) * 4, Int32)[0]
        for number in range(warp // SHARE, vector.select(warp < self.groups * SHARE, run & 255, Int32(0)), self.groups):
            record = Int64(source) * layout.max_records + (run >> 8) + number
            token = vector.scalar(tokens_of + record * 4, Int32)[0]
            if const_expr(layout.partial_sums):
                target = self.results(region, epoch)
                self.sums.push_row(expert_out, row_stride, slots, record, token, target, warp % SHARE, SHARE)
            else:
                for j in range(layout.top_k):
                    self.push_result(expert_out, row_stride, slots, record, token, j, region, epoch, warp % SHARE)
        self.release(region, chunk, epoch, rank)

    @cute.jit
    def push_result(
        self, expert_out: Int64, row_stride: Int64, slots: Int64, record: Int64, token: Int32, j: Int32, region: Int64,
        epoch: Uint32, part: Int32,
    ) -> None:  # fmt: skip
        """A warp's part of the result for one place of a record, if it is here."""
        layout = self.layout
        row = vector.scalar(slots + (record * layout.top_k + j) * 4, Int32)[0]
        if row != -1:
            target = self.results(region, epoch) + (Int64(token) * layout.top_k + j) * layout.result_bytes
            self.push_row(expert_out + Int64(vector.max_of(row, Int32(0))) * row_stride, row < 0, target, part)

    def results(self, region: Any, epoch: Any) -> Any:
        """Where an exchange's plain results start in a region."""
        layout = self.layout
        return region + layout.start("results") + copy_of(epoch, layout.result_copies) * layout.result_row_bytes

    @cute.jit
    def release(self, region: Int64, number: Int32, epoch: Uint32, rank: Int32) -> None:
        """The flag of a chunk's or a token's results, once the whole block has written them."""
        layout = self.layout
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            flags = (
                region
                + layout.start("result_flags")
                + copy_of(epoch, layout.result_copies) * (layout.result_flag_bytes)
            )
            ptx.store_release(flags + (Int64(rank) * layout.max_records + number) * 4, epoch, "sys")

    @cute.jit
    def push_row(self, row: Int64, dropped: Boolean, target: Int64, part: Int32) -> None:
        """A warp's part; zeros for a row that its expert had no room for."""
        lane, vectors = cute.arch.thread_idx()[0] % WARP, self.layout.result_bytes // 16
        for first in range(part * (WARP * UNROLL), vectors, SHARE * WARP * UNROLL):
            numbers = [vector.min_of(first + lane + i * WARP, Int32(vectors - 1)) for i in range(UNROLL)]
            values = [ptx.load_16b(row + Int64(number) * 16) for number in numbers]
            for i in range_constexpr(UNROLL):
                words = tuple(Uint32(vector.select(dropped, Int32(0), word)) for word in values[i])
                if first + lane + i * WARP < vectors:
                    ptx.store_packet(target + Int64(numbers[i]) * 16, words)
