"""The sending half of a dispatch of few tokens: every block finds out for itself where its tokens' records go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import (
    copy_of,
    count_sent,
    load_scale_word,
    owner,
    peer,
    place,
    send_headers,
)
from rose_dist.kernels.cute.exchange_quantize import PartQuantizer
from rose_dist.kernels.cute.expert_slots import local_expert, shared_integers
from rose_dist.kernels.dsl import Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import NO_PLACE
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.peer_regions import PACKET_BYTES, PACKET_WORDS
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class PacketSender:
    """Part of a kernel. A block takes a part of a token's record at a time."""

    arch: Arch
    layout: ExchangeLayout
    tiling: PacketTiling

    @cute.jit
    def push(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live: Int32, form: Int32, peers: Int64, sent: Int64,
        epoch: Uint32, rank: Int32,
    ) -> None:  # fmt: skip
        """All records of the `live` tokens and the headers, which say `form`. Arguments: as for `ExchangeDispatch`."""
        layout, tiling = self.layout, self.tiling
        block, blocks, threads = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], tiling.threads
        counted = shared_integers(layout.experts + layout.ranks)
        experts, masks = shared_integers(layout.packet_tokens * layout.top_k), shared_integers(layout.packet_tokens)
        places, owners, rows = (shared_integers(n) for n in (layout.meta_words - 1, layout.top_k, layout.ranks))
        quantizer = PartQuantizer(self.arch, layout, tiling)
        stage = quantizer.stage() if const_expr(layout.quantized is not None) else None
        self.count(ids, live, counted, experts, masks)
        send_headers(layout, counted, peers, rank, live, form, epoch, block, blocks, threads)
        if block == 0:
            count_sent(layout, counted, sent, rank, threads)
        for item in range(block, live * tiling.splits, blocks):
            token, split = item // tiling.splits, item % tiling.splits
            weight = self.weight(weights, token)
            cute.arch.sync_threads()
            if const_expr(layout.quantized is None):
                self.find(token, experts, masks, places, owners, rows)
                self.keep(weight, places)
                cute.arch.sync_threads()
                words = self.words(x, scales, token, split)
                self.push_record(words, token, split, peers, epoch, rank, masks, places, owners, rows)
            else:
                # Loaded before the barriers of `find`, which so hide the memory's latency.
                values = quantizer.load(x, token, split)
                self.find(token, experts, masks, places, owners, rows)
                self.keep(weight, places)
                quantizer.encode(values, split, stage)
                cute.arch.sync_threads()
                words = quantizer.words(stage)
                self.push_record(words, token, split, peers, epoch, rank, masks, places, owners, rows)

    def weight(self, weights: Any, token: Any) -> Any:
        """The bits of this thread's place's, to be loaded before it is needed; any if they don't travel."""
        if not self.layout.weighted:
            return Int32(0)
        place = vector.min_of(cute.arch.thread_idx()[0], Int32(self.layout.top_k - 1))
        return vector.scalar(weights + (Int64(token) * self.layout.top_k + place) * 4, Int32)[0]

    @cute.jit
    def keep(self, weight: Int32, places: cute.Tensor) -> None:
        """Behind the places."""
        thread, top_k = cute.arch.thread_idx()[0], self.layout.top_k
        if const_expr(self.layout.weighted):
            if thread < top_k:
                places[top_k + thread] = weight

    @cute.jit
    def count(self, ids: Int64, live: Int32, counted: cute.Tensor, experts: cute.Tensor, masks: cute.Tensor) -> None:
        """Each live pair's expert, −1 for none; each token's destinations as bits; and how often each occurs."""
        layout, threads, thread = self.layout, self.tiling.threads, cute.arch.thread_idx()[0]
        for at in range(thread, layout.experts + layout.ranks, threads):
            counted[at] = Int32(0)
        cute.arch.sync_threads()
        start = Uint32(counted.iterator.toint())
        for pair in range(thread, live * layout.top_k, threads):
            expert = local_expert(ids, pair, Int32(0), layout.experts)
            experts[pair] = expert
            if expert >= 0:
                ptx.add_shared(start + Uint32(expert) * Uint32(4), Uint32(1))
        cute.arch.sync_threads()
        for token in range(thread, live, threads):
            mask = Uint32(0)
            for j in range(layout.top_k):
                expert = experts[token * layout.top_k + j]
                if expert >= 0:
                    mask = mask | Uint32(1) << Uint32(owner(layout, expert))
            masks[token] = Int32(mask)
            for to in range(layout.ranks):
                if (mask >> Uint32(to)) & Uint32(1) != 0:
                    ptx.add_shared(start + Uint32(layout.experts + to) * Uint32(4), Uint32(1))
        cute.arch.sync_threads()

    @cute.jit
    def find(
        self, token: Int32, experts: cute.Tensor, masks: cute.Tensor, places: cute.Tensor, owners: cute.Tensor,
        rows: cute.Tensor,
    ) -> None:  # fmt: skip
        """A warp for each of the token's pairs counts the same expert's pairs before it, and for each rank the records
        before the token's.
        """
        layout, thread, warps = self.layout, cute.arch.thread_idx()[0], self.tiling.threads // WARP
        lane = thread % WARP
        for j in range(thread // WARP, layout.top_k, warps):
            pair = token * layout.top_k + j
            expert, ordinal = experts[pair], Int32(0)
            for other in range(lane, pair, WARP):
                if experts[other] == expert:
                    ordinal += 1
            ordinal = cute.arch.warp_redux_sync(ordinal, "add")
            if lane == 0:
                valid = expert >= 0
                owners[j] = Int32(vector.select(valid, owner(layout, expert), Int32(-1)))
                places[j] = Int32(place(layout, vector.max_of(expert, Int32(0)), ordinal))
        for to in range(thread // WARP, layout.ranks, warps):
            before = Int32(0)
            for other in range(lane, token, WARP):
                before += Int32(Uint32(masks[other]) >> Uint32(to) & Uint32(1))
            before = cute.arch.warp_redux_sync(before, "add")
            if lane == 0:
                rows[to] = before

    def words(self, x: Any, scales: Any, token: Any, split: Any) -> list[list[Any]]:
        """Of each of this thread's packets of a part."""
        numbers = [self.tiling.packet(split, cute.arch.thread_idx()[0], i) for i in range(self.tiling.turns)]
        return [[self.word(x, scales, token, 3 * number + i) for i in range(PACKET_WORDS)] for number in numbers]

    @cute.jit
    def push_record(
        self, words: list[Any], token: Int32, split: Int32, peers: Int64, epoch: Uint32, rank: Int32,
        masks: cute.Tensor, places: cute.Tensor, owners: cute.Tensor, rows: cute.Tensor,
    ) -> None:  # fmt: skip
        """One part of a record to all its destinations; the first part has the meta too."""
        layout, tiling, thread = self.layout, self.tiling, cute.arch.thread_idx()[0]
        numbers = [tiling.packet(split, thread, i) for i in range(tiling.turns)]
        inside = [tiling.inside(split, thread, i) for i in range(tiling.turns)]
        mask = Uint32(masks[token])
        area = layout.start("record_packets") + (copy_of(epoch, layout.copies) * layout.ranks + rank) * (
            layout.source_packet_bytes
        )
        for to in range(layout.ranks):
            if ((mask >> Uint32(to)) & Uint32(1) != 0) & (peer(peers, to) != 0):
                record = peer(peers, to) + area + Int64(rows[to]) * (layout.record_packets * PACKET_BYTES)
                if (split == 0) & (thread < layout.meta_packets):
                    meta = [self.meta_word(token, to, thread * PACKET_WORDS + i, places, owners) for i in range(3)]
                    packets.send([record], Int64(thread) * PACKET_BYTES, meta, epoch)
                for turn in range_constexpr(tiling.turns):
                    if inside[turn]:
                        offset = Int64(numbers[turn] + layout.meta_packets) * PACKET_BYTES
                        packets.send([record], offset, words[turn], epoch)

    @cute.jit
    def meta_word(self, token: Int32, to: Int32, at: Int32, places: cute.Tensor, owners: cute.Tensor) -> Uint32:
        word = Uint32(token)
        top_k = self.layout.top_k
        if at > top_k:
            word = Uint32(places[vector.min_of(at, Int32(self.layout.meta_words - 1)) - 1])
        elif at > 0:
            word = Uint32(vector.select(owners[at - 1] == to, Uint32(places[at - 1]), Uint32(NO_PLACE)))
        return word

    @cute.jit
    def word(self, x: Int64, scales: Int64, token: Int32, at: Int32) -> Uint32:
        """Word number `at` of a token's row and scales; any beyond them."""
        layout: Any = self.layout
        row_words = layout.row_bytes // 4
        row = x + Int64(token) * layout.row_bytes
        word = Uint32(0)
        if const_expr(layout.scale_bytes == 0):
            word = Uint32(vector.scalar(row + Int64(vector.min_of(at, Int32(row_words - 1))) * 4, Uint32)[0])
        elif at < row_words:
            word = Uint32(vector.scalar(row + Int64(at) * 4, Uint32)[0])
        elif at < layout.data_words:
            row = scales + Int64(token) * layout.scale_bytes
            word = Uint32(load_scale_word(row, at - row_words, layout.scale_bytes))
        return word
