"""The receiving half of a combine whose results come back as plain rows; see `rose_dist.kernels.exchange_layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_partial import UNROLL, PartialSums, lowest, rounded, zeros
from rose_dist.kernels.cute.exchange_parts import copy_of, owner
from rose_dist.kernels.cute.expert_slots import local_expert
from rose_dist.kernels.dsl import TYPES, Boolean, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_tiling import PacketTiling, sum_parts
from rose_dist.kernels.peer_regions import RESULT_CHUNK_STAGE
from rose_dist.kernels.variants import WARP

AT_ONCE = 8
"""Results of one output place that a thread has in flight."""
SUMS_AT_ONCE = 2
"""The same of ranks' sums; from 3 on registers spill."""


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
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def share(self) -> int:
        """Warps that share a token, where ranks' sums come."""
        return self.warps // (self.group // self.parts)

    @property
    def parts(self) -> int:
        """That a chunk is taken in, each by a block."""
        return 1 if self.by_token else sum_parts(self.layout)

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
        results, mine = self.results(own, epoch), self.mine(slots)
        for item in range(block, (live + (group - 1)) // group * self.parts, blocks):
            number = item // self.parts
            self.await_flags(ids, number, own, epoch, report, limit_ns, rank)
            first = number * group + item % self.parts * (group // self.parts)
            here = vector.min_of(live - first, Int32(group // self.parts))
            if const_expr(layout.weighted):
                for at in range(thread // WARP // self.share, here, self.warps // self.share):
                    self.sum_sums(
                        first + at, thread // WARP % self.share, expert_out, row_stride, mine, ids, weights,
                        results, out, rank,
                    )  # fmt: skip
            else:
                for at in range(thread, here * self.vectors, self.threads):
                    token, column = first + at // self.vectors, at % self.vectors
                    self.sum(token, column, expert_out, row_stride, mine, ids, weights, results, out, rank)

    def results(self, own: Any, epoch: Any) -> Any:
        """Where those of this exchange start."""
        layout = self.layout
        return own + layout.start("results") + copy_of(epoch, layout.result_copies) * layout.result_row_bytes

    def mine(self, slots: Any) -> Any:
        """Where the slots of this rank's tokens start."""
        return slots + Int64(self.layout.ranks * self.layout.max_records) * (4 * self.layout.note_words)

    @cute.jit
    def await_flags(
        self, ids: Int64, number: Int32, own: Int64, epoch: Uint32, report: Int64, limit_ns: Int64, rank: Int32
    ) -> None:
        """Of a chunk or token, those of all ranks that send one; what they publish is visible to the block."""
        layout, thread = self.layout, cute.arch.thread_idx()[0]
        flags = own + layout.start("result_flags") + copy_of(epoch, layout.result_copies) * layout.result_flag_bytes
        cute.arch.sync_threads()
        if thread < layout.ranks:
            if self.due(ids, number, rank):
                flag = flags + (Int64(thread) * layout.max_records + number) * 4
                sync.wait(flag, epoch, "sys", limit_ns, report, rank, thread, RESULT_CHUNK_STAGE, True)
        cute.arch.sync_threads()

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
        total = self.sum_of_results(token, column, expert_out, row_stride, mine, ids, weights, results, rank)
        self.write(token, column, total, out)

    @cute.jit
    def write(self, token: Int32, column: Int32, total: list[Any], out: Int64) -> None:
        """One vector of a token's sum, rounded, to `out`."""
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

    @cute.jit
    def sum_sums(
        self, token: Int32, part: Int32, expert_out: Int64, row_stride: Int64, mine: Int64, ids: Int64, weights: Int64,
        results: Int64, out: Int64, rank: Int32,
    ) -> None:  # fmt: skip
        """A warp's part of the sum of every rank's sum, each at the first of its places; this rank's is made here, if
        `direct`. With `node_ranks`, of every node's sum, and this node's is made here. Lane j knows about place j.
        """
        layout, lane, top_k = self.layout, cute.arch.thread_idx()[0] % WARP, self.layout.top_k
        by, row, weight, repeated = Int32(-1), Int32(-1), Float32(0.0), Boolean(False)
        if lane < top_k:
            expert = local_expert(ids, token * top_k + lane, Int32(0), layout.experts)
            row = self.row(mine, token, lane)
            weight = vector.scalar(weights + (Int64(token) * top_k + lane) * 4, Float32)[0]
            if expert >= 0:
                by = Int32(owner(layout, expert) // self.summing)
        for j in range_constexpr(top_k):
            repeated = repeated | ((cute.arch.shuffle_sync(by, j) == by) & (lane > j))
        firsts = Uint32(cute.arch.vote_ballot_sync((by >= 0) & ~repeated))
        here, at = Uint32(0), results + Int64(token) * (top_k * layout.result_bytes)
        if const_expr(self.makes_own):
            here = Uint32(cute.arch.vote_ballot_sync(by == rank // self.summing))
        rows, stride = expert_out, row_stride
        if const_expr(layout.node_ranks > 0):
            rows, stride = results, Int64(layout.result_bytes)
        place = vector.select(here != 0, lowest(here), Int32(-1))
        for first in range(part * (WARP * UNROLL), self.vectors, self.share * (WARP * UNROLL)):
            numbers = [vector.min_of(first + lane + i * WARP, Int32(self.vectors - 1)) for i in range(UNROLL)]
            total, own, left = zeros(UNROLL * self.count), zeros(UNROLL * self.count), firsts
            places, loaded, left = self.load_sums(at, left, place, numbers)
            if const_expr(self.makes_own):
                self.partial.add_places(own, rows, stride, row, weight, here, numbers)
            summed = rounded(own, self.dtype)
            self.add_sums(total, places, loaded, place, summed)
            if const_expr(self.sums_at_once < self.most_sums):
                for _ in range(self.sums_at_once, Int32(cute.arch.popc(firsts)), self.sums_at_once):
                    places, loaded, left = self.load_sums(at, left, place, numbers)
                    self.add_sums(total, places, loaded, place, summed)
            for i in range_constexpr(UNROLL):
                if first + lane + i * WARP < self.vectors:
                    values = [total[i * self.count + n] for n in range(self.count)]
                    self.write(token, numbers[i], values, out)

    @property
    def partial(self) -> PartialSums:
        return PartialSums(self.layout, self.dtype, PacketTiling(self.layout.result_packets, 1))

    def row(self, mine: Any, token: Any, place: Any) -> Any:
        """Where this rank's or node's result for a place is."""
        if self.layout.node_ranks:
            return token * self.layout.top_k + place
        return vector.scalar(mine + (Int64(token) * self.layout.note_words + place) * 4, Int32)[0]

    @property
    def makes_own(self) -> bool:
        """Whether this rank's or node's sum does not come."""
        return self.direct or self.layout.node_ranks > 0

    @property
    def summing(self) -> int:
        """Ranks whose results come as one sum."""
        return max(1, self.layout.node_ranks)

    @property
    def most_sums(self) -> int:
        """Of a token."""
        return min(self.layout.ranks // self.summing, self.layout.top_k)

    @property
    def sums_at_once(self) -> int:
        return min(SUMS_AT_ONCE, self.most_sums)

    def load_sums(self, at: Any, left: Any, own: Any, numbers: list[Any]) -> tuple[list[Any], list[Any], Any]:
        """The next places of those that are `left`, as bits, −2 for none; this thread's vectors of their sums, if not
        `own`; and what is left then. A sum that does not count is −0.
        """
        places, loaded = [], []
        for _ in range(self.sums_at_once):
            place = Int32(vector.select(left != 0, lowest(left), Int32(-2)))
            wanted, start = Boolean((left != 0) & (place != own)), at + Int64(lowest(left)) * self.layout.result_bytes
            words = [ptx.load_packet_where(wanted, start + Int64(number) * 16) for number in numbers]
            places.append(place)
            loaded.append([word for one in words for word in one])
            left = left & (left - Uint32(1))
        return places, loaded, left

    def add_sums(self, total: Any, places: list[Any], loaded: list[Any], own: Any, summed: list[Any]) -> None:
        """Add what `load_sums` gave, and `summed` at place `own`, to `total`, in order."""
        nothing = Uint32(0x80000000 if self.dtype == torch.float32 else 0x80008000)
        for place, words in zip(places, loaded, strict=True):
            chosen = [vector.select(place == own, mine, Uint32(word)) for mine, word in zip(summed, words, strict=True)]
            chosen = [Uint32(vector.select(place >= 0, word, nothing)) for word in chosen]
            values = [value for word in chosen for value in packets.widen(word, self.dtype)]
            for number, value in enumerate(values):
                total[number] = total[number] + value
