"""The receiving half of a combine whose results come back as plain rows; see `rose_dist.kernels.exchange_layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import copy_of, first_places, owner
from rose_dist.kernels.cute.expert_slots import local_expert
from rose_dist.kernels.dsl import TYPES, Boolean, Float32, Int32, Int64, Uint32, const_expr, cute
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.peer_regions import RESULT_CHUNK_STAGE

AT_ONCE = 8
"""Results of one output place that a thread has in flight."""


@dataclass(frozen=True)
class RowSummer:
    """Part of a kernel. Blocks sum the results of a chunk or, with `by_token`, of a token at a time, in top-k order.

    dtype: of results, bf16 or fp32. direct: this rank's own experts' results are read from `expert_out`.
    """

    layout: ExchangeLayout
    dtype: torch.dtype
    out_dtype: torch.dtype
    accumulate: bool
    by_token: bool
    direct: bool
    threads: int

    @property
    def vectors(self) -> int:
        """Of 16 bytes in a result."""
        return self.layout.result_bytes // 16

    @property
    def count(self) -> int:
        """Elements of such a vector."""
        return 16 // self.dtype.itemsize

    @property
    def groups(self) -> list[list[int]]:
        """Of places, whose results are in flight at once."""
        places = range(self.layout.top_k)
        return [list(places[first : first + AT_ONCE]) for first in places[::AT_ONCE]]

    @property
    def group(self) -> int:
        """Tokens that share a flag."""
        return 1 if self.by_token else self.layout.chunk

    @cute.jit
    def take(
        self, expert_out: Int64, row_stride: Int64, slots: Int64, ids: Int64, weights: Int64, live: Int32, out: Int64,
        own: Int64, epoch: Uint32, report: Int64, limit_ns: Int64, rank: Int32, block: Int32, blocks: Int32,
    ) -> None:  # fmt: skip
        """Of the `live` tokens, by `blocks` blocks, of which this is number `block`. Arguments: as for `CombineRows`.

        After a wait that expired, whatever is there is summed; the host raises.
        """
        layout, thread, group = self.layout, cute.arch.thread_idx()[0], self.group
        copy = copy_of(epoch, layout.result_copies)
        flags = own + layout.start("result_flags") + copy * layout.result_flag_bytes
        results = own + layout.start("results") + copy * layout.result_row_bytes
        mine = slots + Int64(layout.ranks * layout.max_records) * (4 * layout.note_words)
        for number in range(block, (live + (group - 1)) // group, blocks):
            cute.arch.sync_threads()
            if thread < layout.ranks:
                if self.due(ids, number, rank):
                    flag = flags + (Int64(thread) * layout.max_records + number) * 4
                    sync.wait(flag, epoch, "sys", limit_ns, report, rank, thread, RESULT_CHUNK_STAGE, True)
            cute.arch.sync_threads()
            here = vector.min_of(live - number * group, Int32(group))
            for at in range(thread, here * self.vectors, self.threads):
                token, column = number * group + at // self.vectors, at % self.vectors
                self.sum(token, column, expert_out, row_stride, mine, ids, weights, results, out, rank)

    @cute.jit
    def due(self, ids: Int64, number: Int32, rank: Int32) -> Boolean:
        """Whether the rank that has this thread's number sends a flag."""
        layout, sender = self.layout, cute.arch.thread_idx()[0]
        due = Boolean(True)
        if const_expr(self.by_token):
            due = Boolean(False)
            for j in range(layout.top_k):
                expert = local_expert(ids, number * layout.top_k + j, Int32(0), layout.experts)
                if expert >= 0:
                    if owner(layout, expert) == sender:
                        due = Boolean(True)
        if const_expr(self.direct):
            due = due & (sender != rank)
        return due

    @cute.jit
    def sum(
        self, token: Int32, column: Int32, expert_out: Int64, row_stride: Int64, mine: Int64, ids: Int64,
        weights: Int64, results: Int64, out: Int64, rank: Int32,
    ) -> None:  # fmt: skip
        """One vector of a token's weighted sum. mine: int32 [max_tokens, note_words], the slots of this rank's
        tokens.
        """
        if const_expr(self.layout.partial_sums):
            total = self.sum_of_sums(token, column, expert_out, row_stride, mine, ids, weights, results, rank)
        else:
            total = self.sum_of_results(token, column, expert_out, row_stride, mine, ids, weights, results, rank)
        kind, size = TYPES[self.out_dtype], self.count * self.out_dtype.itemsize
        target = out + (Int64(token) * self.vectors + column) * size
        if const_expr(self.accumulate):
            before = vector.load(target, kind, self.count, 16).to(Float32)
            total = [before[i] + value for i, value in enumerate(total)]
        vector.store_words(target, [value.to(kind) for value in total], kind, 16)

    def sum_of_results(
        self, token: Any, column: Any, expert_out: Any, row_stride: Any, mine: Any, ids: Any, weights: Any,
        results: Any, rank: Any,
    ) -> list[Any]:  # fmt: skip
        """In top-k order."""
        layout: Any = self.layout
        pairs, total = Int64(token) * layout.top_k, [Float32(0.0)] * self.count
        for places in self.groups:
            experts = [vector.scalar(ids + (pairs + j) * 4, Int32)[0] for j in places]
            valid = [Boolean((expert >= 0) & (expert < layout.experts)) for expert in experts]
            addresses = [results + (pairs + j) * layout.result_bytes + Int64(column) * 16 for j in places]
            dropped = [Boolean(False)] * len(places)
            if self.direct:
                # Slots of places that are not here are read too, whatever they are: no branch delays the other loads.
                slots = [vector.scalar(mine + (pairs + j) * 4, Int32)[0] for j in places]
                for number, slot in enumerate(slots):
                    expert = vector.select(valid[number], experts[number], Int32(0))
                    here = Boolean(valid[number] & (owner(layout, expert) == rank))
                    dropped[number] = here & (slot < 0)
                    row = expert_out + Int64(vector.max_of(slot, Int32(0))) * row_stride + Int64(column) * 16
                    addresses[number] = Int64(vector.select(here, row, addresses[number]))
            loaded = [ptx.load_packet(address) for address in addresses]
            for number, j in enumerate(places):
                weight = vector.scalar(weights + (pairs + j) * 4, Float32)[0]
                words = [vector.select(dropped[number], Uint32(0), Uint32(word)) for word in loaded[number]]
                values = [value for word in words for value in packets.widen(Uint32(word), self.dtype)]
                summed = [a + ptx.product(weight, b) for a, b in zip(total, values, strict=True)]
                total = [
                    Float32(vector.select(valid[number], new, old)) for new, old in zip(summed, total, strict=True)
                ]
        return total

    def sum_of_sums(
        self, token: Any, column: Any, expert_out: Any, row_stride: Any, mine: Any, ids: Any, weights: Any,
        results: Any, rank: Any,
    ) -> list[Any]:  # fmt: skip
        """Of every rank's sum, at the first of its places; this rank's is made here, if `direct`."""
        layout: Any = self.layout
        pairs, total = Int64(token) * layout.top_k, [Float32(0.0)] * self.count
        experts = [vector.scalar(ids + (pairs + j) * 4, Int32)[0] for j in range(layout.top_k)]
        valid = [Boolean((expert >= 0) & (expert < layout.experts)) for expert in experts]
        first, _ = first_places(layout, valid, experts, Uint32(0))
        here = [Boolean(False)] * layout.top_k
        if self.direct:
            owners = [owner(layout, vector.select(v, e, Int32(0))) for v, e in zip(valid, experts, strict=True)]
            here = [Boolean(v & (by == rank)) for v, by in zip(valid, owners, strict=True)]
        at = results + pairs * layout.result_bytes + Int64(column) * 16

        def load(places: list[int]) -> list[Any]:
            return [ptx.load_packet_where(first[j] & ~here[j], at + j * layout.result_bytes) for j in places]

        loaded, own = load(self.groups[0]), total
        if self.direct:
            notes, rows = mine + Int64(token) * (4 * layout.note_words), expert_out + Int64(column) * 16
            own = self.own_sum(notes, rows, row_stride, here, weights + pairs * 4)
        for places in self.groups:
            loaded = loaded if places[0] == 0 else load(places)
            for words, j in zip(loaded, places, strict=True):
                values = [value for word in words for value in packets.widen(Uint32(word), self.dtype)]
                values = [vector.select(here[j], mine, other) for mine, other in zip(own, values, strict=True)]
                total = [
                    Float32(vector.select(first[j], old + new, old)) for old, new in zip(total, values, strict=True)
                ]
        return total

    def own_sum(self, notes: Any, rows: Any, row_stride: Any, here: list[Any], weights: Any) -> list[Any]:
        """The weighted sum of the places that are `here`, rounded as one that travels. notes: the token's slots."""
        total = [Float32(0.0)] * self.count
        for places in self.groups:
            slots = [vector.scalar(notes + 4 * j, Int32)[0] for j in places]
            loaded = [
                ptx.load_16b_where(here[j] & (slot >= 0), rows + Int64(vector.max_of(slot, Int32(0))) * row_stride)
                for slot, j in zip(slots, places, strict=True)
            ]
            for words, j in zip(loaded, places, strict=True):
                weight = vector.scalar(weights + 4 * j, Float32)[0]
                values = [value for word in words for value in packets.widen(Uint32(word), self.dtype)]
                total = [
                    Float32(vector.select(here[j], old + ptx.product(weight, new), old))
                    for old, new in zip(total, values, strict=True)
                ]
        each = 4 // self.dtype.itemsize
        words = [packets.narrow(total[i : i + each], self.dtype) for i in range(0, self.count, each)]
        return [value for word in words for value in packets.widen(Uint32(word), self.dtype)]
