"""The receiving half of a dispatch: records of all sources into expert order, as they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import Arrivals, copy_of, receive_headers, slot_of, store_scale_word
from rose_dist.kernels.cute.exchange_quantize import apart
from rose_dist.kernels.cute.expert_slots import scan_starts, shared_integers
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_layout import (
    HEADER_WORDS,
    PACKETS,
    RETURNS,
    ROWS,
    UNIT_PACKETS,
    UNIT_VALUES,
    ExchangeLayout,
)
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.peer_regions import CHUNK_STAGE, PACKET_BYTES, PACKET_WORDS, RECORD_STAGE
from rose_dist.kernels.variants import WARP

UNROLL = 4


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
        layout, tiling, threads = self.layout, self.tiling, self.tiling.threads
        headers = shared_integers(layout.ranks * (HEADER_WORDS + layout.width))
        starts, passed, mine = shared_integers(layout.width + 1), shared_integers(1), shared_integers(layout.top_k)
        meta = shared_integers(layout.meta_packets * PACKET_WORDS)
        stage = cute.make_tensor(
            cute.arch.alloc_smem(Uint32, tiling.part * PACKET_WORDS, alignment=32),
            cute.make_layout(tiling.part * PACKET_WORDS),
        )
        receive_headers(layout, own, epoch, headers, passed, limit_ns, report, rank, threads)
        self.place_sources(headers, starts, counts, offsets, sources, block == 0)
        alive = Boolean(passed[0] != 0)
        cute.arch.sync_threads()
        arrivals, packed_forms = Arrivals(layout, HEADER_WORDS + layout.width), (PACKETS, RETURNS)
        records = arrivals.total(headers, packed_forms)
        for item in range(block, records * tiling.splits, blocks):
            source, row = arrivals.locate(headers, packed_forms, item // tiling.splits, rank)
            split = item % tiling.splits
            alive = self.take_packets(
                own, source, row, split, epoch, alive, limit_ns, report, rank, meta, stage, passed
            )
            self.find_slots(source, row, split, meta, headers, starts, mine, passed, rank, tokens, slots)
            self.store_part(stage, split, mine, packed, packed_scales)
            cute.arch.sync_threads()
        if const_expr(layout.has_rows):
            for item in range(block, arrivals.turns(headers, (ROWS,)), blocks):
                source, chunk, there = arrivals.by_turns(headers, (ROWS,), item, rank)
                if there:
                    self.take_chunk(
                        own, source, chunk, epoch, limit_ns, report, rank, headers, starts, passed, meta, packed,
                        packed_scales, tokens, slots, runs,
                    )  # fmt: skip

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

    # --- Packets -----------------------------------------------------------------------------------------------------

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
                self.note(source, row, thread, slot, weight, meta[0], rank, tokens, slots)
        cute.arch.sync_threads()

    @cute.jit
    def note(
        self, source: Int32, row: Int32, place: Int32, slot: Int32, weight: Int32, token: Int32, rank: Int32,
        tokens: Int64, slots: Int64,
    ) -> None:  # fmt: skip
        """For combine: a place's slot, by record and, of this rank's own tokens, by token; and the record's token. With
        `partial_sums`, the place's weight too.
        """
        words, sources, records = self.layout.note_words, self.layout.ranks, self.layout.max_records
        record = Int64(source) * records + row
        vector.scalar(slots + (record * words + place) * 4, Int32)[0] = slot
        if const_expr(self.layout.partial_sums):
            vector.scalar(slots + (record * words + self.layout.top_k + place) * 4, Int32)[0] = weight
        vector.scalar(tokens + record * 4, Int32)[0] = token
        if (source == rank) & (slot != -1):
            own = Int64(sources * records) + token
            vector.scalar(slots + (own * words + place) * 4, Int32)[0] = slot

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

    # --- Plain rows --------------------------------------------------------------------------------------------------

    @cute.jit
    def take_chunk(
        self, own: Int64, source: Int32, chunk: Int32, epoch: Uint32, limit_ns: Int64, report: Int64, rank: Int32,
        headers: cute.Tensor, starts: cute.Tensor, passed: cute.Tensor, run: cute.Tensor, packed: Int64,
        packed_scales: Int64, tokens: Int64, slots: Int64, runs: Int64,
    ) -> None:  # fmt: skip
        """A chunk's records, once its flag has come. run: Int32 [1] in shared memory, scratch."""
        layout, threads, thread = self.layout, self.tiling.threads, cute.arch.thread_idx()[0]
        copy = copy_of(epoch, layout.copies) * layout.ranks + source
        at = own + layout.start("runs") + copy * layout.source_run_bytes + Int64(chunk) * 8
        note = runs + (Int64(source) * layout.chunks + chunk) * 4
        cute.arch.sync_threads()
        if thread == 0:
            run[0] = Int32(0)
            if passed[0] != 0:
                there = sync.wait(at + 4, epoch, "sys", limit_ns, report, rank, source, CHUNK_STAGE, True)
                if there:
                    run[0] = Int32(ptx.load_relaxed(at, "sys"))
                else:
                    passed[0] = Int32(0)
            vector.scalar(note, Int32)[0] = run[0]
        cute.arch.sync_threads()
        first, count = run[0] >> 8, run[0] & 255
        records = own + layout.start("records") + copy * layout.source_record_bytes
        for number in range(thread // (WARP * self.share), count, threads // (WARP * self.share)):
            row = first + number
            record = records + Int64(row) * layout.record_bytes
            part = thread // WARP % self.share
            self.take_row(record, source, row, part, headers, starts, rank, packed, packed_scales, tokens, slots)

    @property
    def share(self) -> int:
        """Warps that share a plain record: a block's divided among a chunk's."""
        return max(1, self.tiling.threads // WARP // self.layout.chunk)

    @cute.jit
    def take_row(
        self, record: Int64, source: Int32, row: Int32, part: Int32, headers: cute.Tensor, starts: cute.Tensor,
        rank: Int32, packed: Int64, packed_scales: Int64, tokens: Int64, slots: Int64,
    ) -> None:  # fmt: skip
        """A warp's part; its lane j has the slot of place j. The first part has the scales and the notes too."""
        layout, lane = self.layout, cute.arch.thread_idx()[0] % WARP
        meta, slot = record + layout.meta_offset, Int32(-1)
        if lane < self.layout.top_k:
            word = ptx.load_relaxed(meta + 4 * (1 + Int64(lane)), "sys")
            slot = slot_of(self.layout, self.packed, word, source, headers, starts)
            if part == 0:
                weight = Uint32(0)
                if const_expr(layout.partial_sums):
                    weight = ptx.load_relaxed(meta + 4 * (1 + layout.top_k + Int64(lane)), "sys")
                token = Int32(ptx.load_relaxed(meta, "sys"))
                self.note(source, row, lane, slot, Int32(weight), token, rank, tokens, slots)
        vectors = layout.row_bytes // 16
        for first in range(part * (WARP * UNROLL), vectors, self.share * WARP * UNROLL):
            numbers = [vector.min_of(first + lane + i * WARP, Int32(vectors - 1)) for i in range(UNROLL)]
            values = [ptx.load_packet(record + Int64(number) * 16) for number in numbers]
            for j in range(layout.top_k):
                target = Int64(cute.arch.shuffle_sync(slot, j))
                if target >= 0:
                    for i in range_constexpr(UNROLL):
                        if first + lane + i * WARP < vectors:
                            ptx.store_16b(packed + target * layout.row_bytes + Int64(numbers[i]) * 16, values[i])
        if const_expr(layout.scale_bytes > 0):
            if part == 0:
                self.take_scales(record + layout.row_bytes, slot, packed_scales)

    @cute.jit
    def take_scales(self, scales: Int64, slot: Int32, packed_scales: Int64) -> None:
        """A plain record's scales to each lane's slot."""
        lane, top_k, size = cute.arch.thread_idx()[0] % WARP, self.layout.top_k, self.layout.scale_bytes
        words = self.layout.data_words - self.layout.row_bytes // 4
        for first in range(0, words, WARP):
            number = vector.min_of(first + lane, Int32(words - 1))
            word = ptx.load_relaxed(scales + Int64(number) * 4, "sys")
            for j in range(top_k):
                target = Int64(cute.arch.shuffle_sync(slot, j))
                if target >= 0:
                    if first + lane < words:
                        store_scale_word(packed_scales + target * size, number, word, size)
