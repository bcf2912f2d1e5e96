"""Dispatch and combine of many tokens, each in one launch: some blocks send while the others take what arrives.

The first blocks send and never wait, so that any grid makes progress; the others wait for flags, each of which
`rose_dist.kernels.exchange_layout` describes, in the order in which they are set: first chunks of all sources, then
second ones, and so on. So rows are packed, and results summed, while later ones are still on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import jit, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_move_records import RecordMover
from rose_dist.kernels.cute.exchange_push import RowPusher
from rose_dist.kernels.cute.exchange_receive import RecordReceiver
from rose_dist.kernels.cute.exchange_return import ResultSender
from rose_dist.kernels.cute.exchange_sum import RowSummer
from rose_dist.kernels.cute.exchange_take_moved import RecordTaker
from rose_dist.kernels.cute.row_mover import dynamic_shared
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, const_expr, cute
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_tiling import PARTS, MoverTiling, PacketTiling, record_tiling
from rose_dist.kernels.expert_slots import PackedLayout

THREADS = 512


@dataclass(frozen=True)
class DispatchRows(jit.Kernel):
    """Sends tokens as plain rows by its first `pushers` blocks and, if `receive`, takes what all ranks sent by the
    others, which must be at least one. Rows then go by bulk copies, this rank's own straight to where they are packed.

    vector_bytes: width of the stores into packed rows.
    """

    layout: ExchangeLayout
    packed: PackedLayout
    vector_bytes: int
    receive: bool

    @property
    def moves(self) -> MoverTiling | None:
        """Of all blocks."""
        return MoverTiling(self.layout.row_bytes) if self.receive else None

    @cute.jit
    def __call__(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live_rows: Int64, numbers: Int64, pair_counts: Int64,
        pair_offsets: Int64, sent: Int64, packed: Int64, packed_scales: Int64, counts: Int64, offsets: Int64,
        sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64, peers: Int64, own: Int64, send_state: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32, pushers: Int32, blocks: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: as for `ExchangeDispatch`, whose rows are given quantised here; numbers, pair_counts and
        pair_offsets: slots, counts and offsets of `AssignSlots` over all experts.
        """
        self.kernel(
            x, scales, ids, weights, live_rows, numbers, pair_counts, pair_offsets, sent, packed, packed_scales, counts,
            offsets, sources, tokens_of, slots, runs, peers, own, send_state, receive_state, report, limit_ns, rank,
            tokens, pushers,
        ).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], smem=self.moves.shared_bytes if self.moves else 0,
            stream=stream, use_pdl=True, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live_rows: Int64, numbers: Int64, pair_counts: Int64,
        pair_offsets: Int64, sent: Int64, packed: Int64, packed_scales: Int64, counts: Int64, offsets: Int64,
        sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64, peers: Int64, own: Int64, send_state: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32, pushers: Int32,
    ) -> None:  # fmt: skip
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        # Rows that go by bulk copies leave before the numbering ends; see `RecordMover`.
        if const_expr(self.moves is None) or block >= pushers:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if block < pushers:
            self.push(
                x, scales, ids, weights, live_rows, numbers, pair_counts, pair_offsets, sent, peers, send_state, rank,
                tokens, block, pushers,
            )  # fmt: skip
        elif const_expr(self.receive):
            self.take(
                x, scales, ids, weights, numbers, pair_offsets, packed, packed_scales, counts, offsets, sources,
                tokens_of, slots, runs, own, receive_state, report, limit_ns, rank, block - pushers, blocks - pushers,
            )  # fmt: skip

    @cute.jit
    def push(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live_rows: Int64, numbers: Int64, pair_counts: Int64,
        pair_offsets: Int64, sent: Int64, peers: Int64, send_state: Int64, rank: Int32, tokens: Int32, block: Int32,
        blocks: Int32,
    ) -> None:  # fmt: skip
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(send_state)
        pusher: Any = RowPusher(self.layout, THREADS)
        moves: Any = self.moves
        if const_expr(moves is not None):
            pusher = RecordMover(self.layout, moves, THREADS)
        pusher.push(
            x, scales, ids, weights, numbers, pair_counts, pair_offsets, sent, peers, live, epoch, rank, block, blocks
        )
        packets.finish_epoch(send_state, block == 0, blocks, Boolean(True))

    @cute.jit
    def take(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, numbers: Int64, pair_offsets: Int64, packed: Int64,
        packed_scales: Int64, counts: Int64, offsets: Int64, sources: Int64, tokens_of: Int64, slots: Int64,
        runs: Int64, own: Int64, receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, block: Int32,
        blocks: Int32,
    ) -> None:  # fmt: skip
        tiling, moves = record_tiling(self.layout, PARTS.variants[-1], THREADS), self.moves
        epoch = packets.current_epoch(receive_state)
        receiver = RecordReceiver(self.layout, self.packed, tiling, self.vector_bytes)
        if const_expr(moves is None):
            receiver.take(
                packed, packed_scales, counts, offsets, sources, tokens_of, slots, runs, own, epoch, report, limit_ns,
                rank, block, blocks,
            )  # fmt: skip
        else:
            headers, starts, passed, meta = receiver.open(
                counts, offsets, sources, own, epoch, report, limit_ns, rank, block == 0
            )
            receiver.take_records(
                headers, starts, passed, meta, packed, packed_scales, tokens_of, slots, own, epoch, report, limit_ns,
                rank, block, blocks,
            )  # fmt: skip
            RecordTaker(self.layout, self.packed, moves).take(  # type: ignore[arg-type]
                x, scales, ids, weights, numbers, pair_offsets, headers, starts, passed, packed, packed_scales,
                tokens_of, slots, runs, own, epoch, report, limit_ns, rank, block, blocks,
            )  # fmt: skip
        packets.finish_epoch(receive_state, block == 0, blocks, Boolean(True))


