"""`TwoShot` whose pushing and taking are bulk copies by a warp each, beside the warps that add.

None of the three waits for another but by flags, each as far ahead as it can get: pushes never wait, so the link has
something to carry from the first byte on, and sums are taken while later ones are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.all_reduce_two_shot import VECTOR_BYTES, TwoShot
from rose_dist.kernels.cute.row_mover import RowMover, dynamic_shared
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, cute, range_constexpr
from rose_dist.kernels.exchange_tiling import MoverTiling
from rose_dist.kernels.peer_regions import TAKE_STAGE
from rose_dist.kernels.variants import WARP

PIECE = 4096
MOVES = MoverTiling(PIECE, warps=2, ahead=4, behind=6, most=PIECE)


@dataclass(frozen=True)
class BulkTwoShot(TwoShot):
    """threads: that add; two warps more are launched, the first of which pushes and the second takes."""

    @cute.jit
    def __call__(
        self, x: Int64, live_rows: Int64, out: Int64, row_vectors: Int32,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        slice_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32, rounds: Int32,
        blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Arguments: as for `TwoShot`."""
        self.kernel(
            x, live_rows, out, row_vectors, peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7, slice_bytes, state,
            report, limit_ns, rank, rows, rounds,
        ).launch(
            grid=[blocks, 1, 1], block=[self.threads + 2 * WARP, 1, 1], smem=MOVES.shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, live_rows: Int64, out: Int64, row_vectors: Int32,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        slice_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32, rounds: Int32,
    ) -> None:  # fmt: skip
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        peers = [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7][: self.ranks]
        passed = cute.make_tensor(cute.arch.alloc_smem(Int32, 1), cute.make_layout(1))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live = vector.live_rows(live_rows, rows)
        ptx.exit_if(live == 0)  # no exchange, so no epoch
        epoch = packets.current_epoch(state)
        vectors = live * row_vectors
        share = (vectors + (self.ranks - 1)) // self.ranks
        part = (share + (blocks - 1)) // blocks
        piece = (part + (rounds - 1)) // rounds
        first, last = block * part, vector.min_of((block + 1) * part, share)
        outbox = self.ranks * slice_bytes
        flags = 2 * outbox + Int64(block) * 4
        own = peers[0]
        for other in range_constexpr(1, self.ranks):
            own = Int64(vector.select(rank == other, peers[other], own))
        if cute.arch.thread_idx()[0] == 0:
            passed[0] = Int32(1)
        mover = self.mover
        shared = dynamic_shared()
        mover.set_up(shared)
        warp = cute.arch.thread_idx()[0] // WARP
        span = [first, last, piece, rounds, share, vectors]
        if warp == mover.first_warp:
            self.push_all(shared, x, peers, rank * slice_bytes, flags, span, epoch, rank)
        elif warp > mover.first_warp:
            self.take_all(shared, out, own, own + outbox, slice_bytes, flags, span, epoch, limit_ns, report, rank)
        else:
            for now in range(rounds):
                begin, end = self.bounds(first, last, piece, now)
                self.wait(own, flags, 0, now, epoch, passed, limit_ns, report, rank)
                self.add(x, out, own, slice_bytes, peers, outbox + rank * slice_bytes, share, vectors, begin, end, rank)
                self.publish(peers, flags, 1, now, epoch, rank)
        packets.finish_epoch(state, block == 0, blocks, Boolean(True))

    @property
    def mover(self) -> RowMover:
        return RowMover(MOVES, self.threads // WARP)

    def meet(self) -> None:
        """Of the threads that add."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    @cute.jit
    def push_all(
        self, shared: Int32, x: Int64, peers: list[Any], offset: Int64, flags: Int64, span: list[Int32], epoch: Uint32,
        rank: Int32,
    ) -> None:  # fmt: skip
        """Each of the others' slices to its owner, by a warp. A round's flags follow the next round's pieces."""
        first, last, piece, rounds, share, vectors = span
        mover, lane = self.mover, cute.arch.thread_idx()[0] % WARP
        ring = mover.ring()
        for now in range(rounds + 1):
            end = ring[0][0]
            if now < rounds:
                begin = first + now * piece
                for owner in range_constexpr(self.ranks):
                    if rank != owner:
                        stop = vector.min_of(vector.min_of(begin + piece, last), vectors - owner * share)
                        source = x + Int64(owner * share) * VECTOR_BYTES
                        self.move(shared, ring, source, peers[owner] + offset, begin, stop)
            if now > 0:
                mover.complete(shared, ring, end)
                for peer in range_constexpr(self.ranks):
                    if (lane == peer) & (rank != peer):
                        ptx.store_release(peers[peer] + self.flag(flags, 0, now - 1, rank), epoch, "sys")

    @cute.jit
    def take_all(
        self, shared: Int32, out: Int64, own: Int64, outbox: Int64, slice_bytes: Int64, flags: Int64, span: list[Int32],
        epoch: Uint32, limit_ns: Int64, report: Int64, rank: Int32,
    ) -> None:  # fmt: skip
        """The others' sums to `out`, by a warp. After a wait that expired, it waits for none."""
        first, last, piece, rounds, share, vectors = span
        mover, lane = self.mover, cute.arch.thread_idx()[0] % WARP
        ring, alive = mover.ring(), Boolean(True)
        for now in range(rounds):
            begin = first + now * piece
            if alive & (lane < self.ranks) & (lane != rank):
                flag = own + self.flag(flags, 1, now, lane)
                alive = sync.wait(
                    flag, epoch, "sys", limit_ns + limit_ns // 4, report, rank, Int32(lane), TAKE_STAGE
                )  # fmt: skip
            alive = Boolean(cute.arch.vote_all_sync(alive))
            cute.arch.sync_warp()
            ptx.fence_async_copies()
            for owner in range_constexpr(self.ranks):
                if rank != owner:
                    stop = vector.min_of(vector.min_of(begin + piece, last), vectors - owner * share)
                    target = out + Int64(owner * share) * VECTOR_BYTES
                    self.move(shared, ring, outbox + owner * slice_bytes, target, begin, stop)
        mover.complete(shared, ring, ring[0][0])

    @cute.jit
    def move(
        self, shared: Int32, ring: list[cute.Tensor], source: Int64, target: Int64, begin: Int32, stop: Int32
    ) -> None:
        """The vectors from `begin` up to `stop`, counted from both addresses."""
        for first in range(begin, stop, PIECE // VECTOR_BYTES):
            at = Int64(first) * VECTOR_BYTES
            mine = Int64(vector.select(cute.arch.thread_idx()[0] % WARP == 0, target + at, Int64(0)))
            size = vector.min_of(stop - first, Int32(PIECE // VECTOR_BYTES)) * VECTOR_BYTES
            self.mover.step(shared, ring, source + at, mine, size)
