"""MoE combine, all-reduce, residual and the next layer's norm of few tokens in one launch; what it computes:
`rose_dist.kernels.all_reduce.AllReduce.combine_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.all_reduce_one_shot import OneShot
from rose_dist.kernels.dsl import TYPES, Boolean, Float32, Int32, Int64, Stream, Uint32, cute, range_constexpr
from rose_dist.kernels.peer_regions import ONE_SHOT_STAGE, PACKET_BYTES, PACKET_WORDS

SM_THREADS = 512
"""That the compiler leaves registers for, so that a small block fits beside one of the experts'."""


@dataclass(frozen=True)
class CombineReduceNorm(jit.Kernel):
    """A cluster a token, whose blocks have a part of it each, and a thread a packet; what blocks tell one another is
    their sum of squares.

    It lets the next launch start at once, and reads all but the experts' rows before it waits: the experts' launch lets
    it begin only when those before that are complete, the exchange before this one among them. Packets and epoch: see
    `packets`.

    shot: the exchange, of a combine, with `accumulate`.
    """

    shot: OneShot

    @property
    def blocks(self) -> int:
        """A token."""
        return self.shot.parts

    @cute.jit
    def __call__(
        self, rows: Int64, row_stride: Int64, slots: Int64, weights: Int64, residual: Int64, scale: Int64, out: Int64,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32, eps: Float32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: rows, row_stride, slots and weights as for `Combine`; residual, updated in place, and out
        [tokens, hidden] and scale [hidden] of `shot.dtype`. peer0 …, source_bytes, state: as for `OneShot`.
        """
        self.kernel(
            rows, row_stride, slots, weights, residual, scale, out, peer0, peer1, peer2, peer3, peer4, peer5, peer6,
            peer7, source_bytes, state, report, limit_ns, rank, eps,
        ).launch(
            grid=[tokens * self.blocks, 1, 1], block=[self.shot.threads, 1, 1], cluster=[self.blocks, 1, 1],
            stream=stream, use_pdl=True, min_blocks_per_mp=max(1, SM_THREADS // self.shot.threads),
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, rows: Int64, row_stride: Int64, slots: Int64, weights: Int64, residual: Int64, scale: Int64, out: Int64,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, eps: Float32,
    ) -> None:  # fmt: skip
        shot, combine, dtype, width = self.shot, self.combine, TYPES[self.shot.dtype], self.shot.dtype.itemsize
        peers = [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7][: shot.ranks]
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_arrive_relaxed()  # from here on others may write this block's squares
        others, inbox = packets.apart(peers, rank)
        thread, part = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        token, first = part // self.blocks, part % self.blocks * shot.width
        memory = cute.arch.alloc_smem(Float32, shot.width, alignment=16)
        staged = cute.make_tensor(memory, cute.make_layout(shot.width))
        squares = cute.arch.alloc_smem(Float32, self.blocks, alignment=16)
        packet = vector.min_of(thread, Int32(shot.part_packets - 1))
        here = range(PACKET_WORDS)
        elements = [shot.place(packet, i) for i in here]
        valid = [Boolean((thread < shot.part_packets) & (packet * PACKET_WORDS + i < shot.words)) for i in here]
        scales = [shot.load(scale + Int64(first + at) * width)[0] for at in elements]
        # Threads beyond the part must not read what another one may have written already.
        places = [
            vector.select(ok, shot.address(residual, part, at), scale) for ok, at in zip(valid, elements, strict=True)
        ]
        before = [shot.load(place)[0] for place in places]
        chosen = Int64(token) * (combine.top_k * 4)
        pairs = [combine.pair(slots + chosen, weights + chosen, j) for j in range(combine.top_k)]
        epoch = packets.current_epoch(state)
        half = Int64(epoch & Uint32(1)) * shot.ranks * source_bytes
        cute.arch.griddepcontrol_wait()
        self.stage(rows, row_stride, pairs, first, staged)
        shot.push(part, rows, staged, others, half + rank * source_bytes, epoch)
        own = [shot.word(part, rows, staged, at) for at in elements]
        sources = packets.other_ranks(shot.ranks, rank)
        received = cute.make_rmem_tensor(4 * len(sources), Uint32)
        at = inbox + half + (Int64(part) * shot.part_stride + packet) * PACKET_BYTES
        packets.receive(
            [at + source * source_bytes for source in sources], [True for _ in sources], sources, epoch, received,
            Boolean(True), limit_ns, report, rank, ONE_SHOT_STAGE,
        )  # fmt: skip
        new, total = [], Float32(0.0)
        for i in range_constexpr(PACKET_WORDS):
            value = Float32((before[i] + shot.add(own[i], received, i, rank)[0]).to(dtype))
            total = total + vector.select(valid[i], value * value, Float32(0.0))
            new.append(value)
        inverse = cute.math.rsqrt(self.sum_of_row(total, squares) * Float32(1.0 / shot.hidden) + eps)
        for i in range_constexpr(PACKET_WORDS):
            for base, value in ((residual, new[i]), (out, new[i] * inverse * scales[i])):
                vector.store_scalars_if(valid[i], shot.address(base, part, elements[i]), [value], dtype, width)
        packets.finish_epoch(state, part == 0, cute.arch.grid_dim()[0], Boolean(True))

    @property
    def combine(self) -> Any:
        return self.shot.combine

    @cute.jit
    def stage(self, rows: Int64, row_stride: Int64, pairs: list[Any], first: Int32, staged: cute.Tensor) -> None:
        """What this rank's experts give for this block's part of the row, to shared memory."""
        combine: Any = self.combine
        for at in range(cute.arch.thread_idx()[0], combine.vectors // self.blocks, self.shot.threads):
            column = at * combine.count
            summed = combine.sum_pairs(rows, row_stride, pairs, first + column)
            for i in range_constexpr(combine.count):
                staged[column + i] = summed[i]
        cute.arch.sync_threads()

    @cute.jit
    def sum_of_row(self, own: Float32, squares: cute.Pointer) -> Float32:
        """The threads' sums, added up over all blocks of the cluster, in their order."""
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0] % self.blocks
        total = vector.row_sum(own, self.shot.threads, 1)
        cute.arch.cluster_wait()
        if thread < self.blocks:
            ptx.cluster_store_shared(squares.toint() + block * 4, Uint32(thread), ptx.bits(total))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        told, result = cute.make_tensor(squares, cute.make_layout(self.blocks)), Float32(0.0)
        for other in range_constexpr(self.blocks):
            result = result + told[other]
        return result
