"""The part of a dispatch's receiving half that takes plain rows; see `rose_dist.kernels.exchange_layout`."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.cute.exchange_parts import copy_of, slot_of, store_scale_word
from rose_dist.kernels.dsl import Int32, Int64, Uint32, const_expr, cute, cutlass, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.peer_regions import CHUNK_STAGE
from rose_dist.kernels.variants import WARP

UNROLL = 4


@dataclass(frozen=True)
class RowTaker:
    """Part of a kernel. A block takes a chunk at a time, straight into its packed rows."""

    layout: ExchangeLayout
    packed: PackedLayout
    threads: int

    @cute.jit
    def take(
        self, own: Int64, source: Int32, chunk: Int32, epoch: Uint32, limit_ns: Int64, report: Int64, rank: Int32,
        headers: cute.Tensor, starts: cute.Tensor, passed: cute.Tensor, run: cute.Tensor, packed: Int64,
        packed_scales: Int64, tokens: Int64, slots: Int64, runs: Int64,
    ) -> None:  # fmt: skip
        """A chunk's records, once its flag has come. run: Int32 [1] in shared memory, scratch."""
        layout, threads, thread = self.layout, self.threads, cute.arch.thread_idx()[0]
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
        return max(1, self.threads // WARP // self.layout.chunk)

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
                note_place(layout, source, row, lane, slot, Int32(weight), token, rank, tokens, slots)
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


@cute.jit
def note_place(
    layout: cutlass.Constexpr, source: Int32, row: Int32, place: Int32, slot: Int32, weight: Int32, token: Int32,
    rank: Int32, tokens: Int64, slots: Int64,
) -> None:  # fmt: skip
    """For combine: a place's slot, by record and, of this rank's own tokens, by token; and the record's token. With
    `partial_sums`, the place's weight too.
    """
    words, sources, records = layout.note_words, layout.ranks, layout.max_records
    record = Int64(source) * records + row
    vector.scalar(slots + (record * words + place) * 4, Int32)[0] = slot
    if const_expr(layout.partial_sums):
        vector.scalar(slots + (record * words + layout.top_k + place) * 4, Int32)[0] = weight
    vector.scalar(tokens + record * 4, Int32)[0] = token
    if (source == rank) & (slot != -1):
        own = Int64(sources * records) + token
        vector.scalar(slots + (own * words + place) * 4, Int32)[0] = slot
