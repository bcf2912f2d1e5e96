"""Attention of many queries a sequence over a paged cache, on Hopper; what it computes:
`rose_dist.kernels.paged_prefill`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.attention_results import NOTHING, exp2
from rose_dist.kernels.cute.mxfp4_operands import barrier, next_stage, wait
from rose_dist.kernels.cute.prefill_feed import KeyFeeder, Stored
from rose_dist.kernels.cute.prefill_items import Item, Items
from rose_dist.kernels.dsl import (
    Float32,
    Int32,
    Int64,
    Stream,
    Uint8,
    Uint32,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.paged_attention import LOG2_E
from rose_dist.kernels.prefill_tiling import WARPGROUP_ROWS, PrefillTiling
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_matrix import (
    CELL_BYTES,
    RightOperand,
    await_sums,
    commit_products,
    fence_products,
    multiply_add_async,
    multiply_async,
)


@cache
def launcher(arch: Arch, group: int, paged: bool, tiling: PrefillTiling) -> jit.Launcher:
    return jit.load(PrefillAttention(arch, group, paged, tiling))


@dataclass(frozen=True)
class PrefillAttention(jit.Kernel):
    """A block takes items: rows, each a query head of a token, of one key head's query heads, so that every key is read
    once for all of those. Feeding warps (`KeyFeeder`) run ahead through tiles of keys, across items.

    Queries and weights are left operands in registers. A warpgroup starts the next tile's scores before the values of
    the tile before, and turns scores into weights while those are multiplied. Sums of weights start from the sink.
    """

    group: int
    """Query heads a key head."""
    paged: bool
    """Whether keys are found through slots."""
    tiling: PrefillTiling

    @cute.jit
    def __call__(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        slots: Int64, query_starts: Int64, key_starts: Int64, sinks: Int64, out: Int64, sequences: Int32, heads: Int32,
        columns: Int32, window: Int32, scale: Float32, value_scale: Float32, sms: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Strides in elements; columns: items that the longest sequence has of a key head; `scale` is that of the
        scores times log2 e, and positive.
        """
        self.kernel(
            q, q_stride, keys, values, slot_stride, head_stride, slots, query_starts, key_starts, sinks, out, sequences,
            heads, columns, window, scale, value_scale,
        ).launch(
            grid=[vector.min_of(sequences * heads * columns, sms), 1, 1], block=[self.tiling.threads, 1, 1],
            smem=self.tiling.shared_bytes, stream=stream, use_pdl=True, min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        slots: Int64, query_starts: Int64, key_starts: Int64, sinks: Int64, out: Int64, sequences: Int32, heads: Int32,
        columns: Int32, window: Int32, scale: Float32, value_scale: Float32,
    ) -> None:  # fmt: skip
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        if thread < 2 * tiling.stages:
            arrivals = vector.select(thread < tiling.stages, Int32(tiling.feeders), Int32(2 * tiling.warps))
            cute.arch.mbarrier_init(barrier(shared, thread), arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        items = Items(query_starts, key_starts, sequences, heads, columns, window)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if warp >= tiling.warps:
            cute.arch.setmaxregister_decrease(tiling.registers[0])
            stored = Stored(keys, values, slot_stride, head_stride, slots)
            KeyFeeder(tiling, self.group, self.paged).run(shared, stored, items, warp - tiling.warps)
        else:
            cute.arch.setmaxregister_increase(tiling.registers[1])
            self.compute(shared, q, q_stride, sinks, out, items, scale, value_scale, warp)

    @cute.jit
    def compute(
        self, shared: Int32, q: Int64, q_stride: Int64, sinks: Int64, out: Int64, items: Items, scale: Float32,
        value_scale: Float32, warp: Int32,
    ) -> None:  # fmt: skip
        """A computing warp: 16 rows of each item."""
        tiling = self.tiling
        stage, parity = Int32(0), Int32(0)
        for number in range(items.rounds()):
            item = items.of(number, self.group, tiling.rows, tiling.keys)
            if item.tiles > 0:
                stage, parity = self.attend(
                    shared, q, q_stride, sinks, out, items.heads * self.group, items.window, item, scale, value_scale,
                    warp, stage, parity,
                )  # fmt: skip

    @cute.jit
    def attend(
        self, shared: Int32, q: Int64, q_stride: Int64, sinks: Int64, out: Int64, query_heads: Int32, window: Int32,
        item: Item, scale: Float32, value_scale: Float32, warp: Int32, stage: Int32, parity: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """An item. A lane has rows g and g + 8 of the warp's 16, of which it is lane 4g + j."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        first_row = item.row + warp * 16 + lane // 4
        rows = [vector.min_of(first_row + 8 * i, item.rows - 1) for i in range(2)]
        queries = cute.make_rmem_tensor(tiling.head_dim // 4, Uint32)
        self.load_queries(q, q_stride, item, rows, queries)
        # Of each row the largest score so far, and this lane's share of the sum of weights.
        largest, sums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for i in range_constexpr(2):
            largest[i], sums[i] = self.first_terms(sinks, item.head * self.group + rows[i] % self.group)
        result = cute.make_rmem_tensor(tiling.head_dim // 2, Float32)
        result.fill(0.0)
        weights = cute.make_rmem_tensor(tiling.keys // 4, Uint32)
        # Keys of a tile that a row sees, as columns of the tile from this lane's first one on.
        bounds = [self.bounds(item, row, window, lane) for row in rows]
        clear_low, clear_high = self.clear(item, window, warp)
        first = item.high - tiling.keys
        wait(barrier(shared, stage), parity)
        scores = self.hide(await_sums(self.score(shared, stage, queries)), bounds, first)
        self.keep(self.powers(scores, scale, self.tops(scores, scale, largest), sums), weights)
        self.release(shared, stage)
        before = stage
        for _ in range(item.tiles - 1):
            before = stage
            stage, parity = next_stage(stage, parity, tiling.stages)
            first -= tiling.keys
            wait(barrier(shared, stage), parity)
            if (first >= clear_low) & (first + tiling.keys <= clear_high):
                self.step(shared, stage, before, queries, weights, result, largest, sums, bounds, first, scale, False)
            else:
                self.step(shared, stage, before, queries, weights, result, largest, sums, bounds, first, scale, True)
        self.add_values(shared, stage, weights, result)
        final = await_sums([result[i] for i in range(tiling.head_dim // 2)])
        self.release(shared, stage)
        self.write(out, query_heads, item, first_row, sums, final, value_scale)
        return next_stage(stage, parity, tiling.stages)

    @cute.jit
    def load_queries(
        self, q: Int64, q_stride: Int64, item: Item, rows: list[Int32], queries: cute.Tensor
    ) -> None:
        """Of 16 dimensions each: both rows' pair 2j, both rows' pair 2j + 8."""
        lane, head_dim = cute.arch.thread_idx()[0] % WARP, self.tiling.head_dim
        for i in range_constexpr(2):
            token = Int64(item.first_query + rows[i] // self.group)
            head = item.head * self.group + rows[i] % self.group
            row = q + (token * q_stride + head * head_dim + lane % 4 * 2) * 2
            for step in range_constexpr(head_dim // 16):
                for half in range_constexpr(2):
                    at = 4 * step + 2 * half + i
                    queries[at] = vector.scalar(row + (16 * step + 8 * half) * 2, Uint32)[0]

    @cute.jit
    def first_terms(self, sinks: Int64, head: Int32) -> tuple[Float32, Float32]:
        """The sink's, whose weight one lane of a row adds."""
        largest, weight = Float32(NOTHING), Float32(0.0)
        if sinks != 0:
            largest = vector.scalar(sinks + Int64(head) * 4, Float32)[0] * Float32(LOG2_E)
            weight = vector.select(cute.arch.thread_idx()[0] % 4 == 0, Float32(1.0), Float32(0.0))
        return largest, weight

    def bounds(self, item: Any, row: Any, window: Any, lane: Any) -> Any:
        """The sequence's first key that a row sees, and how many follow it, less this lane's first column."""
        own = item.behind + row // self.group
        low = vector.max_of(own + 1 - window, item.low)
        return low - lane % 4 * 2, own - low

    def clear(self, item: Any, window: Any, warp: Any) -> Any:
        """The range of keys that all rows of the warpgroup see."""
        first = item.row + warp // 4 * WARPGROUP_ROWS
        low, high = (
            item.behind + vector.min_of(row, item.rows - 1) // self.group + 1
            for row in (first + (WARPGROUP_ROWS - 1), first)
        )
        return vector.max_of(low - window, item.low), high

    def score(self, shared: Any, stage: Any, queries: Any) -> Any:
        """Start q · k of a tile."""
        keys = self.tiling.keys
        at = shared + self.tiling.ring_offset + stage * self.tiling.stage_bytes
        fence_products()
        scores: list[Any] = []
        for step in range(self.tiling.head_dim // 16):
            left = [queries[4 * step + i] for i in range(4)]
            right = RightOperand(at + 2 * step * keys * CELL_BYTES, keys)
            scores = multiply_add_async(scores, left, right) if scores else multiply_async(keys // 2, left, right)
        commit_products()
        return scores

    def add_values(self, shared: Any, stage: Any, weights: Any, result: Any) -> None:
        """Start adding a tile's values by their weights."""
        keys, count = self.tiling.keys, self.tiling.head_dim // 2
        at = shared + self.tiling.ring_offset + stage * self.tiling.stage_bytes + self.tiling.tile_bytes
        fence_products()
        total = [result[i] for i in range(count)]
        for step in range(keys // 16):
            right = RightOperand(at + 16 * step * CELL_BYTES, keys, transposed=True)
            total = multiply_add_async(total, [weights[4 * step + i] for i in range(4)], right)
        commit_products()
        for i, value in enumerate(total):
            result[i] = value

    @cute.jit
    def step(
        self, shared: Int32, stage: Int32, before: Int32, queries: cute.Tensor, weights: cute.Tensor,
        result: cute.Tensor, largest: cute.Tensor, sums: cute.Tensor, bounds: list[Any], first: Int32, scale: Float32,
        hidden: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """A tile's scores and weights, while the values of the tile before are added."""
        scores = self.score(shared, stage, queries)
        self.add_values(shared, before, weights, result)
        scores = await_sums(scores, 1)
        if const_expr(hidden):
            scores = self.hide(scores, bounds, first)
        tops = self.tops(scores, scale, largest)
        powers = self.powers(scores, scale, tops, sums)
        count = len(powers)
        self.release_after(shared, stage, sums)
        settled = await_sums([*powers, *(result[i] for i in range(self.tiling.head_dim // 2))])
        self.release(shared, before)
        for i, value in enumerate(settled[count:]):
            result[i] = value * tops[2 + i // 2 % 2]
        self.keep(settled[:count], weights)

    def hide(self, scores: Any, bounds: Any, first: Any) -> Any:
        """−∞ for keys that a row does not see; `first` is the tile's first key."""
        shown = [(Uint32(first - low), Uint32(span)) for low, span in bounds]
        values = []
        for i, score in enumerate(scores):
            begin, span = shown[i // 2 % 2]
            seen = begin + Uint32(i // 4 * 8 + i % 2) <= span
            values.append(vector.select(seen, score, Float32(-math.inf)))
        return values

    def tops(self, scores: Any, scale: Any, largest: Any) -> Any:
        """Of both rows the largest score with this tile, and what earlier weights are to be multiplied by."""
        tops, factors = [], []
        for row in range(2):
            own = [score for i, score in enumerate(scores) if i // 2 % 2 == row]
            while len(own) > 1:
                own = [cute.arch.fmax(*own[i : i + 2]) if i + 1 < len(own) else own[i] for i in range(0, len(own), 2)]
            top = own[0]
            for offset in (1, 2):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
            top = cute.arch.fmax(top * scale, largest[row])
            tops.append(top)
            factors.append(exp2(largest[row] - top))
            largest[row] = top
        return tops + factors

    def powers(self, scores: Any, scale: Any, tops: Any, sums: Any) -> Any:
        """The tile's weights, added to the sums."""
        powers = [exp2(ptx.multiply_add(score, scale, -tops[i // 2 % 2])) for i, score in enumerate(scores)]
        for row in range(2):
            halves = [sums[row] * tops[2 + row], Float32(0.0)]
            for i, power in enumerate(power for i, power in enumerate(powers) if i // 2 % 2 == row):
                halves[i % 2] += power
            sums[row] = halves[0] + halves[1]
        return powers

    def keep(self, powers: Any, weights: Any) -> None:
        """Weights as left operands."""
        for i in range(len(powers) // 2):
            weights[i] = ptx.to_bf16x2(powers[2 * i], powers[2 * i + 1])

    def release_after(self, shared: Any, stage: Any, sums: Any) -> None:
        """`release`, once the sums are known: else the assembler has the wait that follows before the weights."""
        # A sum of powers is never −0.
        never = vector.select(ptx.bits(sums[0] + sums[1]) == Uint32(1 << 31), Int32(1), Int32(0))
        self.release(shared, stage + never)

    @cute.jit
    def release(self, shared: Int32, stage: Int32) -> None:
        """This warp no longer reads a stage's keys, or its values."""
        cute.arch.sync_warp()
        if cute.arch.thread_idx()[0] % WARP == 0:
            cute.arch.mbarrier_arrive(barrier(shared, stage + self.tiling.stages))

    @cute.jit
    def write(
        self, out: Int64, query_heads: Int32, item: Item, first_row: Int32, sums: cute.Tensor, result: list[Float32],
        value_scale: Float32,
    ) -> None:  # fmt: skip
        """Both rows' results, pairs of dimensions."""
        head_dim = self.tiling.head_dim
        for i in range_constexpr(2):
            row = first_row + 8 * i
            factor = value_scale * cute.arch.rcp_approx(vector.group_sum(sums[i], 4))
            token = Int64(item.first_query + row // self.group)
            head = token * query_heads + item.head * self.group + row % self.group
            target = out + (head * head_dim + cute.arch.thread_idx()[0] % 4 * 2) * 2
            for pair in range_constexpr(head_dim // 8):
                values = [result[4 * pair + 2 * i + n] * factor for n in range(2)]
                ptx.store_where(row < item.rows, target + pair * 16, ptx.to_bf16x2(*values))
