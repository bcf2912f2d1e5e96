"""Combine between the GPUs of one NVLink domain: results to their tokens' ranks, which sum them in top-k order.

See `rose_dist.kernels.exchange_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import copy_of, first_places, owner
from rose_dist.kernels.cute.exchange_return import ResultSender
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
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.peer_regions import PACKET_BYTES, PACKET_WORDS, RESULT_STAGE

AT_ONCE = 8
"""Packets of one output place that a thread has in flight."""


@dataclass(frozen=True)
class ExchangeCombine(jit.Kernel):
    """Sends this rank's results, if `send`, and, if `receive`, sums what comes back as packets for this rank's tokens.
    The grid must be co-resident.

    dtype: of results, bf16 or fp32. most: of `PacketTiling`.
    """

    layout: ExchangeLayout
    dtype: torch.dtype
    out_dtype: torch.dtype
    accumulate: bool
    most: int
    send: bool
    receive: bool

    @property
    def tiling(self) -> PacketTiling:
        """Of a result."""
        return PacketTiling(self.layout.result_packets, self.most)

    @property
    def each(self) -> int:
        """Elements of a word."""
        return 4 // self.dtype.itemsize

    @property
    def words(self) -> int:
        """Of a result."""
        return self.layout.result_bytes // 4

    @cute.jit
    def __call__(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        ids: Int64, weights: Int64, live_rows: Int64, out: Int64, peers: Int64, own: Int64, send_state: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses. To send: expert_out, whose rows are row_stride bytes apart, and sources, tokens_of, slots and runs
        as `ExchangeDispatch` wrote them. To receive: ids int32 and weights fp32 [tokens, top_k], live_rows int32 [1] or
        0, out [tokens, hidden]. peers, own: as for `ExchangeDispatch`. States: of `packets`, of combines sent and
        received.
        """
        self.kernel(
            expert_out, row_stride, sources, tokens_of, slots, runs, ids, weights, live_rows, out, peers, own,
            send_state, receive_state, report, limit_ns, rank, tokens,
        ).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, expert_out: Int64, row_stride: Int64, sources: Int64, tokens_of: Int64, slots: Int64, runs: Int64,
        ids: Int64, weights: Int64, live_rows: Int64, out: Int64, peers: Int64, own: Int64, send_state: Int64,
        receive_state: Int64, report: Int64, limit_ns: Int64, rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        first, blocks = cute.arch.block_idx()[0] == 0, cute.arch.grid_dim()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.send):
            epoch = packets.current_epoch(send_state)
            ResultSender(self.layout, self.dtype, self.tiling).push(
                expert_out, row_stride, sources, tokens_of, slots, runs, peers, epoch, rank, cute.arch.block_idx()[0],
                blocks,
            )  # fmt: skip
            packets.finish_epoch(send_state, first, blocks, Boolean(True))
        if const_expr(self.receive):
            live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(receive_state)
            inbox = own + self.inbox(epoch)
            alive, splits = Boolean(True), self.tiling.splits
            for item in range(cute.arch.block_idx()[0], live * splits, blocks):
                alive = self.sum(
                    item // splits, item % splits, inbox, ids, weights, out, epoch, alive, limit_ns, report, rank
                )
            packets.finish_epoch(receive_state, first, blocks, Boolean(True))

    def inbox(self, epoch: Any) -> Any:
        """Where an exchange's result packets start in a region."""
        layout = self.layout
        return layout.start("result_packets") + copy_of(epoch, layout.result_copies) * layout.result_packet_bytes

    @cute.jit
    def sum(
        self, token: Int32, split: Int32, inbox: Int64, ids: Int64, weights: Int64, out: Int64, epoch: Uint32,
        alive: Boolean, limit_ns: Int64, report: Int64, rank: Int32,
    ) -> Boolean:  # fmt: skip
        """A part of a token's weighted sum."""
        tiling, thread = self.tiling, cute.arch.thread_idx()[0]
        pairs = Int64(token) * self.layout.top_k
        for turn in range_constexpr(tiling.turns):
            inside = Boolean(tiling.inside(split, thread, turn))
            packet = vector.select(inside, tiling.packet(split, thread, turn), Int32(0))
            total, seen = [Float32(0.0)] * (PACKET_WORDS * self.each), Uint32(0)
            near = total
            if const_expr(self.layout.node_ranks > 0):
                near, alive = self.sum_near(
                    token, packet, inside, inbox, ids, weights, epoch, alive, limit_ns, report, rank
                )
            for first in range_constexpr(0, self.layout.top_k, AT_ONCE):
                places = list(range(first, vector.const_min(first + AT_ONCE, self.layout.top_k)))
                experts = [vector.scalar(ids + (pairs + j) * 4, Int32)[0] for j in places]
                wanted = [Boolean((e >= 0) & (e < self.layout.experts)) for e in experts]
                if const_expr(self.layout.weighted):
                    wanted, seen = first_places(self.layout, wanted, experts, seen)
                wanted = [Boolean(w & inside) for w in wanted]
                addresses = [inbox + ((pairs + j) * self.layout.result_packets + packet) * PACKET_BYTES for j in places]
                senders = self.senders(wanted, experts)
                mine = [Boolean(False)] * len(places)
                if const_expr(self.layout.node_ranks > 0):
                    mine = [w & self.is_near(sender, rank) for w, sender in zip(wanted, senders, strict=True)]
                    wanted = [Boolean(w & ~m) for w, m in zip(wanted, mine, strict=True)]
                received = cute.make_rmem_tensor(4 * len(places), Uint32)
                alive = packets.receive(
                    addresses, wanted, senders, epoch, received, alive, limit_ns, report, rank, RESULT_STAGE
                )
                total = self.add(total, received, wanted, [weights + (pairs + j) * 4 for j in places], mine, near)
            self.write(token, packet, inside, total, out)
        return alive

    def add(self, total: Any, received: Any, wanted: Any, weights: Any, mine: Any, near: Any) -> Any:
        """The sums with the received results, in order; others' sums have their weights already. mine: at which place
        this node's sum, `near`, is added.
        """
        if not self.layout.weighted:
            loaded = [vector.scalar(address, Float32)[0] for address in weights]
            return add_received(total, received, wanted, loaded, self.dtype)
        for number, here in enumerate(mine):
            one = received_values(received, number, self.dtype)
            if self.layout.node_ranks:
                one = [vector.select(here, own, other) for own, other in zip(near, one, strict=True)]
            total = add_where(total, Boolean(wanted[number] | here), one)
        return total

    def senders(self, wanted: Any, experts: Any) -> list[Any]:
        return [owner(self.layout, vector.select(w, e, Int32(0))) for w, e in zip(wanted, experts, strict=True)]

    def is_near(self, sender: Any, rank: Any) -> Any:
        """Whether a rank is of this one's node."""
        return sender // self.layout.node_ranks == rank // self.layout.node_ranks

    def sum_near(
        self, token: Any, packet: Any, inside: Any, inbox: Any, ids: Any, weights: Any, epoch: Any, alive: Any,
        limit_ns: Any, report: Any, rank: Any,
    ) -> tuple[list[Any], Any]:  # fmt: skip
        """This node's sum, rounded as those that travel."""
        layout: Any = self.layout
        pairs, total = Int64(token) * layout.top_k, [Float32(0.0)] * (PACKET_WORDS * self.each)
        for first in range(0, layout.top_k, AT_ONCE):
            places = list(range(first, min(first + AT_ONCE, layout.top_k)))
            experts = [vector.scalar(ids + (pairs + j) * 4, Int32)[0] for j in places]
            valid = [Boolean((e >= 0) & (e < layout.experts)) for e in experts]
            senders = self.senders(valid, experts)
            wanted = [Boolean(v & inside & self.is_near(s, rank)) for v, s in zip(valid, senders, strict=True)]
            addresses = [inbox + ((pairs + j) * layout.result_packets + packet) * PACKET_BYTES for j in places]
            received = cute.make_rmem_tensor(4 * len(places), Uint32)
            alive = packets.receive(
                addresses, wanted, senders, epoch, received, alive, limit_ns, report, rank, RESULT_STAGE
            )
            loaded = [vector.scalar(weights + (pairs + j) * 4, Float32)[0] for j in places]
            total = add_received(total, received, wanted, loaded, self.dtype)
        words = [packets.narrow(total[i : i + self.each], self.dtype) for i in range(0, len(total), self.each)]
        return [value for word in words for value in packets.widen(Uint32(word), self.dtype)], alive

    @cute.jit
    def write(self, token: Int32, packet: Int32, inside: Boolean, total: list[Any], out: Int64) -> None:
        """A packet's sums, rounded, to `out`."""
        kind, size = TYPES[self.out_dtype], self.each * self.out_dtype.itemsize
        for i in range_constexpr(PACKET_WORDS):
            at = packet * PACKET_WORDS + i
            if inside & (at < self.words):
                target = out + (Int64(token) * self.words + at) * size
                values = total[i * self.each : (i + 1) * self.each]
                if const_expr(self.accumulate):
                    before = vector.load(target, kind, self.each, size).to(Float32)
                    values = [before[n] + value for n, value in enumerate(values)]
                vector.store_words(target, [value.to(kind) for value in values], kind, size)


def received_values(received: Any, number: int, dtype: torch.dtype) -> list[Any]:
    """Of packet `number` of those received, as fp32."""
    words = [received[4 * number + i] for i in range(PACKET_WORDS)]
    return [value for word in words for value in packets.widen(word, dtype)]


def add_where(total: list[Any], valid: Any, values: list[Any]) -> list[Any]:
    summed = [a + b for a, b in zip(total, values, strict=True)]
    return [Float32(vector.select(valid, new, old)) for new, old in zip(summed, total, strict=True)]


def add_received(total: list[Any], received: Any, wanted: list[Any], weights: list[Any], dtype: torch.dtype) -> Any:
    """The sums with the weighted elements of the received packets that are `wanted`, in order."""
    for number, (valid, weight) in enumerate(zip(wanted, weights, strict=True)):
        values = [ptx.product(weight, value) for value in received_values(received, number, dtype)]
        total = add_where(total, valid, values)
    return total
