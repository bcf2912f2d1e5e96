"""All-reduce of small rows over NVLink in one launch: everyone sends everything to all others, in packets.

out[row] = Σ_r x_r[row], added up in rank order in fp32 and rounded once, so the bits are the same on every rank. The
rows may come from a MoE combine instead, as fp32 sums over this rank's experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import jit, peer_regions, ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.moe_combine import Combine
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
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.peer_regions import ONE_SHOT_STAGE, PACKET_BYTES, PACKET_WORDS
from rose_dist.kernels.row_tiling import MAX_THREADS
from rose_dist.kernels.variants import WARP

AT_ONCE = 2
"""Packets of other ranks that a thread waits for together, if it has several turns."""


@dataclass(frozen=True)
class OneShot(jit.Kernel):
    """A block takes a part of a row at a time; the grid must be co-resident.

    dtype: of x and out: bf16 or fp32. combine: where rows come from, if not from x; what travels is then fp32.
    accumulate: add what stands in out to the sum before it is rounded. parts: that a row is cut into, so that few rows
    occupy many blocks.
    """

    ranks: int
    hidden: int
    dtype: torch.dtype
    combine: Combine | None = None
    accumulate: bool = False
    parts: int = 1

    @property
    def wire(self) -> torch.dtype:
        """Of what travels."""
        return torch.float32 if self.combine else self.dtype

    @property
    def each(self) -> int:
        """Elements of a word."""
        return 4 // self.wire.itemsize

    @property
    def width(self) -> int:
        """Elements of a part."""
        return self.hidden // self.parts

    @property
    def words(self) -> int:
        """Of a part on its way."""
        return self.width // self.each

    @property
    def part_packets(self) -> int:
        """Of a part."""
        return peer_regions.packets(self.words)

    @property
    def part_stride(self) -> int:
        """Packets from part to part in an inbox, whole lines."""
        return peer_regions.lines(self.part_packets * PACKET_BYTES) // PACKET_BYTES

    @property
    def threads(self) -> int:
        """Of a block: as many turns for all, or as few as fetch the experts' rows at once."""
        most = MAX_THREADS if self.ranks <= 4 else MAX_THREADS // 2  # a packet of every rank is in registers
        needed = -(-self.part_packets // -(-self.part_packets // most))
        if self.combine is not None:
            needed = max(needed, self.combine.vectors // self.parts)
        return min(most, -(-needed // WARP) * WARP)

    @property
    def turns(self) -> int:
        """Packets a thread takes of a part."""
        return -(-self.part_packets // self.threads)

    @property
    def together(self) -> int:
        """Turns whose packets a thread waits for together."""
        return max(1, min(self.turns, AT_ONCE // (self.ranks - 1)))

    @cute.jit
    def __call__(
        self, x: Int64, live_rows: Int64, out: Int64,
        row_stride: Int64, slots: Int64, weights: Int64, ids: Int64, bias: Int64, first_expert: Int32,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32, blocks: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x [rows, hidden], live_rows int32 [1] or 0, out [rows, hidden], which may be x; with `combine` x
        and row_stride are the experts' rows, and slots, weights, ids, bias and first_expert as for `Combine`. peer0 …
        are the ranks' inboxes, this rank's among them; state, source_bytes: see `packets`.
        """
        self.kernel(
            x, live_rows, out, row_stride, slots, weights, ids, bias, first_expert,
            peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7, source_bytes, state, report, limit_ns, rank, rows,
        ).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, live_rows: Int64, out: Int64,
        row_stride: Int64, slots: Int64, weights: Int64, ids: Int64, bias: Int64, first_expert: Int32,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32,
    ) -> None:  # fmt: skip
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        peers = [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7][: self.ranks]
        others, inbox = packets.apart(peers, rank)
        staged = cute.make_tensor(
            cute.arch.alloc_smem(Float32, self.width if self.combine else 1, alignment=16),
            cute.make_layout(self.width),
        )
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live = vector.live_rows(live_rows, rows) * self.parts
        epoch = packets.current_epoch(state)
        half = Int64(epoch & Uint32(1)) * self.ranks * source_bytes
        offset, inbox, alive = half + rank * source_bytes, inbox + half, Boolean(True)
        if const_expr(self.combine is not None):
            for part in range(block, live, blocks):
                self.stage(part, x, row_stride, slots, weights, ids, bias, first_expert, staged)
                self.push(part, x, staged, others, offset, epoch)
                alive = self.finish(
                    part, x, staged, inbox, source_bytes, epoch, alive, limit_ns, report, rank, out
                )  # fmt: skip
                cute.arch.sync_threads()  # the next part takes its place
        else:
            for part in range(block, live, blocks):
                self.push(part, x, staged, others, offset, epoch)
            for part in range(block, live, blocks):
                alive = self.finish(
                    part, x, staged, inbox, source_bytes, epoch, alive, limit_ns, report, rank, out
                )  # fmt: skip
        packets.finish_epoch(state, block == 0, blocks, live > 0)

    @cute.jit
    def stage(
        self, part: Int32, x: Int64, row_stride: Int64, slots: Int64, weights: Int64, ids: Int64, bias: Int64,
        first_expert: Int32, staged: cute.Tensor,
    ) -> None:  # fmt: skip
        """What this rank's experts give for a part of a token's row, to shared memory."""
        combine: Any = self.combine
        places = Int64(part // self.parts) * (combine.top_k * 4)
        first = (part % self.parts) * self.width
        for at in range(cute.arch.thread_idx()[0], combine.vectors // self.parts, self.threads):
            column = at * combine.count
            summed = combine.sum(
                x, row_stride, slots + places, weights + places, ids + places, bias, first_expert, first + column
            )
            for i in range_constexpr(combine.count):
                staged[column + i] = summed[i]
        cute.arch.sync_threads()

    @cute.jit
    def push(self, part: Int32, x: Int64, staged: cute.Tensor, others: list[Any], offset: Int64, epoch: Uint32) -> None:
        """A part into the others' inboxes."""
        for turn in range_constexpr(self.turns):
            packet = cute.arch.thread_idx()[0] + turn * self.threads
            if packet < self.part_packets:
                words = [self.word(part, x, staged, self.place(packet, i)) for i in range(PACKET_WORDS)]
                at = offset + (Int64(part) * self.part_stride + packet) * PACKET_BYTES
                packets.send(others, at, words, epoch)

    def place(self, packet: Any, i: Any) -> Any:
        """A packet's word number `i`, counted in the part; the part's last word in place of any beyond it."""
        at = packet * PACKET_WORDS + i
        return at if self.words % PACKET_WORDS == 0 else vector.min_of(at, Int32(self.words - 1))

    def word(self, part: Any, x: Any, staged: Any, at: Any) -> Any:
        if self.combine is not None:
            return ptx.bits(staged[at])
        return vector.scalar(x + (Int64(part) * self.words + at) * 4, Uint32)[0]

    @cute.jit
    def finish(
        self, part: Int32, x: Int64, staged: cute.Tensor, inbox: Int64, source_bytes: Int64, epoch: Uint32,
        alive: Boolean, limit_ns: Int64, report: Int64, rank: Int32, out: Int64,
    ) -> Boolean:  # fmt: skip
        """Wait for the others' packets of a part, add them up and write the result."""
        for first in range_constexpr(0, self.turns, self.together):
            alive = self.finish_turns(
                first, part, x, staged, inbox, source_bytes, epoch, alive, limit_ns, report, rank, out
            )  # fmt: skip
        return alive

    @cute.jit
    def finish_turns(
        self, first: cutlass.Constexpr, part: Int32, x: Int64, staged: cute.Tensor, inbox: Int64, source_bytes: Int64,
        epoch: Uint32, alive: Boolean, limit_ns: Int64, report: Int64, rank: Int32, out: Int64,
    ) -> Boolean:  # fmt: skip
        """Some turns from `first` on. Their own words, and what the sums are added to, are loaded meanwhile."""
        turns = min(self.together, self.turns - first)
        numbers = [cute.arch.thread_idx()[0] + (first + turn) * self.threads for turn in range(turns)]
        chosen = [vector.min_of(number, Int32(self.part_packets - 1)) for number in numbers]
        own = cute.make_rmem_tensor(turns * PACKET_WORDS, Uint32)
        before = cute.make_rmem_tensor(turns * PACKET_WORDS * self.each, Float32)
        for turn in range_constexpr(turns):
            # The last packet's other threads must not read what its own may have written.
            if numbers[turn] < self.part_packets:
                for i in range_constexpr(PACKET_WORDS):
                    at, word = turn * PACKET_WORDS + i, self.place(chosen[turn], i)
                    own[at] = self.word(part, x, staged, word)
                    if const_expr(self.accumulate):
                        loaded = self.load(self.address(out, part, word))
                        for j in range_constexpr(self.each):
                            before[at * self.each + j] = loaded[j]
        sources = packets.other_ranks(self.ranks, rank)
        places = [inbox + (Int64(part) * self.part_stride + packet) * PACKET_BYTES for packet in chosen]
        received = cute.make_rmem_tensor(4 * len(sources) * turns, Uint32)
        alive = packets.receive(
            [place + source * source_bytes for place in places for source in sources], [True] * (turns * len(sources)),
            sources * turns, epoch, received, alive, limit_ns, report, rank, ONE_SHOT_STAGE,
        )  # fmt: skip
        for turn in range_constexpr(turns):
            for i in range_constexpr(PACKET_WORDS):
                at, word = turn * PACKET_WORDS + i, chosen[turn] * PACKET_WORDS + i
                values = self.add(own[at], received, 4 * len(sources) * turn + i, rank)
                if const_expr(self.accumulate):
                    values = [before[at * self.each + j] + value for j, value in enumerate(values)]
                vector.store_scalars_if(
                    Boolean((numbers[turn] < self.part_packets) & (word < self.words)), self.address(out, part, word),
                    values, TYPES[self.dtype], self.each * self.dtype.itemsize,
                )  # fmt: skip
        return alive

    def add(self, own: Any, received: Any, at: Any, rank: Any) -> Any:
        """The fp32 sums of one word's elements over the ranks, in rank order; of the first other rank's it is number
        `at` in `received`.
        """
        words = packets.in_rank_order(own, received, at, rank, self.ranks)
        parts = [packets.widen(one, self.wire) for one in words]
        total = parts[0]
        for part in parts[1:]:
            total = [a + b for a, b in zip(total, part, strict=True)]
        return total

    def load(self, address: Any) -> Any:
        """A word's elements of `dtype`, as fp32."""
        return vector.load(address, TYPES[self.dtype], self.each, self.each * self.dtype.itemsize).to(Float32)

    def address(self, base: Any, part: Any, at: Any) -> Any:
        """Of a part's word, in elements of `dtype`."""
        return base + (Int64(part) * self.words + at) * (self.each * self.dtype.itemsize)
