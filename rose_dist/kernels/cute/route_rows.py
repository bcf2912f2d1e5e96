"""From the residual to rows in expert order, in one launch of one cluster; what it computes: `kernels.route_rows`.

Every block normalises all rows for itself, and has 16 experts' logits, which it gives to all blocks. Then all of them
choose alike, and each writes its columns of the packed rows: the blocks meet only once. A single token's row and choice
are handed to the experts' launch as soon as they are known (`handover`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.handover import give_choice, give_row
from rose_dist.kernels.cute.mxfp4_operands import load_shared
from rose_dist.kernels.cute.packets import current_epoch
from rose_dist.kernels.cute.resident_weights import ResidentWeights, halves, pair_of_lane, rows_of_lane
from rose_dist.kernels.cute.routing import Route
from rose_dist.kernels.cute.shared_rows import SharedRows
from rose_dist.kernels.dsl import (
    TYPES,
    Boolean,
    Float32,
    Int32,
    Int64,
    Stream,
    Uint8,
    Uint32,
    Uint64,
    const_expr,
    cute,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.handover import EPOCH_AT
from rose_dist.kernels.linear_add import MAX_ROWS
from rose_dist.kernels.linear_shapes import LINEAR_OUTPUTS, resident_beside, resident_handing
from rose_dist.kernels.routing import Score
from rose_dist.kernels.variants import ROUTERS, WARP
from rose_dist.kernels.warp_matrix import await_copies, copy_async


@cache
def launcher(
    arch: Arch, hidden: int, experts: int, k: int, score: Score, table_width: int, hands_over: bool
) -> jit.Launcher:
    return jit.load(RouteRows.of(arch, hidden, experts, k, score, table_width, hands_over=hands_over))


@dataclass(frozen=True)
class SharedRoute(Route):
    """`Route` of logits in shared memory, whose address is given in place of a global one."""

    def load(self, row: Any, dtype: Any, lane: Any) -> Any:
        loaded = _shared(row, lane * self.per_lane, TYPES[dtype], self.per_lane).load().to(Float32)
        return [loaded[j] for j in range(self.per_lane)]

    def load_one(self, row: Any, expert: Any) -> Any:
        return _shared(row, expert, TYPES[self.dtype], 1)[0].to(Float32)


@dataclass(frozen=True)
class RouteRows(jit.Kernel):
    """weights: of the router, 16 experts a block, all on their way before the launch before is done.

    A block fits beside one of `LinearAdd`, or it could not start before that is gone.

    table_width: columns of the table of slots, 0 for none.
    hands_over: for one row. A block then fits beside one of the experts' too, which it hands it to.
    """

    weights: ResidentWeights
    route: SharedRoute
    table_width: int
    hands_over: bool

    @classmethod
    def of(
        cls, arch: Arch, hidden: int, experts: int, k: int, score: Score, table_width: int, *, hands_over: bool
    ) -> RouteRows:
        weights = ResidentWeights(hidden, resident_handing(hidden) if hands_over else resident_beside(hidden))
        shape = ROUTERS.variants[0]
        route = SharedRoute(arch, torch.bfloat16, experts, k, score, 1, 1, False, False, shape, 16)
        return cls(arch, weights, route, table_width, hands_over)

    @property
    def hidden(self) -> int:
        return self.weights.inputs

    @property
    def blocks(self) -> int:
        return self.route.experts // LINEAR_OUTPUTS

    @property
    def shared_rows(self) -> SharedRows:
        return SharedRows(self.hidden, self.weights.shape.warps, self.most_rows)

    @property
    def most_rows(self) -> int:
        return 1 if self.hands_over else MAX_ROWS

    @property
    def places(self) -> dict[str, int]:
        """Where things stand in shared memory, and its size."""
        sizes = {
            "meeting": self.weights.shared_bytes, "rows": self.shared_rows.bytes,
            "logits": self.most_rows * self.route.experts * 2,
            "chosen": self.most_rows * self.route.k * 4, "slots": self.most_rows * self.route.k * 4,
            "table": self.route.experts * self.table_width * 4,
        }  # fmt: skip
        at, places = 0, {}
        for name, size in sizes.items():
            places[name] = at
            at += -(-size // 16) * 16
        return {**places, "size": at}

    @cute.jit
    def __call__(
        self, x: Int64, scale: Int64, weight: Int64, bias: Int64, live_rows: Int64, load: Int64, table: Int64,
        turn: Int32, first_expert: Int32, held: Int32, packed: Int64, ids: Int64, weights: Int64, slots: Int64,
        counts: Int64, offsets: Int64, handover: Int64, rows: Int32, eps: Float32, factor: Float32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x bf16 [rows, hidden], scale bf16 [hidden], weight bf16 [experts, hidden], bias bf16 [experts] or
        0, live_rows int32 [1] or 0, load u64 [experts], added to, table int32 [experts, table_width] and turn as for
        `map_experts`; written are packed bf16 [.., hidden], ids int32, weights fp32 and slots int32 [rows, k], counts
        int32 [held] and offsets int64 [held + 1], of the experts from `first_expert` on. handover: that of a kernel
        that hands over, else 0.
        """
        self.kernel(
            x, scale, weight, bias, live_rows, load, table, turn, first_expert, held, packed, ids, weights, slots,
            counts, offsets, handover, rows, eps, factor,
        ).launch(
            grid=[self.blocks, 1, 1], block=[self.weights.threads, 1, 1], cluster=[self.blocks, 1, 1],
            smem=self.places["size"], stream=stream, use_pdl=True, min_blocks_per_mp=self.weights.shape.per_sm,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, scale: Int64, weight: Int64, bias: Int64, live_rows: Int64, load: Int64, table: Int64,
        turn: Int32, first_expert: Int32, held: Int32, packed: Int64, ids: Int64, weights: Int64, slots: Int64,
        counts: Int64, offsets: Int64, handover: Int64, rows: Int32, eps: Float32, factor: Float32,
    ) -> None:  # fmt: skip
        product = self.weights
        if const_expr(self.hands_over):
            rows = Int32(1)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_arrive_relaxed()  # from here on others may write this block's logits
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        pair, row_bytes = pair_of_lane(), self.hidden * 2
        first = weight + Int64(pair) * (2 * row_bytes)
        normed, at = self.shared_rows, shared + self.places["rows"]
        self.fetch_table(shared, table)
        normed.fetch_scales(at, scale)
        early = product.fetch(first, first + row_bytes, shared)
        words = Uint32(0)
        if bias != 0:
            words = Uint32(vector.scalar(bias + Int64(pair) * 4, Uint32)[0])
        live = vector.live_rows(live_rows, rows)
        cute.arch.griddepcontrol_wait()
        epoch = Uint32(0)
        if const_expr(self.hands_over):
            epoch = current_epoch(handover + EPOCH_AT)
        normed.square(at, x, rows)
        await_copies(product.runs - product.held)  # the table and the norm's weights
        cute.arch.sync_threads()
        normed.normalise(at, rows, eps)
        cute.arch.sync_threads()
        sums = product.multiply(early, shared, self.operands(shared, rows))
        product.meet(shared, sums)
        cute.arch.cluster_wait()
        if cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP) == 0:
            self.give_logits(shared, words, rows)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        block = cute.arch.block_idx()[0]
        if const_expr(self.hands_over):
            # Not earlier: all that a thread has stored must be in memory before it arrives at the cluster's barrier.
            give_row(handover, epoch, normed.row(at, 0), self.hidden, self.blocks, product.threads)
        self.choose(shared, ids, weights, load, turn, first_expert, held, rows, live, factor, block == 0)
        cute.arch.sync_threads()
        if const_expr(self.hands_over):
            if (block == 0) & (cute.arch.thread_idx()[0] == 0):
                give_choice(handover, epoch, [self.chosen(shared, pair) for pair in range(self.route.k)])
        self.find_slots(shared, slots, rows * self.route.k, block == 0)
        if block == self.blocks - 1:
            self.count(shared, counts, offsets, held, rows * self.route.k)
        cute.arch.sync_threads()
        self.pack(shared, packed, rows * self.route.k, block)

    def operands(self, shared: Any, rows: Any) -> Iterable[Any]:
        """This lane's normalised inputs, as `load_rows` gives them; where registers are few, loaded late."""
        row = vector.min_of(cute.arch.thread_idx()[0] % WARP // 4, rows - 1)
        at = self.shared_rows.row(shared + self.places["rows"], row) + Int32(self.weights.inside())
        loads = (load_shared(at + i * 64, 4) for i in range(self.weights.runs))
        return loads if self.hands_over else list(loads)

    @cute.jit
    def give_logits(self, shared: Int32, words: Uint32, rows: Int32) -> None:
        """The rounded logits of this block's experts to all blocks."""
        lane = cute.arch.thread_idx()[0] % WARP
        sums, bias = self.weights.total(shared), halves(words)
        for i, row in enumerate(rows_of_lane(lane)):
            logits = ptx.to_bf16x2(sums[i] + bias[0], sums[2 + i] + bias[1])
            place = shared + self.places["logits"] + (row * self.route.experts + pair_of_lane() * 2) * 2
            if row < rows:
                for block in range_constexpr(self.blocks):
                    ptx.cluster_store_shared(place, Uint32(block), logits)

    @cute.jit
    def fetch_table(self, shared: Int32, table: Int64) -> None:
        """Start copying the table of slots; it joins the next group of copies."""
        thread = cute.arch.thread_idx()[0]
        if cute.arch.make_warp_uniform(thread // WARP) == 0:
            for first in range_constexpr(0, self.route.experts * self.table_width, WARP):
                at = first + thread
                copy_async(shared + self.places["table"] + at * 4, table + Int64(at) * 4, Uint32(4), 4)

    @cute.jit
    def choose(
        self, shared: Int32, ids: Int64, weights: Int64, load: Int64, turn: Int32, first_expert: Int32, held: Int32,
        rows: Int32, live: Int32, factor: Float32, writes: Boolean,
    ) -> None:  # fmt: skip
        """A warp a row: which of the experts here it has chosen, −1 for others and for dead rows, to shared memory; the
        whole choice from one block to global memory.
        """
        warp, lane = cute.arch.thread_idx()[0] // WARP, cute.arch.thread_idx()[0] % WARP
        for row in range(warp, rows, self.weights.shape.warps):
            logits = shared + self.places["logits"] + row * (self.route.experts * 2)
            chosen, share = self.route.choose(Int64(logits), Int64(0), lane)
            if lane < self.route.k:
                pair, expert = row * self.route.k + lane, Int32(chosen)
                place = self.slot(shared, expert, turn + row)
                if row >= live:
                    place, share = Int32(-1), Float32(0.0)
                here = (place >= first_expert) & (place < first_expert + held)
                self.put(shared, "chosen", pair, Int32(vector.select(here, place - first_expert, Int32(-1))))
                if writes:
                    vector.scalar(ids + Int64(pair) * 4, Int32)[0] = place
                    vector.scalar(weights + Int64(pair) * 4, Float32)[0] = share * factor
                    if row < live:
                        ptx.add_relaxed_u64(load + Int64(expert) * 8, Uint64(1), "gpu")

    def slot(self, shared: Any, expert: Any, number: Any) -> Any:
        """The slot of `expert` whose turn it is. Not-a-number logits may give an expert that there is not."""
        if not self.table_width:
            return expert
        row = (expert & Int32(self.route.experts - 1)) * self.table_width  # a power of two
        return self.get(shared, "table", row + 1 + number % self.get(shared, "table", row, Int32), Int32)

    @cute.jit
    def find_slots(self, shared: Int32, slots: Int64, pairs: Int32, writes: Boolean) -> None:
        """Behind all pairs of lower experts, and the earlier ones of the same; −1 for none."""
        for pair in range(cute.arch.thread_idx()[0], pairs, self.weights.threads):
            expert, slot = self.chosen(shared, pair), Int32(0)
            for other in range(pairs):
                rival = self.chosen(shared, other)
                ahead = (rival >= 0) & ((rival < expert) | ((rival == expert) & (other < pair)))
                slot += vector.select(ahead, Int32(1), Int32(0))
            slot = vector.select(expert >= 0, slot, Int32(-1))
            self.put(shared, "slots", pair, Int32(slot))
            if writes:
                vector.scalar(slots + Int64(pair) * 4, Int32)[0] = slot

    @cute.jit
    def count(self, shared: Int32, counts: Int64, offsets: Int64, held: Int32, pairs: Int32) -> None:
        """Rows of every expert here and where they start."""
        # From the last thread on: the first are still at the slots.
        first = self.weights.threads - 1 - cute.arch.thread_idx()[0]
        for expert in range(first, held + 1, self.weights.threads):
            below, own = Int32(0), Int32(0)
            for other in range(pairs):
                rival = self.chosen(shared, other)
                below += vector.select((rival >= 0) & (rival < expert), Int32(1), Int32(0))
                own += vector.select(rival == expert, Int32(1), Int32(0))
            vector.scalar(offsets + Int64(expert) * 8, Int64)[0] = Int64(below)
            if expert < held:
                vector.scalar(counts + Int64(expert) * 4, Int32)[0] = own

    @cute.jit
    def pack(self, shared: Int32, packed: Int64, pairs: Int32, block: Int32) -> None:
        """This block's columns of every pair's row."""
        source: Any = self.shared_rows
        share = (source.vectors + self.blocks - 1) // self.blocks
        for item in range(cute.arch.thread_idx()[0], pairs * share, self.weights.threads):
            pair, at = item // share, block * share + item % share
            slot = self.get(shared, "slots", pair, Int32)
            if (slot >= 0) & (at < source.vectors):
                row = source.row(shared + self.places["rows"], pair // self.route.k)
                words = load_shared(row + at * 16, 4)
                vector.store_words(packed + Int64(slot) * (self.hidden * 2) + at * 16, words, Uint32, 16)

    def chosen(self, shared: Any, pair: Any) -> Any:
        return self.get(shared, "chosen", pair, Int32)

    def get(self, shared: Any, place: str, index: Any, dtype: Any) -> Any:
        return _shared(shared + self.places[place], index, dtype, 1)[0]

    def put(self, shared: Any, place: str, index: Any, value: Any) -> None:
        _shared(shared + self.places[place], index, type(value), 1)[0] = value


def _shared(address: Any, index: Any, dtype: Any, count: int) -> Any:
    """The tensor of `count` elements from number `index` on, counted from a shared address."""
    place = Int32(address) + Int32(index) * (dtype.width // 8)
    pointer = cute.make_ptr(dtype, place, cute.AddressSpace.smem, assumed_align=count * dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(count))
