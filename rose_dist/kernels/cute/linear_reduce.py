"""x Wᵀ + b of every rank, summed and added to the residual, for a decode step of several GPUs, in one launch.

What it computes: `rose_dist.kernels.all_reduce.AllReduce.add_linear`. A block's results go to the other ranks' same
block as soon as they are there, a packet a lane: its pair of outputs in its two rows. Packets and epoch: see `packets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.linear_add import LinearAdd, shared_memory, writing_warp
from rose_dist.kernels.cute.mxfp4_operands import load_shared
from rose_dist.kernels.cute.resident_weights import ResidentWeights, halves, rows_of_lane
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, cute
from rose_dist.kernels.linear_shapes import LINEAR_OUTPUTS, REDUCED_PER_SM, resident
from rose_dist.kernels.peer_regions import ONE_SHOT_STAGE, PACKET_BYTES
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class LinearReduce(jit.Kernel):
    """As `LinearAdd`, which it shares its first half with; `linear` is of this rank's inputs."""

    ranks: int
    linear: LinearAdd

    @classmethod
    def of(cls, arch: Arch, ranks: int, inputs: int) -> LinearReduce:
        return cls(arch, ranks, LinearAdd(arch, ResidentWeights(inputs, resident(inputs))))

    @cute.jit
    def __call__(
        self, x: Int64, x_stride: Int64, weight: Int64, bias: Int64, residual: Int64,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32, outputs: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x, weight and bias as for `LinearAdd`, residual bf16 [rows, outputs], updated in place. peer0 …:
        the ranks' inboxes; state, source_bytes: see `packets`.
        """
        product = self.linear.weights
        self.kernel(
            x, x_stride, weight, bias, residual, peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7, source_bytes,
            state, report, limit_ns, rank, rows, outputs,
        ).launch(
            grid=[outputs // LINEAR_OUTPUTS, 1, 1], block=[product.threads, 1, 1],
            smem=self.linear.shared_bytes, stream=stream, use_pdl=True,
            min_blocks_per_mp=max(product.shape.per_sm, REDUCED_PER_SM), preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int64, weight: Int64, bias: Int64, residual: Int64,
        peer0: Int64, peer1: Int64, peer2: Int64, peer3: Int64, peer4: Int64, peer5: Int64, peer6: Int64, peer7: Int64,
        source_bytes: Int64, state: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32, outputs: Int32,
    ) -> None:  # fmt: skip
        peers = [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7][: self.ranks]
        cute.arch.griddepcontrol_launch_dependents()
        shared, writes = shared_memory(), writing_warp()
        held = self.linear.fetch(shared, weight, bias, writes)
        cute.arch.griddepcontrol_wait()
        epoch = packets.current_epoch(state)
        self.linear.multiply(held, shared, x, x_stride, residual, rows, outputs, writes)
        if writes:
            half = Int64(epoch & Uint32(1)) * self.ranks * source_bytes
            self.exchange(
                shared, residual, peers, half, source_bytes, epoch, report, limit_ns, rank, rows, outputs
            )  # fmt: skip
        packets.finish_epoch(state, cute.arch.block_idx()[0] == 0, cute.arch.grid_dim()[0], Boolean(True))

    @cute.jit
    def exchange(
        self, shared: Int32, residual: Int64, peers: list[Any], half: Int64, source_bytes: Int64, epoch: Uint32,
        report: Int64, limit_ns: Int64, rank: Int32, rows: Int32, outputs: Int32,
    ) -> None:  # fmt: skip
        """The writing warp's part: rounded products out, sums over the ranks into the residual."""
        lane, block = cute.arch.lane_idx(), cute.arch.block_idx()[0]
        sums, (first_row, _) = self.linear.weights.total(shared), rows_of_lane(lane)
        bias = halves(load_shared(self.linear.place(shared, 0), 1)[0])
        own = [ptx.to_bf16x2(sums[i] + bias[0], sums[2 + i] + bias[1]) for i in range(2)]
        others, inbox = packets.apart(peers, rank)
        at = half + Int64(block * WARP + lane) * PACKET_BYTES
        wanted = Boolean(first_row < rows)
        if wanted:
            packets.send(others, at + rank * source_bytes, [*own, own[1]], epoch)
        sources = packets.other_ranks(self.ranks, rank)
        received = cute.make_rmem_tensor(4 * len(sources), Uint32)
        packets.receive(
            [inbox + at + source * source_bytes for source in sources], [wanted for _ in sources], sources, epoch,
            received, Boolean(True), limit_ns, report, rank, ONE_SHOT_STAGE,
        )  # fmt: skip
        pair = block * (LINEAR_OUTPUTS // 2) + lane // 4
        for i, row in enumerate(rows_of_lane(lane)):
            if row < rows:
                parts = [halves(word) for word in packets.in_rank_order(own[i], received, i, rank, self.ranks)]
                total = list(parts[0])
                for part in parts[1:]:
                    total = [a + b for a, b in zip(total, part, strict=True)]
                before = halves(load_shared(self.linear.place(shared, 1 + i), 1)[0])
                result = ptx.to_bf16x2(before[0] + total[0], before[1] + total[1])
                vector.scalar(residual + (Int64(row) * outputs + pair * 2) * 2, Uint32)[0] = result
