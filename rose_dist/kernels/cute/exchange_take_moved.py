"""The part of a dispatch's receiving half that takes plain rows where one launch sends and takes: by bulk copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.cute.exchange_parts import (
    Arrivals,
    copy_of,
    load_scale_word,
    owner,
    place,
    slot_of,
    store_scale_word,
)
from rose_dist.kernels.cute.exchange_take_rows import RowTaker, note_place
from rose_dist.kernels.cute.expert_slots import local_expert
from rose_dist.kernels.cute.row_mover import RowMover, dynamic_shared
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import HEADER_WORDS, ROWS
from rose_dist.kernels.exchange_tiling import MoverTiling
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.peer_regions import CHUNK_STAGE
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class RecordTaker:
    """Part of a kernel. Warps take chunks of other ranks' records that have come, one record each at a time, and while
    none has, rows of this rank's own tokens, from where they were given.
    """

    layout: ExchangeLayout
    packed: PackedLayout
    tiling: MoverTiling

    @property
    def mover(self) -> RowMover:
        return RowMover(self.tiling)

    @cute.jit
    def take(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, numbers: Int64, pair_offsets: Int64,
        headers: cute.Tensor, starts: cute.Tensor, passed: cute.Tensor, packed: Int64, packed_scales: Int64,
        tokens: Int64, slots: Int64, runs: Int64, own: Int64, epoch: Uint32, report: Int64, limit_ns: Int64,
        rank: Int32, block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        """By `blocks` blocks, of which this is number `block`. headers, starts, passed: of `RecordReceiver.open`; the
        rest: as for `DispatchRows`.
        """
        layout: Any = self.layout
        mover, arrivals = self.mover, Arrivals(layout, HEADER_WORDS + layout.width)
        shared = dynamic_shared()
        mover.set_up(shared)
        if cute.arch.thread_idx()[0] // WARP < self.tiling.warps:
            ring, alive = mover.ring(), Boolean(passed[0] != 0)
            items = arrivals.turns_of_others(headers, (ROWS,))
            mine, item, chunk = arrivals.units(headers, (ROWS,), rank), block, block
            turns = (vector.max_of(items - block, Int32(0)) + (blocks - 1)) // blocks
            turns += (vector.max_of(mine - block, Int32(0)) + (blocks - 1)) // blocks
            for _ in range(turns):
                source, number, there = arrivals.others_by_turns(headers, (ROWS,), item, rank)
                wanted = Boolean(item < items)
                if wanted & there & alive & (chunk < mine):
                    wanted = self.has_come(own, source, number, epoch)
                if wanted:
                    if there:
                        alive = self.take_chunk(
                            shared, ring, own, source, number, epoch, alive, limit_ns, report, rank, headers, starts,
                            packed, packed_scales, tokens, slots, runs,
                        )  # fmt: skip
                    item += blocks
                else:
                    self.take_own(
                        shared, ring, x, scales, ids, weights, numbers, pair_offsets, chunk, rank, headers, starts,
                        packed, packed_scales, tokens, slots, runs,
                    )  # fmt: skip
                    chunk += blocks
            mover.complete(shared, ring, ring[0][0])

    def run_at(self, own: Any, source: Any, chunk: Any, epoch: Any) -> Any:
        """Where a chunk's run is, and behind it its flag."""
        copy = copy_of(epoch, self.layout.copies) * self.layout.ranks + source
        return own + self.layout.start("runs") + copy * self.layout.source_run_bytes + Int64(chunk) * 8

    @cute.jit
    def has_come(self, own: Int64, source: Int32, chunk: Int32, epoch: Uint32) -> Boolean:
        """Whether a chunk's flag is there, as lane 0 sees it."""
        flag = Int32(0)
        if cute.arch.thread_idx()[0] % WARP == 0:
            flag = Int32(ptx.load_relaxed(self.run_at(own, source, chunk, epoch) + 4, "sys"))
        return Boolean(Uint32(cute.arch.shuffle_sync(flag, 0)) == epoch)

    @cute.jit
    def take_chunk(
        self, shared: Int32, ring: list[cute.Tensor], own: Int64, source: Int32, chunk: Int32, epoch: Uint32,
        alive: Boolean, limit_ns: Int64, report: Int64, rank: Int32, headers: cute.Tensor, starts: cute.Tensor,
        packed: Int64, packed_scales: Int64, tokens: Int64, slots: Int64, runs: Int64,
    ) -> Boolean:  # fmt: skip
        """This warp's share of a chunk's records, once its flag has come; whether it has."""
        layout, lane = self.layout, cute.arch.thread_idx()[0] % WARP
        warp, at = cute.arch.thread_idx()[0] // WARP, self.run_at(own, source, chunk, epoch)
        run, came, note = Int32(0), Int32(0), runs + (Int64(source) * layout.chunks + chunk) * 4
        if lane == 0:
            if alive:
                if sync.wait(at + 4, epoch, "sys", limit_ns, report, rank, source, CHUNK_STAGE, True):
                    run, came = Int32(ptx.load_relaxed(at, "sys")), Int32(1)
            ptx.fence_async_copies()
            if warp == 0:
                vector.scalar(note, Int32)[0] = run
        cute.arch.sync_warp()
        run, came = cute.arch.shuffle_sync(run, 0), cute.arch.shuffle_sync(came, 0)
        records = own + layout.start("records")
        records += (copy_of(epoch, layout.copies) * layout.ranks + source) * layout.source_record_bytes
        for number in range(warp, run & 255, self.tiling.warps):
            row = (run >> 8) + number
            record = records + Int64(row) * layout.record_bytes
            meta, slot = record + layout.meta_offset, Int32(-1)
            if lane < layout.top_k:
                word = ptx.load_relaxed(meta + 4 * (1 + Int64(lane)), "sys")
                token, weight = Int32(ptx.load_relaxed(meta, "sys")), Int32(0)
                if const_expr(layout.partial_sums):
                    weight = Int32(ptx.load_relaxed(meta + 4 * (1 + layout.top_k + Int64(lane)), "sys"))
                slot = slot_of(layout, self.packed, word, source, headers, starts)
                note_place(layout, source, row, lane, slot, weight, token, rank, tokens, slots)
            self.mover.move(shared, ring, record, self.target(packed, slot))
            if const_expr(layout.scale_bytes > 0):
                RowTaker(layout, self.packed, WARP).take_scales(record + layout.row_bytes, slot, packed_scales)
        return Boolean(came != 0)

    def target(self, packed: Any, slot: Any) -> Any:
        """Of a lane, for its place's slot."""
        return Int64(vector.select(slot >= 0, packed + Int64(slot) * self.layout.row_bytes, Int64(0)))

    @cute.jit
    def take_own(
        self, shared: Int32, ring: list[cute.Tensor], x: Int64, scales: Int64, ids: Int64, weights: Int64,
        numbers: Int64, pair_offsets: Int64, chunk: Int32, rank: Int32, headers: cute.Tensor, starts: cute.Tensor,
        packed: Int64, packed_scales: Int64, tokens: Int64, slots: Int64, runs: Int64,
    ) -> None:  # fmt: skip
        """This warp's share of a chunk of this rank's tokens. Notes are as if records had come."""
        layout, lane = self.layout, cute.arch.thread_idx()[0] % WARP
        warp, first = cute.arch.thread_idx()[0] // WARP, chunk * layout.chunk
        live = headers[rank * (HEADER_WORDS + layout.width) + 1]
        here = Boolean(False)
        if (lane < layout.chunk) & (first + lane < live):
            for j in range_constexpr(layout.top_k):
                expert = local_expert(ids, (first + lane) * layout.top_k + j, Int32(0), layout.experts)
                here = here | ((expert >= 0) & (owner(layout, vector.max_of(expert, Int32(0))) == rank))
        mask, note = Uint32(cute.arch.vote_ballot_sync(here)), runs + (Int64(rank) * layout.chunks + chunk) * 4
        if (warp == 0) & (lane == 0):
            vector.scalar(note, Int32)[0] = first << 8 | Int32(cute.arch.popc(mask))
        for number in range(warp, layout.chunk, self.tiling.warps):
            if mask >> Uint32(number) & Uint32(1) != 0:
                token, slot = first + number, Int32(-1)
                row = first + Int32(cute.arch.popc(mask & ((Uint32(1) << Uint32(number)) - Uint32(1))))
                if lane < layout.top_k:
                    pair, weight = token * layout.top_k + lane, Int32(0)
                    expert = local_expert(ids, pair, Int32(0), layout.experts)
                    if expert >= 0:
                        if owner(layout, expert) == rank:
                            start = Int32(vector.scalar(pair_offsets + Int64(expert) * 8, Int64)[0])
                            ordinal = vector.scalar(numbers + Int64(pair) * 4, Int32)[0] - start
                            slot = slot_of(layout, self.packed, place(layout, expert, ordinal), rank, headers, starts)
                    if const_expr(layout.partial_sums):
                        weight = vector.scalar(weights + Int64(pair) * 4, Int32)[0]
                    note_place(layout, rank, row, lane, slot, weight, token, rank, tokens, slots)
                self.mover.move(shared, ring, x + Int64(token) * layout.row_bytes, self.target(packed, slot))
                if const_expr(layout.scale_bytes > 0):
                    self.take_scales(scales + Int64(token) * layout.scale_bytes, slot, packed_scales)

    @cute.jit
    def take_scales(self, scales: Int64, slot: Int32, packed_scales: Int64) -> None:
        """A token's scales to each lane's slot."""
        layout, lane = self.layout, cute.arch.thread_idx()[0] % WARP
        words = layout.data_words - layout.row_bytes // 4
        for first in range(0, words, WARP):
            at = vector.min_of(first + lane, Int32(words - 1))
            word = load_scale_word(scales, at, layout.scale_bytes)
            for j in range(layout.top_k):
                target = cute.arch.shuffle_sync(slot, j)
                if (target >= 0) & (first + lane < words):
                    store_scale_word(packed_scales + Int64(target) * layout.scale_bytes, at, word, layout.scale_bytes)
