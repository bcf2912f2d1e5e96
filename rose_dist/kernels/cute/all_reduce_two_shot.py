"""All-reduce of larger tensors over NVLink in one launch: every rank adds up its slice, and hands the sums round.

Everyone pushes each slice to its owner; the owner adds up in rank order in fp32, rounds once, and pushes the result to
everyone. Block b of one rank deals with block b of the others only, so there is no barrier over the grid. It takes its
part of a slice in rounds, and is two rounds ahead in pushing when it takes one, so that the link has something to carry
while it waits. (Three blocks instead of it, for pushing, adding and taking, were 5 to 25 % slower from 720 KB to 64 MB
on two H200s.)

Region, in every rank's symmetric memory: inbox [ranks, slice_bytes] of slices to be added, outbox [ranks, slice_bytes]
of sums, then flags u32 [2 stages, MAX_ROUNDS, ranks, MAX_BLOCKS], which must be 0 before the first exchange
(`peer_regions.two_shot_bytes`).
Flag [stage][round][source][block]: written by thread `destination` of that block of rank `source` (release, system
scope) with the epoch, once the block has pushed the round's piece; read by thread `source` of the same block of the
owner of the memory (acquire). It publishes that piece. Flags only grow; epoch: see `packets`.
Reuse: when a rank has finished an exchange, each of its blocks has waited for the sums of every peer's same block, so
every peer has read its inbox. And it pushes sums only after every peer has begun the same exchange, so has read its
outbox of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, sync, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute import packets
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, cute, cutlass, range_constexpr
from rose_dist.kernels.peer_regions import ADD_STAGE, LINE_BYTES, MAX_BLOCKS, MAX_ROUNDS, TAKE_STAGE

UNROLL, SUMS = 4, 2
"""Vectors that a thread copies, and sums that it makes, at a time: it loads all of them before it stores the first."""
VECTOR_BYTES = 16
LINE_VECTORS = LINE_BYTES // VECTOR_BYTES


@dataclass(frozen=True)
class TwoShot(jit.Kernel):
    """The grid must be co-resident and of one size on all ranks, at most `MAX_BLOCKS`, and so must be the rounds, at
    most `MAX_ROUNDS`. dtype: bf16 or fp32.
    """

    ranks: int
    dtype: torch.dtype
    threads: int

    @property
    def count(self) -> int:
        """Elements of a vector."""
        return VECTOR_BYTES // self.dtype.itemsize

    @classmethod
    def of(cls, arch: Arch, ranks: int, dtype: torch.dtype) -> TwoShot:
        """With as many threads as an SM has registers for, each of which holds vectors of all ranks."""
        return cls(arch, ranks, dtype, threads=512 if ranks <= 4 else 384)

    @cute.jit
    def __call__(
        self, x: Int64, live_rows: Int64, out: Int64, row_vectors: Int32,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        slice_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32, rounds: Int32,
        blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x and out [rows, row_vectors · 16 bytes], which may be the same; live_rows int32 [1] or 0. peer0 …
        are the ranks' regions, this rank's among them.
        """
        self.kernel(
            x, live_rows, out, row_vectors, peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7, slice_bytes, state,
            report, limit_ns, rank, rows, rounds,
        ).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1,
            preferred_smem_carveout=100,
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
        share = self.cut(vectors, self.ranks)
        part = self.cut(share, blocks)
        piece = self.cut(part, rounds)
        first, last = block * part, vector.min_of((block + 1) * part, share)
        outbox = self.ranks * slice_bytes
        flags = 2 * outbox + Int64(block) * 4
        own = peers[0]
        for other in range_constexpr(1, self.ranks):
            own = Int64(vector.select(rank == other, peers[other], own))
        if cute.arch.thread_idx()[0] == 0:
            passed[0] = Int32(1)
        cute.arch.sync_threads()
        for now in range(rounds + 2):
            adds, takes = now - 1, now - 2
            if now < rounds:
                begin, end = self.bounds(first, last, piece, now)
                self.push(x, peers, rank * slice_bytes, share, vectors, begin, end, rank)
                self.publish(peers, flags, 0, now, epoch, rank)
            if (adds >= 0) & (adds < rounds):
                begin, end = self.bounds(first, last, piece, adds)
                self.wait(own, flags, 0, adds, epoch, passed, limit_ns, report, rank)
                self.add(x, out, own, slice_bytes, peers, outbox + rank * slice_bytes, share, vectors, begin, end, rank)
                self.publish(peers, flags, 1, adds, epoch, rank)
            if takes >= 0:
                begin, end = self.bounds(first, last, piece, takes)
                self.wait(own, flags, 1, takes, epoch, passed, limit_ns, report, rank)
                self.take(out, own + outbox, slice_bytes, share, vectors, begin, end, rank)
        packets.finish_epoch(state, block == 0, blocks, Boolean(True))

    def cut(self, vectors: Any, shares: Any) -> Any:
        """Vectors of one share, in whole lines: what a warp stores at a time, 512 bytes, is then 4 of them, not 5."""
        return (vectors + (shares * LINE_VECTORS - 1)) // (shares * LINE_VECTORS) * LINE_VECTORS

    def bounds(self, first: Any, last: Any, piece: Any, now: Any) -> Any:
        """This thread's first vector of a round's piece, and the piece's end."""
        begin = first + now * piece
        return begin + cute.arch.thread_idx()[0], vector.min_of(begin + piece, last)

    def flag(self, flags: Any, stage: Any, now: Any, source: Any) -> Any:
        """Where a flag is in a region."""
        return flags + Int64((stage * MAX_ROUNDS + now) * self.ranks + source) * (MAX_BLOCKS * 4)

    @cute.jit
    def push(
        self,
        x: Int64,
        peers: list[Any],
        offset: Int64,
        share: Int32,
        vectors: Int32,
        begin: Int32,
        end: Int32,
        rank: Int32,
    ) -> None:
        """Each of the others' slices to its owner."""
        for owner in range_constexpr(self.ranks):
            if rank != owner:
                stop = vector.min_of(end, vectors - owner * share)
                self.copy(x + Int64(owner * share) * VECTOR_BYTES, peers[owner] + offset, begin, stop)

    @cute.jit
    def publish(
        self, peers: list[Any], flags: Int64, stage: cutlass.Constexpr, now: Int32, epoch: Uint32, rank: Int32
    ) -> None:
        """This block's writes of a round, to everyone's same block."""
        cute.arch.sync_threads()
        for peer in range_constexpr(self.ranks):
            if (cute.arch.thread_idx()[0] == peer) & (rank != peer):
                ptx.store_release(peers[peer] + self.flag(flags, stage, now, rank), epoch, "sys")

    @cute.jit
    def wait(
        self, own: Int64, flags: Int64, stage: cutlass.Constexpr, now: Int32, epoch: Uint32, passed: cute.Tensor,
        limit_ns: Int64, report: Int64, rank: Int32,
    ) -> None:  # fmt: skip
        """For the round's writes of everyone's same block. After a wait that expired, for none."""
        for peer in range_constexpr(self.ranks):
            if (cute.arch.thread_idx()[0] == peer) & (rank != peer):
                if passed[0] != 0:
                    # Whoever waits for a sum waits longer, so that the report names the rank that the sum lacks.
                    there = sync.wait(
                        own + self.flag(flags, stage, now, peer), epoch, "sys", limit_ns + stage * (limit_ns // 4),
                        report, rank, Int32(peer), (ADD_STAGE, TAKE_STAGE)[stage],
                    )  # fmt: skip
                    if not there:
                        passed[0] = Int32(0)
        cute.arch.sync_threads()

    @cute.jit
    def add(
        self, x: Int64, out: Int64, inbox: Int64, slice_bytes: Int64, peers: list[Any], offset: Int64, share: Int32,
        vectors: Int32, begin: Int32, end: Int32, rank: Int32,
    ) -> None:  # fmt: skip
        """The sums of this rank's slice, to `out` and to everyone."""
        first = Int64(rank) * share
        stop = vector.min_of(end, vectors - rank * share)
        for some in range(begin, stop, self.threads * SUMS):
            loaded = []
            for i in range_constexpr(SUMS):
                at = self.place(some, i, stop)
                here = x + (first + at) * VECTOR_BYTES
                for source in range_constexpr(self.ranks):
                    there = inbox + source * slice_bytes + Int64(at) * VECTOR_BYTES
                    loaded.append(ptx.load_16b(Int64(vector.select(rank == source, here, there))))
            for i in range_constexpr(SUMS):
                words, at = self.sum(loaded[i * self.ranks : (i + 1) * self.ranks]), some + i * self.threads
                if at < stop:
                    ptx.store_16b(out + (first + at) * VECTOR_BYTES, words)
                    for peer in range_constexpr(self.ranks):
                        if rank != peer:
                            ptx.store_16b(peers[peer] + offset + Int64(at) * VECTOR_BYTES, words)

    def sum(self, loaded: Any) -> Any:
        """Four words that hold the rounded sums, in rank order, of the words' elements."""
        words = []
        for i in range(4):
            parts = [packets.widen(Uint32(vector_[i]), self.dtype) for vector_ in loaded]
            total = parts[0]
            for part in parts[1:]:
                total = [a + b for a, b in zip(total, part, strict=True)]
            words.append(packets.narrow(total, self.dtype))
        return tuple(words)

    @cute.jit
    def take(
        self, out: Int64, outbox: Int64, slice_bytes: Int64, share: Int32, vectors: Int32, begin: Int32, end: Int32,
        rank: Int32,
    ) -> None:  # fmt: skip
        """The others' sums to `out`."""
        for owner in range_constexpr(self.ranks):
            if rank != owner:
                stop = vector.min_of(end, vectors - owner * share)
                self.copy(outbox + owner * slice_bytes, out + Int64(owner * share) * VECTOR_BYTES, begin, stop)

    @cute.jit
    def copy(self, source: Int64, target: Int64, begin: Int32, stop: Int32) -> None:
        """This thread's vectors from `begin` up to `stop`, counted from both addresses."""
        for first in range(begin, stop, self.threads * UNROLL):
            loaded = [ptx.load_16b(source + Int64(self.place(first, i, stop)) * VECTOR_BYTES) for i in range(UNROLL)]
            for i in range_constexpr(UNROLL):
                if first + i * self.threads < stop:
                    ptx.store_16b(target + Int64(first + i * self.threads) * VECTOR_BYTES, loaded[i])

    def place(self, first: Any, i: int, stop: Any) -> Any:
        """A thread's vector number `i` from `first` on; the first one in place of any beyond the end."""
        at = first + i * self.threads
        return vector.select(at < stop, at, first)
