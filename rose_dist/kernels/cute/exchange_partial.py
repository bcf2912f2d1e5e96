"""A rank's results for one token, added up before they travel; see `rose_dist.kernels.exchange_layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.peer_regions import PACKET_BYTES, PACKET_WORDS
from rose_dist.kernels.variants import WARP

PACKETS_AT_ONCE = 8
"""Packets of one output place that a thread has in flight."""
PLACES_AT_ONCE, UNROLL = 4, 2
"""Of plain rows: results of one output place, and output places, that a thread has in flight."""


@dataclass(frozen=True)
class PartialSums:
    """Part of a kernel. Sums go to the first of the token's places that are here, in the order of the places, with
    rounded products and sums, and are rounded to `dtype`, that of results. A row that its expert had no room for counts
    as zeros.
    """

    layout: ExchangeLayout
    dtype: torch.dtype
    tiling: PacketTiling

    @property
    def each(self) -> int:
        """Elements of a word."""
        return 4 // self.dtype.itemsize

    @cute.jit
    def push_packets(
        self, expert_out: Int64, row_stride: Int64, slots: Int64, record: Int64, split: Int32, chosen: cute.Tensor,
        inbox: Int64, epoch: Uint32,
    ) -> None:  # fmt: skip
        """A part of a record's sum. Arguments: as for `ResultSender.push_packets`."""
        tiling, thread, layout = self.tiling, cute.arch.thread_idx()[0], self.layout
        notes, top_k = slots + record * (4 * layout.note_words), layout.top_k
        inside = [tiling.inside(split, thread, i) for i in range(tiling.turns)]
        numbers = [
            vector.min_of(tiling.packet(split, thread, i), Int32(tiling.packets - 1)) for i in range(tiling.turns)
        ]
        count, group = chosen[0], vector.const_min(PACKETS_AT_ONCE // tiling.turns, top_k)
        total = zeros(tiling.turns * PACKET_WORDS * self.each)
        for first in range(0, count, group):
            places = [chosen[2 + vector.min_of(first + i, count - 1)] for i in range(group)]
            rows = [vector.scalar(notes + Int64(place) * 4, Int32)[0] for place in places]
            weights = [vector.scalar(notes + Int64(top_k + place) * 4, Float32)[0] for place in places]
            words = [
                [word for number in numbers for word in result_words(layout, expert_out, row_stride, row, number)]
                for row in rows
            ]
            for i in range_constexpr(group):
                if first + i < count:
                    add(total, 0, words[i], weights[i], self.dtype)
        if count > 0:
            target = inbox + (Int64(chosen[1]) * top_k + chosen[2]) * (layout.result_packets * PACKET_BYTES)
            summed = rounded(total, self.dtype)
            for turn in range_constexpr(tiling.turns):
                if inside[turn]:
                    words = summed[turn * PACKET_WORDS : (turn + 1) * PACKET_WORDS]
                    packets.send([target], Int64(numbers[turn]) * PACKET_BYTES, words, epoch)

    @cute.jit
    def push_row(
        self, expert_out: Int64, row_stride: Int64, slots: Int64, record: Int64, token: Int32, results: Int64,
        part: Int32, parts: Int32,
    ) -> None:  # fmt: skip
        """A warp's part, of `parts`, of a record's sum. results: where those of this exchange start."""
        layout, lane = self.layout, cute.arch.thread_idx()[0] % WARP
        notes, row, weight = slots + record * (4 * layout.note_words), Int32(-1), Float32(0.0)
        if lane < layout.top_k:
            row = vector.scalar(notes + Int64(lane) * 4, Int32)[0]
            weight = vector.scalar(notes + (layout.top_k + Int64(lane)) * 4, Float32)[0]
        here, vectors = Uint32(cute.arch.vote_ballot_sync(row != -1)), layout.result_bytes // 16
        target = results + (Int64(token) * layout.top_k + lowest(here)) * layout.result_bytes
        for first in range(part * (WARP * UNROLL), vectors, parts * (WARP * UNROLL)):
            numbers = [vector.min_of(first + lane + i * WARP, Int32(vectors - 1)) for i in range(UNROLL)]
            total = zeros(UNROLL * 4 * self.each)
            self.add_places(total, expert_out, row_stride, row, weight, here, numbers)
            summed = rounded(total, self.dtype)
            for i in range_constexpr(UNROLL):
                if (first + lane + i * WARP < vectors) & (here != 0):
                    ptx.store_packet(target + Int64(numbers[i]) * 16, tuple(summed[4 * i : 4 * i + 4]))

    @cute.jit
    def add_places(
        self, total: cute.Tensor, expert_out: Int64, row_stride: Int64, row: Int32, weight: Float32, here: Uint32,
        numbers: list[Any],
    ) -> None:  # fmt: skip
        """Add a thread's vectors `numbers` of the weighted results of the places in `here`, as bits; lane j of the warp
        has the row of place j, < 0 for zeros, and its weight.
        """
        left = here
        for _ in range(0, Int32(cute.arch.popc(here)), PLACES_AT_ONCE):
            there, weights, words = [], [], []
            for _ in range_constexpr(PLACES_AT_ONCE):
                slot = cute.arch.shuffle_sync(row, lowest(left))
                there.append(Boolean(left != 0))
                weights.append(cute.arch.shuffle_sync(weight, lowest(left)))
                source = expert_out + Int64(vector.max_of(slot, Int32(0))) * row_stride
                wanted = Boolean((left != 0) & (slot >= 0))
                words.append([ptx.load_16b_where(wanted, source + Int64(n) * 16) for n in numbers])
                left = left & (left - Uint32(1))
            for i in range_constexpr(PLACES_AT_ONCE):
                if there[i]:
                    for n in range_constexpr(UNROLL):
                        add(total, n * 4 * self.each, words[i][n], weights[i], self.dtype)


def result_words(layout: Any, expert_out: Any, row_stride: Any, row: Any, packet: Any) -> list[Any]:
    """A packet's words of a result; zeros for a row that its expert had no room for."""
    dropped = row < 0
    source = expert_out + Int64(vector.select(dropped, Int32(0), row)) * row_stride
    found = []
    for i in range(PACKET_WORDS):
        at = vector.min_of(packet * PACKET_WORDS + i, Int32(layout.result_bytes // 4 - 1))
        word = Uint32(vector.scalar(source + Int64(at) * 4, Uint32)[0])
        found.append(Uint32(vector.select(dropped, Uint32(0), word)))
    return found


def zeros(count: int) -> Any:
    """Float32 [count] in registers."""
    total = cute.make_rmem_tensor(count, Float32)
    for i in range(count):
        total[i] = Float32(0.0)
    return total


def add(total: Any, start: int, words: Any, weight: Any, dtype: Any) -> None:
    """Add the weighted elements of words to `total` from `start` on."""
    values = [value for word in words for value in packets.widen(Uint32(word), dtype)]
    for i, value in enumerate(values):
        total[start + i] = total[start + i] + ptx.product(weight, value)


def rounded(total: Any, dtype: torch.dtype) -> list[Any]:
    """Sums as words of `dtype`."""
    each = 4 // dtype.itemsize
    count = cute.size(total) // each
    return [Uint32(packets.narrow([total[each * i + n] for n in range(each)], dtype)) for i in range(count)]


def lowest(mask: Any) -> Any:
    """The number of the lowest bit that is set in a u32; 0 if none is."""
    return Int32(cute.arch.popc((mask & (Uint32(0) - mask)) - Uint32(1))) & (WARP - 1)
