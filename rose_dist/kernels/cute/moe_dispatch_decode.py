"""MoE dispatch of few tokens on one GPU in one launch, without flags or grid barriers.

Every block counts all pairs for itself, in shared memory: reading a few KB of ids again costs less than waiting for
another block to publish them. Then it knows the slots of its own token's copies, and writes them from registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.cute.expert_slots import copy_bytes, local_expert, scan_starts, scatter_scales, shared_integers
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.expert_slots import MAX_PAIRS, PackedLayout
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class DispatchDecode(jit.Kernel):
    """A token is copied by `splits` blocks, each of which takes a part of the row.

    row_bytes, scale_bytes: of a token's row and of its scales (0: none). `vector_bytes` and `scale_vector_bytes` are
    the widths of their accesses, powers of two that divide them. `column_scales`: packed scales are fp32 [groups,
    scales, group_rows], or else [rows, scales].
    """

    experts: int
    top_k: int
    row_bytes: int
    vector_bytes: int
    scale_bytes: int
    scale_vector_bytes: int
    column_scales: bool
    layout: PackedLayout
    splits: int
    threads: int

    @cute.jit
    def __call__(
        self, x: Int64, scales: Int64, ids: Int64, live_rows: Int64, packed: Int64, packed_scales: Int64, slots: Int64,
        counts: Int64, offsets: Int64, first_expert: Int32, group_rows: Int32, tokens: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x [tokens, row_bytes], scales, ids int32 [tokens, top_k], live_rows int32 [1] or 0; written are
        packed and packed_scales, slots int32 [tokens, top_k] of live tokens (−1: none), counts int32 [experts] and
        offsets int64 [experts + 1]. With no tokens, `x` and `scales` must still be readable for one row.
        """
        self.kernel(
            x, scales, ids, live_rows, packed, packed_scales, slots, counts, offsets, first_expert, group_rows, tokens
        ).launch(
            grid=[vector.max_of(tokens, Int32(1)), self.splits, 1], block=[self.threads, 1, 1], stream=stream,
            use_pdl=True, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, scales: Int64, ids: Int64, live_rows: Int64, packed: Int64, packed_scales: Int64, slots: Int64,
        counts: Int64, offsets: Int64, first_expert: Int32, group_rows: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        thread, (token, split, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        experts, warps = self.experts, self.threads // WARP
        histogram, starts = shared_integers(experts), shared_integers(experts + 1)
        held, totals, mine = shared_integers(MAX_PAIRS), shared_integers(warps), shared_integers(self.top_k)
        for first in range_constexpr(0, experts, self.threads):
            if thread + first < experts:
                histogram[thread + first] = Int32(0)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live = vector.live_rows(live_rows, tokens)
        first_block = (token == 0) & (split == 0)
        ptx.exit_if(Boolean(token >= live) & Boolean(token + split > 0))
        row = self.load_row(x + Int64(token) * self.row_bytes, split)
        cute.arch.sync_threads()
        self.count(ids, first_expert, live * self.top_k, histogram, held)
        scan_starts(histogram, starts, totals, self.layout, experts, self.threads)
        if first_block:
            self.write_counts(histogram, starts, counts, offsets)
        if token < live:
            self.find_slots(token, split, starts, held, mine, slots)
            cute.arch.sync_threads()
            for j in range(self.top_k):
                slot = Int64(mine[j])
                if slot >= 0:
                    self.store_row(packed + slot * self.row_bytes, split, row)
                    if const_expr(self.scale_bytes > 0):
                        if split == 0:
                            self.copy_scales(
                                scales + Int64(token) * self.scale_bytes, packed_scales, Int32(slot), group_rows
                            )

    @cute.jit
    def count(self, ids: Int64, first_expert: Int32, pairs: Int32, histogram: cute.Tensor, held: cute.Tensor) -> None:
        """Every live pair's expert into `held`, and how often each occurs into `histogram`."""
        for pair in range(cute.arch.thread_idx()[0], pairs, self.threads):
            expert = local_expert(ids, pair, first_expert, self.experts)
            held[pair] = expert
            if expert >= 0:
                ptx.add_shared(Uint32(histogram.iterator.toint()) + Uint32(expert) * Uint32(4), Uint32(1))
        cute.arch.sync_threads()

    @cute.jit
    def write_counts(self, histogram: cute.Tensor, starts: cute.Tensor, counts: Int64, offsets: Int64) -> None:
        """The first block's share: what the grouped GEMM reads."""
        for expert in range(cute.arch.thread_idx()[0], self.experts + 1, self.threads):
            vector.scalar(offsets + Int64(expert) * 8, Int64)[0] = Int64(starts[expert])
            if expert < self.experts:
                count = histogram[expert]
                if const_expr(self.layout.rows_per_expert > 0):
                    count = vector.min_of(count, Int32(self.layout.rows_per_expert))
                vector.scalar(counts + Int64(expert) * 4, Int32)[0] = count

    @cute.jit
    def find_slots(
        self, token: Int32, split: Int32, starts: cute.Tensor, held: cute.Tensor, mine: cute.Tensor, slots: Int64
    ) -> None:
        """A warp for each of the token's pairs counts the same expert's pairs before it."""
        thread = cute.arch.thread_idx()[0]
        lane = thread % WARP
        for j in range(thread // WARP, self.top_k, self.threads // WARP):
            pair = token * self.top_k + j
            expert, rank = held[pair], Int32(0)
            for other in range(lane, pair, WARP):
                if held[other] == expert:
                    rank += 1
            rank = cute.arch.warp_redux_sync(rank, "add")
            slot = Int32(-1)
            if expert >= 0:
                slot = starts[expert] + rank
                if const_expr(self.layout.rows_per_expert > 0):
                    if rank >= self.layout.rows_per_expert:
                        slot = Int32(-1)
            if lane == 0:
                mine[j] = slot
                if split == 0:
                    vector.scalar(slots + Int64(pair) * 4, Int32)[0] = slot

    def load_row(self, row: Any, split: Any) -> Any:
        """This thread's vectors of the split's part; the row's last one in place of any beyond it."""
        size = self.vector_bytes
        last = Int32(self.row_bytes // size - 1)
        return [
            vector.load(row + Int64(vector.min_of(at, last)) * size, Uint32, size // 4, size)
            for at in self.places(split)
        ]

    def store_row(self, row: Any, split: Any, values: Any) -> Any:
        size = self.vector_bytes
        end = vector.min_of((split + 1) * self.part, Int32(self.row_bytes // size))
        for at, value in zip(self.places(split), values, strict=True):
            vector.store_if(Boolean(at < end), row + Int64(at) * size, value, Uint32, size // 4, size)

    @property
    def part(self) -> int:
        """Vectors of a row that one block takes."""
        return -(-self.row_bytes // self.vector_bytes // self.splits)

    def places(self, split: Any) -> Any:
        """Where this thread's vectors stand in the row."""
        thread = cute.arch.thread_idx()[0]
        return [split * self.part + thread + i for i in range(0, self.part, self.threads)]

    @cute.jit
    def copy_scales(self, source: Int64, packed: Int64, slot: Int32, group_rows: Int32) -> None:
        """By all threads of the block."""
        thread, target = cute.arch.thread_idx()[0], packed + Int64(slot) * self.scale_bytes
        if const_expr(self.column_scales):
            scatter_scales(source, packed, slot, group_rows, self.scale_bytes // 4, thread, self.threads)
        else:
            copy_bytes(source, target, self.scale_bytes, self.scale_vector_bytes, thread, self.threads)
