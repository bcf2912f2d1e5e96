"""All-reduce of small rows over NVLink in one launch: everyone sends everything to everyone, in packets.

out[row] = Σ_r x_r[row], added up in rank order in fp32 and rounded once, so the bits are the same on every rank. The
rows may come from a MoE combine instead, as fp32 sums over this rank's experts, and what is written may be the next
residual and its RMS norm.
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
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.peer_regions import ONE_SHOT_STAGE, PACKET_BYTES, PACKET_WORDS
from rose_dist.kernels.row_tiling import MAX_THREADS
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class OneShot(jit.Kernel):
    """A block takes a part of a row at a time; the grid must be co-resident.

    dtype: of x, out, residual and weight: bf16 or fp32. combine: where rows come from, if not from x; what travels is
    then fp32. norm: add the residual, and write its sum and the sum's RMS norm. accumulate: add what stands in out to
    the sum before it is rounded; not with `norm`. parts: that a row is cut into, so that few rows occupy many blocks; 1
    with `norm`.
    """

    ranks: int
    hidden: int
    dtype: torch.dtype
    combine: Combine | None = None
    norm: bool = False
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
    def threads(self) -> int:
        """Of a block."""
        most = MAX_THREADS if self.ranks <= 4 else MAX_THREADS // 2  # a packet of every rank is in registers
        return min(most, -(-self.part_packets // WARP) * WARP)

    @property
    def turns(self) -> int:
        """Packets a thread takes of a part."""
        return -(-self.part_packets // self.threads)

    @cute.jit
    def __call__(
        self, x: Int64, live_rows: Int64, out: Int64, residual: Int64, total: Int64, weight: Int64, eps: Float32,
        row_stride: Int64, slots: Int64, weights: Int64, ids: Int64, bias: Int64, first_expert: Int32,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32, blocks: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x [rows, hidden], live_rows int32 [1] or 0, out [rows, hidden]; with `norm` residual [rows,
        hidden], total (the new residual; may be the old one) and weight [hidden]; with `combine` x and row_stride are
        the experts' rows, and slots, weights, ids, bias and first_expert as for `Combine`. peer0 … are the ranks'
        inboxes, this rank's among them; state, source_bytes: see `packets`.
        """
        self.kernel(
            x, live_rows, out, residual, total, weight, eps, row_stride, slots, weights, ids, bias, first_expert,
            peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7, source_bytes, state, report, limit_ns, rank, rows,
        ).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, live_rows: Int64, out: Int64, residual: Int64, total: Int64, weight: Int64, eps: Float32,
        row_stride: Int64, slots: Int64, weights: Int64, ids: Int64, bias: Int64, first_expert: Int32,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32,
    ) -> None:  # fmt: skip
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        peers = [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7][: self.ranks]
        staged = cute.make_tensor(
            cute.arch.alloc_smem(Float32, self.width if self.combine else 1, alignment=16),
            cute.make_layout(self.width),
        )
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live = vector.live_rows(live_rows, rows) * self.parts
        epoch = packets.current_epoch(state)
        half = Int64(epoch & Uint32(1)) * self.ranks * source_bytes
        for part in range(block, live, blocks):
            if const_expr(self.combine is not None):
                self.stage(part, x, row_stride, slots, weights, ids, bias, first_expert, staged)
            self.push(part, x, staged, peers, half + rank * source_bytes, epoch)
            if const_expr(self.combine is not None):
                cute.arch.sync_threads()
        inbox = peers[0]
        for other in range_constexpr(1, self.ranks):
            inbox = Int64(vector.select(rank == other, peers[other], inbox))
        alive = Boolean(True)
        for part in range(block, live, blocks):
            alive = self.finish(
                part, inbox + half, source_bytes, epoch, alive, limit_ns, report, rank, x, out, residual, total, weight,
                eps,
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
    def push(self, part: Int32, x: Int64, staged: cute.Tensor, peers: list[Any], offset: Int64, epoch: Uint32) -> None:
        """A part into every inbox."""
        for turn in range_constexpr(self.turns):
            packet = cute.arch.thread_idx()[0] + turn * self.threads
            if packet < self.part_packets:
                words = [self.word(part, x, staged, self.place(packet, i)) for i in range(PACKET_WORDS)]
                at = offset + (Int64(part) * self.part_packets + packet) * PACKET_BYTES
                packets.send(peers, at, words, epoch)

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
        self, part: Int32, inbox: Int64, source_bytes: Int64, epoch: Uint32, alive: Boolean, limit_ns: Int64,
        report: Int64, rank: Int32, x: Int64, out: Int64, residual: Int64, total: Int64, weight: Int64, eps: Float32,
    ) -> Boolean:  # fmt: skip
        """Wait for a part's packets, add them up and write the result. What they are added to is loaded meanwhile."""
        sums, before, scales = [], [], []
        if const_expr(self.norm):
            before, scales = self.read(part, residual, x), self.read(Int32(0), weight, weight)
        if const_expr(self.accumulate):
            before = self.read(part, out, x)
        for turn in range_constexpr(self.turns):
            packet = vector.min_of(cute.arch.thread_idx()[0] + turn * self.threads, Int32(self.part_packets - 1))
            received = cute.make_rmem_tensor(4 * self.ranks, Uint32)
            at = inbox + (Int64(part) * self.part_packets + packet) * PACKET_BYTES
            everyone = range(self.ranks)
            alive = packets.receive(
                [at + source * source_bytes for source in everyone], [True for _ in everyone],
                [Int32(source) for source in everyone], epoch, received, alive, limit_ns, report, rank, ONE_SHOT_STAGE,
            )  # fmt: skip
            for i in range_constexpr(PACKET_WORDS):
                sums.append(self.add(received, i))
        if const_expr(self.norm):
            self.write_norm(part, sums, before, scales, out, total, eps)
        else:
            self.write(part, sums, before, out)
        return alive

    def add(self, received: Any, word: Any) -> Any:
        """The fp32 sums of one word's elements over the ranks, in rank order."""
        total = packets.widen(received[word], self.wire)
        for source in range(1, self.ranks):
            other = packets.widen(received[4 * source + word], self.wire)
            total = [a + b for a, b in zip(total, other, strict=True)]
        return total

    def mine(self, turn: Any, i: Any) -> Any:
        """This thread's word `i` of `turn`: its number in the part, and whether there is such a word."""
        packet = cute.arch.thread_idx()[0] + turn * self.threads
        at = packet * PACKET_WORDS + i
        return at, Boolean((packet < self.part_packets) & (at < self.words))

    def every_word(self) -> Any:
        return [(turn, i) for turn in range(self.turns) for i in range(PACKET_WORDS)]

    @cute.jit
    def write(self, part: Int32, sums: list[Any], before: list[Any], out: Int64) -> None:
        """The rounded sums."""
        for number, (turn, i) in enumerate(self.every_word()):
            at, valid = self.mine(turn, i)
            values = sums[number]
            if const_expr(self.accumulate):
                values = [a + b for a, b in zip(before[number], values, strict=True)]
            self.put(valid, out, part, at, values)

    def put(self, valid: Any, target: Any, part: Any, at: Any, values: Any) -> Any:
        """The elements of one word, rounded to `dtype`."""
        address = self.address(target, part, at)
        vector.store_scalars_if(valid, address, values, TYPES[self.dtype], self.each * self.dtype.itemsize)

    @cute.jit
    def write_norm(
        self, part: Int32, sums: list[Any], before: list[Any], scales: list[Any], out: Int64, total: Int64, eps: Float32
    ) -> None:
        """The rounded sums plus the residual, rounded, to `total`; their RMS norm times the weight to `out`."""
        kind, words = TYPES[self.dtype], self.every_word()
        squares, added = Float32(0.0), []
        for number, (turn, i) in enumerate(words):
            _, valid = self.mine(turn, i)
            new = [
                Float32((Float32(Float32(a).to(kind)) + b).to(kind))
                for a, b in zip(sums[number], before[number], strict=True)
            ]
            added.append(new)
            for value in new:
                squares = squares + vector.select(valid, value * value, Float32(0.0))
        mean = vector.row_sum(Float32(squares), self.threads, 1) * Float32(1.0 / self.hidden)
        factor = cute.math.rsqrt(mean + eps)
        for number, (turn, i) in enumerate(words):
            at, valid = self.mine(turn, i)
            self.put(valid, total, part, at, added[number])
            normed = [value * factor * scale for value, scale in zip(added[number], scales[number], strict=True)]
            self.put(valid, out, part, at, normed)
        cute.arch.sync_threads()  # the next row's sum uses the same shared memory

    def read(self, part: Any, source: Any, otherwise: Any) -> Any:
        """This thread's words of a part of `source`, elements of `dtype`, as fp32; of words that there are not, what
        stands at `otherwise`, because another thread may be writing any of `source` by now.
        """
        words = []
        for turn, i in self.every_word():
            at, valid = self.mine(turn, i)
            address = Int64(vector.select(valid, self.address(source, part, at), otherwise))
            loaded = vector.load(address, TYPES[self.dtype], self.each, self.each * self.dtype.itemsize).to(Float32)
            words.append([loaded[j] for j in range(self.each)])
        return words

    def address(self, base: Any, part: Any, at: Any) -> Any:
        """Of a part's word, in elements of `dtype`."""
        return base + (Int64(part) * self.words + at) * (self.each * self.dtype.itemsize)
