"""The receiving half of a dispatch: records of all sources into expert order, as they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import Arrivals, copy_of, receive_headers, slot_of, store_scale_word
from rose_dist.kernels.cute.exchange_quantize import apart
from rose_dist.kernels.cute.exchange_take_rows import RowTaker, note_place
from rose_dist.kernels.cute.expert_slots import scan_starts, shared_integers
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import HEADER_WORDS, PACKETS, RETURNS, ROWS, UNIT_PACKETS, UNIT_VALUES
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.peer_regions import PACKET_BYTES, PACKET_WORDS, RECORD_STAGE
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class RecordReceiver:
    """Part of a kernel. `vector_bytes`: width of the stores into the packed rows."""

    layout: ExchangeLayout
    packed: PackedLayout
    tiling: PacketTiling
    vector_bytes: int

    @cute.jit
    def take(
        self, packed: Int64, packed_scales: Int64, counts: Int64, offsets: Int64, sources: Int64, tokens: Int64,
        slots: Int64, runs: Int64, own: Int64, epoch: Uint32, report: Int64, limit_ns: Int64, rank: Int32, block: Int32,
        blocks: Int32,
    ) -> None:  # fmt: skip
        """By `blocks` blocks, of which this is number `block`. Arguments: as for `ExchangeDispatch`."""
        layout = self.layout
        headers, starts, passed, meta = self.open(
            counts, offsets, sources, own, epoch, report, limit_ns, rank, block == 0
        )
        self.take_records(
            headers, starts, passed, meta, packed, packed_scales, tokens, slots, own, epoch, report, limit_ns, rank,
            block, blocks,
        )  # fmt: skip
        if const_expr(layout.has_rows):
            arrivals = Arrivals(layout, HEADER_WORDS + layout.width)
            rows = RowTaker(layout, self.packed, self.tiling.threads)
            for item in range(block, arrivals.turns(headers, (ROWS,)), blocks):
                source, chunk, there = arrivals.by_turns(headers, (ROWS,), item, rank)
                if there:
                    rows.take(
                        own, source, chunk, epoch, limit_ns, report, rank, headers, starts, passed, meta, packed,
                        packed_scales, tokens, slots, runs,
                    )  # fmt: skip

    def open(
        self, counts: Any, offsets: Any, sources: Any, own: Any, epoch: Any, report: Any, limit_ns: Any, rank: Any,
        first: Any,
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """The sources' headers and where their rows start, in shared memory; whether they have come; and a scratch."""
        layout, threads = self.layout, self.tiling.threads
        headers = shared_integers(layout.ranks * (HEADER_WORDS + layout.width))
        starts, passed = shared_integers(layout.width + 1), shared_integers(1)
        meta = shared_integers(layout.meta_packets * PACKET_WORDS)
        receive_headers(layout, own, epoch, headers, passed, limit_ns, report, rank, threads)
        self.place_sources(headers, starts, counts, offsets, sources, first)
        return headers, starts, passed, meta

    @cute.jit
    def take_records(
        self, headers: cute.Tensor, starts: cute.Tensor, passed: cute.Tensor, meta: cute.Tensor, packed: Int64,
        packed_scales: Int64, tokens: Int64, slots: Int64, own: Int64, epoch: Uint32, report: Int64, limit_ns: Int64,
        rank: Int32, block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        """Those that come as packets."""
        layout, tiling = self.layout, self.tiling
        mine = shared_integers(layout.top_k)
        stage = cute.make_tensor(
            cute.arch.alloc_smem(Uint32, tiling.part * PACKET_WORDS, alignment=32),
            cute.make_layout(tiling.part * PACKET_WORDS),
        )
        alive = Boolean(passed[0] != 0)
        cute.arch.sync_threads()
        arrivals, forms = Arrivals(layout, HEADER_WORDS + layout.width), (PACKETS, RETURNS)
        for item in range(block, arrivals.total(headers, forms) * tiling.splits, blocks):
            source, row = arrivals.locate(headers, forms, item // tiling.splits, rank)
            split = item % tiling.splits
            alive = self.take_packets(
                own, source, row, split, epoch, alive, limit_ns, report, rank, meta, stage, passed
            )
            self.find_slots(source, row, split, meta, headers, starts, mine, passed, rank, tokens, slots)
            self.store_part(stage, split, mine, packed, packed_scales)
            cute.arch.sync_threads()

    @cute.jit
    def place_sources(
        self, headers: cute.Tensor, starts: cute.Tensor, counts: Int64, offsets: Int64, sources: Int64, first: Boolean
    ) -> None:
        """Where each expert and each source's share of it start, the latter in place of the headers' counts; the first
        block also writes what follows reads.
        """
        layout, threads, thread = self.layout, self.tiling.threads, cute.arch.thread_idx()[0]
        words = HEADER_WORDS + layout.width
        totals, warps = shared_integers(layout.width), shared_integers(threads // WARP)
        for expert in range(thread, layout.width, threads):
            total = Int32(0)
            for source in range(layout.ranks):
                count = headers[source * words + HEADER_WORDS + expert]
                headers[source * words + HEADER_WORDS + expert] = total
                total += count
            totals[expert] = total
        cute.arch.sync_threads()
        scan_starts(totals, starts, warps, self.packed, layout.width, threads)
        for expert in range(thread, layout.width, threads):
            for source in range(layout.ranks):
                headers[source * words + HEADER_WORDS + expert] += starts[expert]
        if first:
            for expert in range(thread, layout.width + 1, threads):
                vector.scalar(offsets + Int64(expert) * 8, Int64)[0] = Int64(starts[expert])
                if expert < layout.width:
                    count = totals[expert]
                    if const_expr(self.packed.rows_per_expert > 0):
                        count = vector.min_of(count, Int32(self.packed.rows_per_expert))
                    vector.scalar(counts + Int64(expert) * 4, Int32)[0] = count
            for at in range(thread, layout.ranks * HEADER_WORDS, threads):
                word = headers[at // HEADER_WORDS * words + at % HEADER_WORDS]
                vector.scalar(sources + Int64(at) * 4, Int32)[0] = word

    @cute.jit
    def take_packets(
        self, own: Int64, source: Int32, row: Int32, split: Int32, epoch: Uint32, alive: Boolean, limit_ns: Int64,
        report: Int64, rank: Int32, meta: cute.Tensor, stage: cute.Tensor, passed: cute.Tensor,
    ) -> Boolean:  # fmt: skip
        """A part of a record, and its meta, into shared memory."""
        layout, tiling, thread = self.layout, self.tiling, cute.arch.thread_idx()[0]
        index = (copy_of(epoch, layout.copies) * layout.ranks + source) * layout.packet_tokens + row
        record = own + layout.start("record_packets") + index * (layout.record_packets * PACKET_BYTES)
        wanted = [Boolean(thread < layout.meta_packets)]
        wanted += [Boolean(tiling.inside(split, thread, i)) for i in range(tiling.turns)]
        numbers = [thread] + [tiling.packet(split, thread, i) + layout.meta_packets for i in range(tiling.turns)]
        addresses = [
            record + Int64(vector.select(inside, number, Int32(0))) * PACKET_BYTES
            for inside, number in zip(wanted, numbers, strict=True)
        ]
        received = cute.make_rmem_tensor(4 * len(wanted), Uint32)
        alive = packets.receive(
            addresses, wanted, [source] * len(wanted), epoch, received, alive, limit_ns, report, rank, RECORD_STAGE
        )
        for word in range_constexpr(PACKET_WORDS):
            if wanted[0]:
                meta[thread * PACKET_WORDS + word] = Int32(received[word])
        for turn in range_constexpr(tiling.turns):
            for word in range_constexpr(PACKET_WORDS):
                if wanted[1 + turn]:
                    stage[self.place(thread + turn * tiling.threads, word)] = received[4 * (1 + turn) + word]
        if not alive:
            passed[0] = Int32(0)
        cute.arch.sync_threads()
        return alive

    def place(self, packet: Any, word: int) -> Any:
        """Where a word of a part's packet is staged."""
        if self.layout.quantized is None:
            return packet * PACKET_WORDS + word
        return apart(packet, word, self.units)

    @property
    def units(self) -> int:
        """Of a part of a quantised record."""
        return self.tiling.part // UNIT_PACKETS

    @cute.jit
    def find_slots(
        self, source: Int32, row: Int32, split: Int32, meta: cute.Tensor, headers: cute.Tensor, starts: cute.Tensor,
        mine: cute.Tensor, passed: cute.Tensor, rank: Int32, tokens: Int64, slots: Int64,
    ) -> None:  # fmt: skip
        """The record's packed rows. After a wait that expired, none."""
        thread = cute.arch.thread_idx()[0]
        if thread < self.layout.top_k:
            slot = Int32(-1)
            if passed[0] != 0:
                slot = slot_of(self.layout, self.packed, Uint32(meta[1 + thread]), source, headers, starts)
            mine[thread] = slot
            if split == 0:
                weight = Int32(0)
                if const_expr(self.layout.partial_sums):
                    weight = meta[1 + self.layout.top_k + thread]
                note_place(self.layout, source, row, thread, slot, weight, meta[0], rank, tokens, slots)
        cute.arch.sync_threads()

    @cute.jit
    def store_part(
        self, stage: cute.Tensor, split: Int32, mine: cute.Tensor, packed: Int64, packed_scales: Int64
    ) -> None:
        """A staged part to all the record's slots."""
        layout, tiling, size, thread = self.layout, self.tiling, self.vector_bytes, cute.arch.thread_idx()[0]
        part_bytes = tiling.part * PACKET_WORDS * 4
        if const_expr(layout.quantized is not None):
            part_bytes = self.units * UNIT_VALUES
        for number in range(thread, part_bytes // size, tiling.threads):
            at = split * part_bytes + number * size
            if at < layout.row_bytes:
                words = [stage[number * (size // 4) + i] for i in range(size // 4)]
                for j in range(layout.top_k):
                    slot = mine[j]
                    if slot >= 0:
                        target = packed + Int64(slot) * layout.row_bytes + at
                        vector.store_words(target, words, Uint32, size)
        if const_expr(layout.scale_bytes > 0):
            self.store_scales(stage, split, mine, packed_scales)

    @cute.jit
    def store_scales(self, stage: cute.Tensor, split: Int32, mine: cute.Tensor, packed_scales: Int64) -> None:
        """The scales in a staged part."""
        layout, thread, threads = self.layout, cute.arch.thread_idx()[0], self.tiling.threads
        # The row's words of scales that are in this part are `first` to `end`; the first is staged at `start`.
        if const_expr(layout.quantized is not None):
            first, start = split * self.units, self.units * (UNIT_VALUES // 4)
            end = vector.min_of(first + self.units, Int32(layout.units))
        else:
            words, row_words = self.tiling.part * PACKET_WORDS, layout.row_bytes // 4
            first = vector.max_of(split * words - row_words, Int32(0))
            start = row_words + first - split * words
            end = vector.min_of((split + 1) * words, Int32(layout.data_words)) - row_words
        for number in range(first + thread, end, threads):
            for j in range(layout.top_k):
                slot = mine[j]
                if slot >= 0:
                    target = packed_scales + Int64(slot) * layout.scale_bytes
                    store_scale_word(target, number, stage[start + number - first], layout.scale_bytes)
