"""Columns of several ranks side by side on the first one; what it computes:
`rose_dist.kernels.all_reduce.AllReduce.gather_columns`. Packets and epoch: see `packets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.resident_weights import halves
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Stream, Uint32, cute, range_constexpr
from rose_dist.kernels.peer_regions import ONE_SHOT_STAGE, PACKET_BYTES, PACKET_VALUES

THREADS = 256


@dataclass(frozen=True)
class GatherColumns(jit.Kernel):
    """A thread takes every so manieth packet of each rank's part, whose rows follow one another: the others send
    theirs, the first puts all where they belong. It has a packet for every other rank too, as they have for one
    another, or they might be two exchanges ahead of it, or of each other.
    """

    ranks: int

    @cute.jit
    def __call__(
        self, part: Int64, out: Int64, rows: Int32, columns: Int32, first: Int32, most: Int32,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: part fp32 [rows, this rank's share of `columns`], out fp32 [rows, columns] on the first rank.
        first, most: of each rank's packets those of this exchange. peer0 …, source_bytes, state: as for `OneShot`.
        """
        self.kernel(
            part,
            out,
            rows,
            columns,
            first,
            most,
            peer0,
            peer1,
            peer2,
            peer3,
            peer4,
            peer5,
            peer6,
            peer7,
            source_bytes,
            state,
            report,
            limit_ns,
            rank,
        ).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self, part: Int64, out: Int64, rows: Int32, columns: Int32, first: Int32, most: Int32,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32,
    ) -> None:  # fmt: skip
        peers = [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7][: self.ranks]
        others, inbox = packets.apart(peers, rank)
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        epoch = packets.current_epoch(state)
        half, alive = Int64(epoch & Uint32(1)) * self.ranks * source_bytes, Boolean(True)
        inbox += half
        if (block == 0) & (cute.arch.thread_idx()[0] == 0):
            # Number 0 says no more than that its sender is here.
            packets.send(others, half + rank * source_bytes, [Uint32(0)] * 3, epoch)
            received = cute.make_rmem_tensor(4 * len(others), Uint32)
            sources = packets.other_ranks(self.ranks, rank)
            alive = packets.receive(
                [inbox + source * source_bytes for source in sources], [True for _ in sources], sources, epoch,
                received, alive, limit_ns, report, rank, ONE_SHOT_STAGE,
            )  # fmt: skip
        at = block * THREADS + cute.arch.thread_idx()[0]
        own = self.width(columns, rank)
        for number in range(at, self.count(rows * own, first, most), blocks * THREADS):
            words = self.load(part, rows * own, first + number)
            if rank > 0:
                packets.send([peer0], half + rank * source_bytes + Int64(1 + number) * PACKET_BYTES, words, epoch)
            else:
                self.place(out, rows, columns, Int32(0), first + number, words)
        if rank == 0:
            for source in range_constexpr(1, self.ranks):
                here = inbox + source * source_bytes + PACKET_BYTES
                total = rows * self.width(columns, Int32(source))
                for number in range(at, self.count(total, first, most), blocks * THREADS):
                    packet = cute.make_rmem_tensor(4, Uint32)
                    alive = packets.receive(
                        [here + Int64(number) * PACKET_BYTES], [True], [Int32(source)], epoch, packet, alive, limit_ns,
                        report, rank, ONE_SHOT_STAGE,
                    )  # fmt: skip
                    self.place(out, rows, columns, Int32(source), first + number, [packet[i] for i in range(3)])
        packets.finish_epoch(state, block == 0, blocks, Boolean(True))

    def width(self, columns: Any, rank: Any) -> Any:
        """A rank's share of the columns, as `even_split` has it."""
        return columns // self.ranks + vector.select(rank < columns % self.ranks, Int32(1), Int32(0))

    def count(self, values: Any, first: Any, most: Any) -> Any:
        """Packets of a part of so many values in this exchange."""
        return vector.min_of((values + (PACKET_VALUES - 1)) // PACKET_VALUES - first, most)

    def load(self, part: Any, values: Any, packet: Any) -> list[Any]:
        """A packet's words: pairs of values as bf16; the last value in place of any beyond."""
        numbers = [vector.min_of(packet * PACKET_VALUES + i, values - 1) for i in range(PACKET_VALUES)]
        loaded = [vector.scalar(part + Int64(number) * 4, Float32)[0] for number in numbers]
        return [ptx.to_bf16x2(*loaded[i : i + 2]) for i in range(0, PACKET_VALUES, 2)]

    @cute.jit
    def place(
        self, out: Int64, rows: Int32, columns: Int32, source: Int32, packet: Int32, words: list[Uint32]
    ) -> None:  # fmt: skip
        """A packet's values where they belong in `out`."""
        width = self.width(columns, source)
        start = source * (columns // self.ranks) + vector.min_of(source, columns % self.ranks)
        for i in range_constexpr(PACKET_VALUES):
            number = packet * PACKET_VALUES + i
            row = number // width
            if row < rows:
                target = out + (Int64(row) * columns + start + (number - row * width)) * 4
                vector.scalar(target, Float32)[0] = halves(words[i // 2])[i % 2]
