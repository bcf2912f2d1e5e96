"""The sending half of a combine for plain rows, by bulk copies; see `rose_dist.kernels.exchange_layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_partial import lowest
from rose_dist.kernels.cute.exchange_parts import Arrivals, copy_of, peer
from rose_dist.kernels.cute.row_mover import RowMover
from rose_dist.kernels.cute.sum_mover import SumMover
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Uint32, cute, cutlass, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import HEADER_WORDS, ROWS
from rose_dist.kernels.exchange_tiling import MoverTiling, SumTiling
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class ResultMover:
    """Part of a kernel. Each of the other ranks' chunks is a block's: its moving warps take the results for it in turn.
    A chunk's flag is released when the next one's results are on their way, by a thread of a warp that moves nothing.
    """

    layout: ExchangeLayout
    tiling: MoverTiling
    threads: int

    @property
    def mover(self) -> RowMover:
        return RowMover(self.tiling)

    @cute.jit
    def push(
        self, shared: Int32, expert_out: Int64, row_stride: Int64, headers: cute.Tensor, tokens_of: Int64, slots: Int64,
        runs: Int64, peers: Int64, epoch: Uint32, rank: Int32, block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        """headers: Int32 [ranks, HEADER_WORDS] in shared memory. The rest: as for `ResultSender.push`."""
        warp, arrivals, mover = cute.arch.thread_idx()[0] // WARP, Arrivals(self.layout, HEADER_WORDS), self.mover
        mover.set_up(shared)
        ring = mover.ring()
        before, region_before = Int32(-1), Int64(0)
        for item in range(block, arrivals.turns_of_others(headers, (ROWS,)) + blocks, blocks):
            source, chunk, there = arrivals.others_by_turns(headers, (ROWS,), item, rank)
            region = peer(peers, source)
            wanted = Boolean(there & (region != 0))
            if warp < self.tiling.warps:
                end = ring[0][0]
                if wanted:
                    self.move_chunk(
                        shared, ring, expert_out, row_stride, source, chunk, tokens_of, slots, runs, region, epoch
                    )
                mover.complete(shared, ring, end)
            release(self.layout, region_before, before, epoch, rank, self.threads)
            before, region_before = Int32(vector.select(wanted, chunk, Int32(-1))), region

    @cute.jit
    def move_chunk(
        self, shared: Int32, ring: list[cute.Tensor], expert_out: Int64, row_stride: Int64, source: Int32, chunk: Int32,
        tokens_of: Int64, slots: Int64, runs: Int64, region: Int64, epoch: Uint32,
    ) -> None:  # fmt: skip
        """This warp's share of a chunk's results. Lane j knows about pairs j, j + 32, … of its records."""
        layout, lane, top_k = self.layout, cute.arch.thread_idx()[0] % WARP, self.layout.top_k
        warp, place = cute.arch.thread_idx()[0] // WARP, copy_of(epoch, layout.result_copies)
        results = region + layout.start("results") + place * layout.result_row_bytes
        run = vector.scalar(runs + (Int64(source) * layout.chunks + chunk) * 4, Int32)[0]
        first, pairs = Int64(source) * layout.max_records + (run >> 8), (run & 255) * top_k
        rows, places = [], []
        for i in range_constexpr(self.turns):
            pair, row, token = lane + i * WARP, Int32(-1), Int32(0)
            if pair < pairs:
                row = vector.scalar(slots + (first * top_k + pair) * 4, Int32)[0]
                token = vector.scalar(tokens_of + (first + pair // top_k) * 4, Int32)[0]
            rows.append(row)
            places.append(token * top_k + pair % top_k)
        before = Int32(0)
        for i in range_constexpr(self.turns):
            here = Uint32(cute.arch.vote_ballot_sync(rows[i] != -1))
            count, left = Int32(cute.arch.popc(here)), here
            for number in range(0, count):
                row = cute.arch.shuffle_sync(rows[i], lowest(left))
                target = results + Int64(cute.arch.shuffle_sync(places[i], lowest(left))) * layout.result_bytes
                left = left & (left - Uint32(1))
                if (before + number) % self.tiling.warps == warp:
                    if row >= 0:
                        mine = Int64(vector.select(lane == 0, target, Int64(0)))
                        self.mover.move(shared, ring, expert_out + Int64(row) * row_stride, mine)
                    else:
                        self.write_zeros(target)
            before += count

    @property
    def turns(self) -> int:
        """Of a warp's lanes, for a chunk's pairs."""
        return -(-self.layout.chunk * self.layout.top_k // WARP)

    @cute.jit
    def write_zeros(self, target: Int64) -> None:
        """For a row that its expert had no room for."""
        for number in range(cute.arch.thread_idx()[0] % WARP, self.layout.result_bytes // 16, WARP):
            ptx.store_packet(target + Int64(number) * 16, (Uint32(0), Uint32(0), Uint32(0), Uint32(0)))


@dataclass(frozen=True)
class SumSender:
    """Part of a kernel. The same for `partial_sums`: a record is a warp's, its sum goes straight to the source."""

    layout: ExchangeLayout
    dtype: torch.dtype
    tiling: SumTiling
    threads: int

    @property
    def mover(self) -> SumMover:
        return SumMover(self.tiling, self.dtype, self, sums=False)

    @cute.jit
    def push(
        self, shared: Int32, expert_out: Int64, row_stride: Int64, headers: cute.Tensor, tokens_of: Int64, slots: Int64,
        runs: Int64, peers: Int64, epoch: Uint32, rank: Int32, block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        """Arguments: as for `ResultMover.push`."""
        warp, arrivals, mover = cute.arch.thread_idx()[0] // WARP, Arrivals(self.layout, HEADER_WORDS), self.mover
        mover.set_up(shared)
        ring = mover.ring()
        before, region_before = Int32(-1), Int64(0)
        for item in range(block, arrivals.turns_of_others(headers, (ROWS,)) + blocks, blocks):
            source, chunk, there = arrivals.others_by_turns(headers, (ROWS,), item, rank)
            region = peer(peers, source)
            wanted = Boolean(there & (region != 0))
            if warp < self.tiling.warps:
                end = ring[0][0]
                if wanted:
                    self.sum_chunk(
                        shared, ring, expert_out, row_stride, source, chunk, tokens_of, slots, runs, region, epoch
                    )
                mover.complete(shared, ring, end)
            release(self.layout, region_before, before, epoch, rank, self.threads)
            before, region_before = Int32(vector.select(wanted, chunk, Int32(-1))), region

    @cute.jit
    def sum_chunk(
        self, shared: Int32, ring: list[cute.Tensor], expert_out: Int64, row_stride: Int64, source: Int32, chunk: Int32,
        tokens_of: Int64, slots: Int64, runs: Int64, region: Int64, epoch: Uint32,
    ) -> None:  # fmt: skip
        """This warp's share of a chunk's records."""
        layout, lane, top_k = self.layout, cute.arch.thread_idx()[0] % WARP, self.layout.top_k
        results = region + layout.start("results") + copy_of(epoch, layout.result_copies) * layout.result_row_bytes
        run = vector.scalar(runs + (Int64(source) * layout.chunks + chunk) * 4, Int32)[0]
        for number in range(cute.arch.thread_idx()[0] // WARP, run & 255, self.tiling.warps):
            record = Int64(source) * layout.max_records + (run >> 8) + number
            row, weight = Int32(-1), Float32(0.0)
            token = vector.scalar(tokens_of + record * 4, Int32)[0]
            if lane < top_k:
                row = vector.scalar(slots + (record * layout.note_words + lane) * 4, Int32)[0]
                weight = vector.scalar(slots + (record * layout.note_words + top_k + lane) * 4, Float32)[0]
            here = Uint32(cute.arch.vote_ballot_sync(row != -1))
            at = Int64(vector.select(row >= 0, expert_out + Int64(row) * row_stride, Int64(0)))
            self.mover.sum(shared, ring, at, weight, here, Uint32(0), token, results)

    @cute.jit
    def store_sum(self, base: Int64, token: Int32, here: Uint32, number: Int32, values: list[Any]) -> None:
        """A vector of a sum, rounded, to the first of the token's places that are here."""
        layout, each = self.layout, 4 // self.dtype.itemsize
        words = [Uint32(packets.narrow(values[each * i : each * i + each], self.dtype)) for i in range(4)]
        if (here != 0) & (number < layout.result_bytes // 16):
            place = Int64(token) * layout.top_k + lowest(here)
            ptx.store_packet(base + place * layout.result_bytes + Int64(number) * 16, tuple(words))


@cute.jit
def release(
    layout: cutlass.Constexpr, region: Int64, chunk: Int32, epoch: Uint32, rank: Int32, threads: cutlass.Constexpr
) -> None:
    """The flag of a chunk whose results all warps have seen written; none for chunk −1. By a thread of a warp that
    moves nothing.
    """
    cute.arch.sync_threads()
    if Boolean(cute.arch.thread_idx()[0] == threads - 1) & (chunk >= 0):
        copy = copy_of(epoch, layout.result_copies) * layout.result_flag_bytes
        flags = region + layout.start("result_flags") + copy
        ptx.store_release(flags + (Int64(rank) * layout.max_records + chunk) * 4, epoch, "sys")