@dataclass(frozen=True)
class CombineRows(jit.Kernel):
    """Sends this rank's results by its first `pushers` blocks, if `send` (else `pushers` is 0), and sums what comes
    back as plain rows for this rank's tokens by the others, which must be at least one. With `send`, its own experts'
    results are read where they are.

    dtype: of results, bf16 or fp32. by_token: this rank's tokens went as packets; a flag a token, not a chunk.
    """

    layout: ExchangeLayout
    dtype: torch.dtype
    out_dtype: torch.dtype
    accumulate: bool
    by_token: bool
    send: bool

    @property
    def moves(self) -> MoverTiling | None:
        """Of the blocks that send, if these are single results: sums are stored by the threads that make them."""
        layout = self.layout
        bulk = self.send and layout.has_rows and not layout.partial_sums
        return MoverTiling(layout.result_bytes) if bulk else None

    @cute.jit
    def __call__(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        ids: Int64, weights: Int64, live_rows: Int64, out: Int64, peers: Int64, own: Int64, send_state: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32, pushers: Int32, blocks: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: as for `ExchangeCombine`."""
        self.kernel(
            expert_out, row_stride, sources, tokens_of, slots, runs, ids, weights, live_rows, out, peers, own,
            send_state, receive_state, report, limit_ns, rank, tokens, pushers,
        ).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], smem=self.moves.shared_bytes if self.moves else 0,
            stream=stream, use_pdl=True, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        ids: Int64, weights: Int64, live_rows: Int64, out: Int64, peers: Int64, own: Int64, send_state: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32, pushers: Int32,
    ) -> None:  # fmt: skip
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.send):
            if block < pushers:
                self.push(
                    expert_out, row_stride, sources, tokens_of, slots, runs, peers, send_state, rank, block, pushers
                )
        if block >= pushers:
            self.take(
                expert_out, row_stride, slots, ids, weights, live_rows, out, own, receive_state, report, limit_ns, rank,
                tokens, block - pushers, blocks - pushers,
            )  # fmt: skip

    @cute.jit
    def push(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        peers: Int64, send_state: Int64, rank: Int32, block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        tiling = PacketTiling(self.layout.result_packets, PARTS.variants[-1], least=THREADS)
        shared = Int32(0)
        if const_expr(self.moves is not None):
            shared = dynamic_shared()
        ResultSender(self.layout, self.dtype, tiling, skip_own=True, moves=self.moves).push(
            expert_out, row_stride, sources, tokens_of, slots, runs, peers, packets.current_epoch(send_state), rank,
            block, blocks, shared,
        )  # fmt: skip
        packets.finish_epoch(send_state, block == 0, blocks, Boolean(True))

    @cute.jit
    def take(
        self, expert_out: Int64, row_stride: Int64, slots: Int64, ids: Int64, weights: Int64, live_rows: Int64,
        out: Int64, own: Int64, receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32,
        block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(receive_state)
        RowSummer(self.layout, self.dtype, self.out_dtype, self.accumulate, self.by_token, self.send, THREADS).take(
            expert_out, row_stride, slots, ids, weights, live, out, own, epoch, report, limit_ns, rank, block, blocks
        )
        packets.finish_epoch(receive_state, block == 0, blocks, Boolean(True))
