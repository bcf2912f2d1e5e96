"""MoE dispatch of many tokens on one GPU in two launches: one assigns slots, a wide one copies.

`AssignSlots` is a stable counting sort over a few blocks. Each warp walks its own run of pairs twice, first to count,
then to number them; between the two, blocks exchange their histograms behind a grid barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.cute.expert_slots import copy_bytes, scan_starts, scatter_scales, shared_integers
from rose_dist.kernels.cute.phase_barrier import phase_barrier
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.peer_regions import ASSIGN_STAGE
from rose_dist.kernels.row_tiling import RowTiling
from rose_dist.kernels.variants import WARP

AHEAD = 4
"""Pairs of a lane that are loaded at a time."""
HISTOGRAMS_AHEAD = 16
"""Other blocks' counts that are."""


@dataclass(frozen=True)
class AssignSlots(jit.Kernel):
    """`warps` a block; the grid must be co-resident, one block an SM at most.

    The next launch may start once all ids are here, and so after all launches before this one have ended. Started
    earlier, its rows would come first, and all that follows here is latency.
    """

    experts: int
    top_k: int
    layout: PackedLayout
    warps: int

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.warps * WARP

    @cute.jit
    def __call__(
        self, ids: Int64, live_rows: Int64, slots: Int64, sources: Int64, counts: Int64, offsets: Int64,
        histograms: Int64, barrier: Int64, report: Int64, limit_ns: Int64, first_expert: Int32, tokens: Int32,
        blocks: Int32, rank: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: ids int32 [tokens, top_k], live_rows int32 [1] or 0; written are slots int32 [tokens, top_k] of
        live tokens (−1: none), counts int32 [experts], offsets int64 [experts + 1] and, if not 0, sources int32 [slots
        up to the last offset]: whose row each slot is for (−1: none). histograms: int32 [blocks, experts], scratch.
        barrier: u32 of `phase_barrier`.
        """
        self.kernel(
            ids, live_rows, slots, sources, counts, offsets, histograms, barrier, report, limit_ns, first_expert,
            tokens, rank,
        ).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True)  # fmt: skip

    @cute.kernel
    def kernel(
        self, ids: Int64, live_rows: Int64, slots: Int64, sources: Int64, counts: Int64, offsets: Int64,
        histograms: Int64, barrier: Int64, report: Int64, limit_ns: Int64, first_expert: Int32, tokens: Int32,
        rank: Int32,
    ) -> None:  # fmt: skip
        thread, block, blocks = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        walked, totals = shared_integers(self.warps * self.experts), shared_integers(self.warps)
        counted, starts, passed = shared_integers(self.experts), shared_integers(self.experts + 1), shared_integers(1)
        for at in range(thread, self.warps * self.experts, self.threads):
            walked[at] = Int32(0)
        cute.arch.sync_threads()
        every = tokens * self.top_k
        steps = (every + (blocks * self.threads - 1)) // (blocks * self.threads)
        first = ((block * self.warps + thread // WARP) * steps) * WARP
        own = thread // WARP * self.experts
        cute.arch.griddepcontrol_wait()
        pairs = vector.live_rows(live_rows, tokens) * self.top_k
        for step in range(0, steps, AHEAD):
            keys = self.keys(ids, first, step, steps, pairs, every, first_expert)
            for i in range_constexpr(AHEAD):
                self.count(keys[i], walked, own)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        self.publish(walked, histograms + Int64(block) * (self.experts * 4))
        arrived = phase_barrier(barrier, block == 0, blocks, passed, limit_ns, report, rank, ASSIGN_STAGE)
        # After a wait that expired there is nothing to read: no pair gets a slot.
        self.add_histograms(histograms, block, vector.select(arrived, blocks, Int32(0)), counted, walked)
        scan_starts(counted, starts, totals, self.layout, self.experts, self.threads)
        if block == 0:
            self.write_counts(counted, starts, counts, offsets, sources)
        for at in range(thread, self.warps * self.experts, self.threads):
            walked[at] += starts[at % self.experts]
        cute.arch.sync_threads()
        for step in range(0, steps, AHEAD):
            keys = self.keys(ids, first, step, steps, pairs, every, first_expert)
            for i in range_constexpr(AHEAD):
                pair = first + (step + i) * WARP + thread % WARP
                wanted = (step + i < steps) & (pair < pairs)
                self.number(keys[i], pair, wanted, walked, own, starts, slots, sources, arrived)

    def keys(self, ids: Any, first: Any, step: Any, steps: Any, pairs: Any, every: Any, first_expert: Any) -> list[Any]:
        """What a lane's next `AHEAD` pairs are sorted by; −1 for those that are left out. All are loaded at once, and
        do not wait for the number of those that live.
        """
        lane = cute.arch.thread_idx()[0] % WARP
        places = [first + (step + i) * WARP + lane for i in range(AHEAD)]
        loaded = [self.key(ids, vector.min_of(place, every - 1), first_expert) for place in places]
        there = [(step + i < steps) & (place < pairs) for i, place in enumerate(places)]
        return [Int32(vector.select(t, key, Int32(-1))) for t, key in zip(there, loaded, strict=True)]

    def key(self, ids: Any, pair: Any, first_expert: Any) -> Any:
        local = vector.scalar(ids + Int64(pair) * 4, Int32)[0] - first_expert
        return vector.select((local >= 0) & (local < self.experts), local, Int32(-1))

    def peers(self, expert: Any) -> Any:
        """The lanes of the warp that have the same expert, and how many of them are before this one."""
        same = cute.arch.match_sync(0xFFFFFFFF, expert)
        return same, Int32(cute.arch.popc(same & Uint32(cute.arch.lanemask_lt())))

    @cute.jit
    def count(self, expert: Int32, walked: cute.Tensor, own: Int32) -> None:
        """One step of a warp's first walk."""
        same, before = self.peers(expert)
        if (expert >= 0) & (before == 0):
            walked[own + expert] += Int32(cute.arch.popc(same))
        cute.arch.sync_warp()

    @cute.jit
    def number(
        self, expert: Int32, pair: Int32, wanted: Boolean, walked: cute.Tensor, own: Int32, starts: cute.Tensor,
        slots: Int64, sources: Int64, arrived: Boolean,
    ) -> None:  # fmt: skip
        """One step of a warp's second walk: `walked` holds each expert's next slot."""
        same, before = self.peers(expert)
        slot = Int32(-1)
        if arrived & (expert >= 0):
            slot = walked[own + expert] + before
            if const_expr(self.layout.rows_per_expert > 0):
                if slot >= starts[expert + 1]:
                    slot = Int32(-1)
        cute.arch.sync_warp()
        if (expert >= 0) & (before == 0):
            walked[own + expert] += Int32(cute.arch.popc(same))
        if wanted:
            vector.scalar(slots + Int64(pair) * 4, Int32)[0] = slot
            if (slot >= 0) & (sources != 0):
                vector.scalar(sources + Int64(slot) * 4, Int32)[0] = pair // self.top_k
        cute.arch.sync_warp()

    @cute.jit
    def publish(self, walked: cute.Tensor, histogram: Int64) -> None:
        """The block's counts, summed over its warps, to global memory."""
        for expert in range(cute.arch.thread_idx()[0], self.experts, self.threads):
            total = Int32(0)
            for warp in range_constexpr(self.warps):
                total += walked[warp * self.experts + expert]
            vector.scalar(histogram + Int64(expert) * 4, Int32)[0] = total

    @cute.jit
    def add_histograms(
        self, histograms: Int64, block: Int32, blocks: Int32, counted: cute.Tensor, walked: cute.Tensor
    ) -> None:
        """All blocks' counts into `counted`; the pairs before each warp's run, by expert, into `walked`."""
        experts = self.experts
        for expert in range(cute.arch.thread_idx()[0], experts, self.threads):
            total, before = Int32(0), Int32(0)
            for first in range(0, blocks, HISTOGRAMS_AHEAD):
                others = [first + i for i in range(HISTOGRAMS_AHEAD)]
                places = [Int64(vector.min_of(other, blocks - 1)) * experts + expert for other in others]
                found = [vector.scalar(histograms + place * 4, Int32)[0] for place in places]
                for i in range_constexpr(HISTOGRAMS_AHEAD):
                    total += vector.select(others[i] < blocks, found[i], Int32(0))
                    before += vector.select(others[i] < block, found[i], Int32(0))
            counted[expert] = total
            for warp in range_constexpr(self.warps):
                count = walked[warp * experts + expert]
                walked[warp * experts + expert] = before
                before += count
        cute.arch.sync_threads()

    @cute.jit
    def write_counts(
        self, counted: cute.Tensor, starts: cute.Tensor, counts: Int64, offsets: Int64, sources: Int64
    ) -> None:
        """The first block's share: what the grouped GEMM reads, and the slots of no pair."""
        for expert in range(cute.arch.thread_idx()[0], self.experts + 1, self.threads):
            vector.scalar(offsets + Int64(expert) * 8, Int64)[0] = Int64(starts[expert])
            if expert < self.experts:
                count = counted[expert]
                if const_expr(self.layout.rows_per_expert > 0):
                    count = vector.min_of(count, Int32(self.layout.rows_per_expert))
                vector.scalar(counts + Int64(expert) * 4, Int32)[0] = count
                if sources != 0:
                    for slot in range(starts[expert] + count, starts[expert + 1]):
                        vector.scalar(sources + Int64(slot) * 4, Int32)[0] = Int32(-1)


PLACES_AT_ONCE = 4
"""Slots that a thread holds; with 8 it spills."""


@dataclass(frozen=True)
class ScatterRows(jit.Kernel):
    """Copies each token's row, read once, to its slots. `vector_bytes` is the width of `tiling`'s vectors.

    To be launched right after `AssignSlots`: it loads its rows while that still runs.
    """

    top_k: int
    tiling: RowTiling
    vector_bytes: int
    scale_bytes: int
    scale_vector_bytes: int
    column_scales: bool
    """As in `DispatchDecode`."""

    @cute.jit
    def __call__(
        self, x: Int64, scales: Int64, slots: Int64, live_rows: Int64, packed: Int64, packed_scales: Int64,
        group_rows: Int32, tokens: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x and scales, rows of tokens; slots int32 [tokens, top_k]; live_rows int32 [1] or 0."""
        blocks = (tokens + (self.tiling.rows_per_block - 1)) // self.tiling.rows_per_block
        self.kernel(x, scales, slots, live_rows, packed, packed_scales, group_rows, tokens).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, x: Int64, scales: Int64, slots: Int64, live_rows: Int64, packed: Int64, packed_scales: Int64,
        group_rows: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        tiling, size = self.tiling, self.vector_bytes
        lane, token = vector.row_of_thread(tiling)
        row_bytes = tiling.row_vectors * size
        # `AssignSlots`, the launch before, lets this one start after all before it have ended, and does not write x. No
        # thread may leave before the wait: the launch after this one waits for this one alone.
        source = x + Int64(vector.min_of(token, tokens - 1)) * row_bytes
        values = [
            vector.load(source + Int64(vector.place(tiling, lane, i)) * size, Uint32, size // 4, size)
            for i in range(tiling.vectors)
        ]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        own = slots + Int64(vector.min_of(token, tokens - 1)) * (self.top_k * 4)
        places = self.places(own, 0)
        ptx.exit_if(token >= vector.live_rows(live_rows, tokens))
        for j in range_constexpr(self.top_k):
            if const_expr(j > 0 and j % PLACES_AT_ONCE == 0):
                places = self.places(own, j)
            place = Int32(places[j % PLACES_AT_ONCE])
            self.write(place, values, packed, token, scales, packed_scales, group_rows, lane)

    def places(self, own: Any, first: int) -> list[Any]:
        """Slots of a token from choice `first` on, whose loads are under way together."""
        return [vector.scalar(own + j * 4, Int32)[0] for j in range(first, min(first + PLACES_AT_ONCE, self.top_k))]

    @cute.jit
    def write(
        self, place: Int32, values: list[Any], packed: Int64, token: Int32, scales: Int64, packed_scales: Int64,
        group_rows: Int32, lane: Int32,
    ) -> None:  # fmt: skip
        """A token's row, and its scales, to a slot."""
        tiling, size, slot = self.tiling, self.vector_bytes, Int64(place)
        if slot >= 0:
            target = packed + slot * (tiling.row_vectors * size)
            for i in range_constexpr(tiling.vectors):
                at = lane + i * tiling.threads_per_row
                valid = Boolean(vector.in_row(tiling, lane, i))
                vector.store_if(valid, target + Int64(at) * size, values[i], Uint32, size // 4, size)
            own = scales + Int64(token) * self.scale_bytes
            if const_expr(self.column_scales):
                scatter_scales(
                    own, packed_scales, place, group_rows, self.scale_bytes // 4, lane, tiling.threads_per_row
                )
            elif const_expr(self.scale_bytes > 0):
                copy_bytes(
                    own, packed_scales + slot * self.scale_bytes, self.scale_bytes, self.scale_vector_bytes, lane,
                    tiling.threads_per_row,
                )  # fmt: skip
