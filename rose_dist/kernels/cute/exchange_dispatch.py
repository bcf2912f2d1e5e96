"""Dispatch between the GPUs of one NVLink domain, in one launch or in two; see `rose_dist.kernels.exchange_layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import jit, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_receive import RecordReceiver
from rose_dist.kernels.cute.exchange_send import PacketSender
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, const_expr, cute
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import PACKETS, RETURNS
from rose_dist.kernels.exchange_tiling import PacketTiling, record_tiling
from rose_dist.kernels.expert_slots import PackedLayout


@dataclass(frozen=True)
class ExchangeDispatch(jit.Kernel):
    """Sends up to `layout.packet_tokens` tokens as packets, if `send`, and receives what all ranks sent, as packets or
    plain rows, if `receive`. The grid must be co-resident.

    vector_bytes: width of the stores into packed rows. most: of `PacketTiling`.
    """

    layout: ExchangeLayout
    packed: PackedLayout
    vector_bytes: int
    most: int
    send: bool
    receive: bool

    @property
    def tiling(self) -> PacketTiling:
        """Of a record."""
        return record_tiling(self.layout, self.most)

    def form(self, tokens: Any) -> Any:
        """In which form results of so many tokens are to come back."""
        if not self.layout.has_returns:
            return Int32(PACKETS)
        return vector.select(tokens > self.layout.result_packet_tokens, Int32(RETURNS), Int32(PACKETS))

    @cute.jit
    def __call__(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live_rows: Int64, sent: Int64, packed: Int64,
        packed_scales: Int64, counts: Int64, offsets: Int64, sources: Int64, tokens_of: Int64, slots: Int64,
        runs: Int64, peers: Int64, own: Int64, send_state: Int64, receive_state: Int64, report: Int64, limit_ns: Int64,
        rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses. To send: x [tokens, row_bytes] and scales, or with `layout.quantized` x bf16 [tokens, row_bytes];
        ids int32 [tokens, top_k], weights fp32 [tokens, top_k] with `layout.partial_sums`, live_rows int32 [1] or 0,
        sent u64 [1], the pairs sent to other ranks so far.
        Written when receiving: packed and packed_scales; counts int32 [width], offsets int64 [width + 1]; for combine
        sources int32 [ranks, 3] (the first words of the headers), tokens_of int32 [ranks, max_records] by record, slots
        int32 [ranks + 1, max_records, note_words] by record and, in the last place, of this rank's own tokens by token,
        runs int32 [ranks, chunks].
        peers: int64 [ranks], every rank's region; own: this rank's. States: of `packets`, of dispatches sent and
        received.
        """
        self.kernel(
            x, scales, ids, weights, live_rows, sent, packed, packed_scales, counts, offsets, sources, tokens_of, slots,
            runs, peers, own, send_state, receive_state, report, limit_ns, rank, tokens,
        ).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live_rows: Int64, sent: Int64, packed: Int64,
        packed_scales: Int64, counts: Int64, offsets: Int64, sources: Int64, tokens_of: Int64, slots: Int64,
        runs: Int64, peers: Int64, own: Int64, send_state: Int64, receive_state: Int64, report: Int64, limit_ns: Int64,
        rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        first, blocks = cute.arch.block_idx()[0] == 0, cute.arch.grid_dim()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.send):
            live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(send_state)
            PacketSender(self.arch, self.layout, self.tiling).push(
                x, scales, ids, weights, live, self.form(tokens), peers, sent, epoch, rank
            )
            packets.finish_epoch(send_state, first, blocks, Boolean(True))
        if const_expr(self.receive):
            receiver = RecordReceiver(self.layout, self.packed, self.tiling, self.vector_bytes)
            receiver.take(
                packed, packed_scales, counts, offsets, sources, tokens_of, slots, runs, own,
                packets.current_epoch(receive_state), report, limit_ns, rank, cute.arch.block_idx()[0], blocks,
            )  # fmt: skip
            packets.finish_epoch(receive_state, first, blocks, Boolean(True))
