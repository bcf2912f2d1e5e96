"""The sending half of a dispatch of many tokens where one launch sends and takes: rows by bulk copies.

Its blocks run beside `AssignSlots`, which numbers the pairs: rows leave before the numbers that go with them are there.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import vector
from rose_dist.kernels.cute.exchange_parts import count_sent, owner, place, send_headers
from rose_dist.kernels.cute.exchange_push import RowPusher
from rose_dist.kernels.cute.expert_slots import local_expert, shared_integers
from rose_dist.kernels.cute.row_mover import RowMover, dynamic_shared
from rose_dist.kernels.dsl import Int32, Int64, Uint32, const_expr, cute
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import NO_PLACE, ROWS
from rose_dist.kernels.exchange_tiling import MoverTiling
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class RecordMover:
    """Part of a kernel. A block takes a chunk at a time, to all destinations but this rank: some warps move rows, the
    others write what goes with them. A chunk's flags are released when the next one's rows are on their way.
    """

    layout: ExchangeLayout
    tiling: MoverTiling
    threads: int

    @property
    def mover(self) -> RowMover:
        return RowMover(self.tiling)

    @property
    def pusher(self) -> RowPusher:
        return RowPusher(self.layout, self.threads)

    @cute.jit
    def push(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, slots: Int64, counts: Int64, offsets: Int64,
        sent: Int64, peers: Int64, live: Int32, epoch: Uint32, rank: Int32, block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        """Arguments: as for `RowPusher.push`. Of these slots, counts and offsets are read after the launch before has
        ended, the others when it has begun to.
        """
        layout, pusher, mover = self.layout, self.pusher, self.mover
        size, warp = layout.chunk, cute.arch.thread_idx()[0] // WARP
        counted, masks = shared_integers(layout.experts + layout.ranks), shared_integers(3 * size)
        shared = dynamic_shared()
        mover.set_up(shared)
        ring, area, end = mover.ring(), pusher.area(rank, epoch), Int32(0)
        before, third, third_before = Int32(-1), Int32(0), Int32(0)
        chunks = (live + (size - 1)) // size
        for chunk in range(block, chunks + blocks, blocks):  # the last has no tokens
            pusher.find_destinations(ids, chunk, live, masks, third)
            cute.arch.sync_threads()
            if warp < self.tiling.warps:
                end = ring[0][0]
                self.move_rows(shared, ring, x, ids, peers, area, chunk, live, masks, third, rank)
            if before < 0:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
                self.send_headers(counted, counts, sent, peers, live, epoch, rank, block, blocks)
            if warp < self.tiling.warps:
                mover.complete(shared, ring, end)
            else:
                self.write_notes(scales, ids, weights, slots, offsets, peers, area, chunk, live, masks, third, rank)
            self.release(peers, rank, before, epoch, masks, third_before)
            before, third_before = chunk, third
            third = vector.select(third == 2 * size, Int32(0), third + size)

    @cute.jit
    def send_headers(
        self, counted: cute.Tensor, counts: Int64, sent: Int64, peers: Int64, live: Int32, epoch: Uint32, rank: Int32,
        block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        if block < self.layout.ranks:
            self.pusher.load_counts(counts, counted)
            send_headers(self.layout, counted, peers, rank, live, Int32(ROWS), epoch, block, blocks, self.threads)
            if block == 0:
                count_sent(self.layout, counted, sent, rank, self.threads)

    @cute.jit
    def destination(self, ids: Int64, token: Int32, rank: Int32) -> Int32:
        """Of lane j, the rank that place j of a token is for; −1 for none and for this one."""
        to, lane = Int32(-1), cute.arch.thread_idx()[0] % WARP
        if lane < self.layout.top_k:
            expert = local_expert(ids, token * self.layout.top_k + lane, Int32(0), self.layout.experts)
            if expert >= 0:
                to = Int32(owner(self.layout, expert))
        return Int32(vector.select(to == rank, Int32(-1), to))

    @cute.jit
    def move_rows(
        self, shared: Int32, ring: list[cute.Tensor], x: Int64, ids: Int64, peers: Int64, area: Int64, chunk: Int32,
        live: Int32, masks: cute.Tensor, third: Int32, rank: Int32,
    ) -> None:  # fmt: skip
        layout = self.layout
        for number in range(cute.arch.thread_idx()[0] // WARP, layout.chunk, self.tiling.warps):
            token = chunk * layout.chunk + number
            if token < live:
                to = self.destination(ids, token, rank)
                target = self.pusher.target(to, peers, area, chunk, number, masks, third)
                if cute.arch.vote_any_sync(target != 0):
                    self.mover.move(shared, ring, x + Int64(token) * layout.row_bytes, target)

    @cute.jit
    def write_notes(
        self, scales: Int64, ids: Int64, weights: Int64, slots: Int64, offsets: Int64, peers: Int64, area: Int64,
        chunk: Int32, live: Int32, masks: cute.Tensor, third: Int32, rank: Int32,
    ) -> None:  # fmt: skip
        """Scales and meta of the chunk's records, by the warps that move nothing."""
        layout, lane = self.layout, cute.arch.thread_idx()[0] % WARP
        first, step = cute.arch.thread_idx()[0] // WARP - self.tiling.warps, self.threads // WARP - self.tiling.warps
        for number in range(first, layout.chunk, step):
            token, word = chunk * layout.chunk + number, Uint32(NO_PLACE)
            if token < live:
                to = self.destination(ids, token, rank)
                target = self.pusher.target(to, peers, area, chunk, number, masks, third)
                if to >= 0:
                    pair = token * layout.top_k + lane
                    expert = local_expert(ids, pair, Int32(0), layout.experts)
                    ordinal = vector.scalar(slots + Int64(pair) * 4, Int32)[0] - Int32(
                        vector.scalar(offsets + Int64(expert) * 8, Int64)[0]
                    )
                    word = place(layout, expert, ordinal)
                self.pusher.write_meta(token, to, word, weights + Int64(token) * (4 * layout.top_k), target)
                if const_expr(layout.scale_bytes > 0):
                    self.pusher.copy_scales(scales + Int64(token) * layout.scale_bytes, target)

    @cute.jit
    def release(self, peers: Int64, rank: Int32, chunk: Int32, epoch: Uint32, masks: cute.Tensor, third: Int32) -> None:
        """The flags of a chunk whose rows all moving warps have seen written; none for chunk −1."""
        cute.arch.sync_threads()
        to = cute.arch.thread_idx()[0] - (self.threads - WARP)
        if (to >= 0) & (to < self.layout.ranks) & (to != rank) & (chunk >= 0):
            self.pusher.release(peers, to, rank, chunk, epoch, masks, third)
