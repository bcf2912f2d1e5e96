"""The sending half of a combine for plain rows, by bulk copies; see `rose_dist.kernels.exchange_layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.exchange_partial import lowest
from rose_dist.kernels.cute.exchange_parts import Arrivals, copy_of, peer
from rose_dist.kernels.cute.row_mover import RowMover
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import HEADER_WORDS, ROWS
from rose_dist.kernels.exchange_tiling import MoverTiling
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
            self.release(region_before, before, epoch, rank)
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

    @cute.jit
    def release(self, region: Int64, chunk: Int32, epoch: Uint32, rank: Int32) -> None:
        """The flag of a chunk whose results all moving warps have seen written; none for chunk −1."""
        layout: Any = self.layout
        cute.arch.sync_threads()
        if Boolean(cute.arch.thread_idx()[0] == self.threads - 1) & (chunk >= 0):
            copy = copy_of(epoch, layout.result_copies) * layout.result_flag_bytes
            flags = region + layout.start("result_flags") + copy
            ptx.store_release(flags + (Int64(rank) * layout.max_records + chunk) * 4, epoch, "sys")
