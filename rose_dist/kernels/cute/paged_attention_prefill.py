"""Attention of many queries a sequence over a paged cache, on Hopper; what it computes:
`rose_dist.kernels.paged_prefill`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.attention_results import NOTHING
from rose_dist.kernels.cute.mxfp4_operands import barrier, next_stage, wait
from rose_dist.kernels.cute.prefill_feed import KeyFeeder, Stored
from rose_dist.kernels.cute.prefill_items import Item, Items, extent
from rose_dist.kernels.cute.prefill_weights import hide, powers, raise_tops, scaled
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
    descriptor,
    fence_products,
    multiply_add_async,
    multiply_async,
)
from rose_dist.kernels.warpgroup_tiling import WARPGROUP


@cache
def launcher(arch: Arch, group: int, tiling: PrefillTiling) -> jit.Launcher:
    return jit.load(PrefillAttention(arch, group, tiling))


@dataclass(frozen=True)
class Queries:
    """And what becomes of them; traced values, strides in elements."""

    address: Any
    stride: Any
    head_stride: Any
    heads: Any
    sinks: Any
    """0 without."""
    out: Any
    scale: Any
    """Of the scores times log2 e, positive."""
    value_scale: Any


@dataclass(frozen=True)
class PrefillAttention(jit.Kernel):
    """A block takes items: rows, each a query head of a token, of one key head's query heads, so that every key is read
    once for all of those. Feeding warps (`KeyFeeder`) run ahead through tiles of keys, across items.

    Queries and weights are left operands in registers. A warpgroup starts the next tile's scores before the values of
    the tile before, and turns scores into weights while those are multiplied. Sums of weights start from the sink.
    """

    group: int
    """Query heads a key head."""
    tiling: PrefillTiling

    @cute.jit
    def __call__(
        self, q: Int64, q_stride: Int64, q_head_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64,
        head_stride: Int64, slots: Int64, query_starts: Int64, key_starts: Int64, sinks: Int64, out: Int64,
        shape: Int64, sequences: Int32, heads: Int32, columns: Int32, window: Int32, scale: Float32,
        value_scale: Float32, sms: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Strides in elements; heads: of keys; columns: items that the longest sequence has of a key head.
        shape: 0, or the address of int32 [2], which say how many sequences there are and the most queries of one: the
        arguments are then but the most of both.
        """
        self.kernel(
            q, q_stride, q_head_stride, keys, values, slot_stride, head_stride, slots, query_starts, key_starts, sinks,
            out, shape, sequences, heads, columns, window, scale, value_scale,
        ).launch(
            grid=[vector.min_of(sequences * heads * columns, sms), 1, 1], block=[self.tiling.threads, 1, 1],
            smem=self.tiling.shared_bytes, stream=stream, use_pdl=True, min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: Int64, q_stride: Int64, q_head_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64,
        head_stride: Int64, slots: Int64, query_starts: Int64, key_starts: Int64, sinks: Int64, out: Int64,
        shape: Int64, sequences: Int32, heads: Int32, columns: Int32, window: Int32, scale: Float32,
        value_scale: Float32,
    ) -> None:  # fmt: skip
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        if thread < 2 * tiling.stages:
            # A computing warp frees a stage's keys, and then its values.
            arrivals = vector.select(thread < tiling.stages, Int32(tiling.feeders), Int32(2 * tiling.warps))
            cute.arch.mbarrier_init(barrier(shared, thread), arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Which is there before a step's first launch.
        sequences, columns = extent(shape, sequences, columns, self.group, tiling.rows)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        items = Items(query_starts, key_starts, sequences, heads, columns, window)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if warp >= tiling.warps:
            cute.arch.setmaxregister_decrease(tiling.registers[0])
            stored = Stored(keys, values, slot_stride, head_stride, slots)
            KeyFeeder(tiling, self.group).run(shared, stored, items, warp - tiling.warps)
        else:
            cute.arch.setmaxregister_increase(tiling.registers[1])
            queries = Queries(q, q_stride, q_head_stride, heads * self.group, sinks, out, scale, value_scale)
            self.compute(shared, queries, items, warp)

    @cute.jit
    def compute(self, shared: Int32, queries: Queries, items: Items, warp: Int32) -> None:
        """A computing warp: 16 rows of each item."""
        stage, parity = Int32(0), Int32(0)
        for number in range(items.rounds()):
            item = items.of(number, self.group, self.tiling.rows, self.tiling.keys)
            if item.tiles > 0:
                stage, parity = self.attend(shared, queries, item, items.window, warp, stage, parity)

    @cute.jit
    def attend(
        self, shared: Int32, queries: Queries, item: Item, window: Int32, warp: Int32, stage: Int32, parity: Int32
    ) -> tuple[Int32, Int32]:
        """An item. Lane 4g + j of a warp has rows g and g + 8 of its 16."""
        tiling, first_row = self.tiling, item.row + warp * 16 + cute.arch.thread_idx()[0] % WARP // 4
        rows = [vector.min_of(first_row + 8 * i, item.rows - 1) for i in range(2)]
        left = cute.make_rmem_tensor(tiling.head_dim // 4, Uint32)
        self.load(queries, item, rows, left)
        # Of each row the largest score so far, and this lane's share of the sum of weights.
        tops, sums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for i in range_constexpr(2):
            tops[i], sums[i] = self.first_terms(queries.sinks, item.head * self.group + rows[i] % self.group)
        result = cute.make_rmem_tensor(tiling.head_dim // 2, Float32)
        result.fill(0.0)
        weights = cute.make_rmem_tensor(tiling.keys // 4, Uint32)
        bounds = [self.bounds(item, row, window) for row in rows]
        clear_low, clear_high = self.clear(item, window, warp)
        first = item.high - tiling.keys
        wait(barrier(shared, stage), parity)
        scores = hide(await_sums(self.score(shared, stage, left)), bounds, first)
        self.keep(self.weigh(scores, queries.scale, tops, sums)[0], weights)
        self.release(shared, stage)
        before = stage
        for _ in range(item.tiles - 1):
            before = stage
            stage, parity = next_stage(stage, parity, tiling.stages)
            first -= tiling.keys
            wait(barrier(shared, stage), parity)
            # All of a warpgroup go the same way: they multiply together.
            if (first >= clear_low) & (first + tiling.keys <= clear_high):
                self.step(shared, stage, before, left, weights, result, tops, sums, bounds, first, queries.scale, False)
            else:
                self.step(shared, stage, before, left, weights, result, tops, sums, bounds, first, queries.scale, True)
        self.add_values(shared, stage, weights, result)
        final = await_sums([result[i] for i in range(tiling.head_dim // 2)])
        self.release(shared, stage)
        self.write(queries, item, first_row, sums, final)
        stage, parity = next_stage(stage, parity, tiling.stages)
        return stage, parity

    @cute.jit
    def step(
        self, shared: Int32, stage: Int32, before: Int32, left: cute.Tensor, weights: cute.Tensor, result: cute.Tensor,
        tops: cute.Tensor, sums: cute.Tensor, bounds: list[Any], first: Int32, scale: Float32,
        hidden: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """A tile's scores and weights, while the values of the tile before are added."""
        scores = self.score(shared, stage, left)
        self.add_values(shared, before, weights, result)
        scores = await_sums(scores, 1)
        if const_expr(hidden):
            scores = hide(scores, bounds, first)
        own, factors = self.weigh(scores, scale, tops, sums)
        self.release_after(shared, stage, sums)
        settled = await_sums([*own, *(result[i] for i in range(self.tiling.head_dim // 2))])
        self.release(shared, before)
        for i, value in enumerate(scaled(settled[len(own) :], factors)):
            result[i] = value
        self.keep(settled[: len(own)], weights)

    def weigh(self, scores: Any, scale: Any, tops: Any, sums: Any) -> Any:
        """A tile's weights, and what each row's result so far is to be multiplied by."""
        factors = raise_tops(scores, scale, tops)
        return powers(scores, scale, tops, factors, sums), factors

    def keep(self, own: Any, weights: Any) -> None:
        """Weights as left operands."""
        for i in range(len(own) // 2):
            weights[i] = ptx.to_bf16x2(own[2 * i], own[2 * i + 1])

    def load(self, queries: Any, item: Any, rows: Any, left: Any) -> None:
        """Left operands: of each 16 dimensions both rows' pair 2j, then both rows' pair 2j + 8."""
        for i, row in enumerate(rows):
            token = Int64(item.first_query + row // self.group) * queries.stride
            head = Int64(item.head * self.group + row % self.group) * queries.head_stride
            source = queries.address + (token + head + cute.arch.thread_idx()[0] % 4 * 2) * 2
            for place in range(self.tiling.head_dim // 8):
                left[2 * place + i] = vector.scalar(source + place * 16, Uint32)[0]

    @cute.jit
    def first_terms(self, sinks: Int64, head: Int32) -> tuple[Float32, Float32]:
        """The sink's, whose weight one lane of a row adds."""
        top, weight = Float32(NOTHING), Float32(0.0)
        if sinks != 0:
            top = vector.scalar(sinks + Int64(head) * 4, Float32)[0] * Float32(LOG2_E)
            weight = vector.select(cute.arch.thread_idx()[0] % 4 == 0, Float32(1.0), Float32(0.0))
        return top, weight

    def bounds(self, item: Any, row: Any, window: Any) -> Any:
        """As `hide` wants them."""
        own = item.behind + row // self.group
        low = vector.max_of(own + 1 - window, item.low)
        return low - cute.arch.thread_idx()[0] % 4 * 2, own - low

    def clear(self, item: Any, window: Any, warp: Any) -> Any:
        """The range of keys that all rows of the warpgroup see."""
        first = item.row + warp // WARPGROUP * WARPGROUP_ROWS
        ends = [first, first + (WARPGROUP_ROWS - 1)]
        high, last = (item.behind + vector.min_of(row, item.rows - 1) // self.group + 1 for row in ends)
        return vector.max_of(last - window, item.low), high

    def score(self, shared: Any, stage: Any, left: Any) -> Any:
        """Start q · k of a tile."""
        keys = self.tiling.keys
        at = shared + self.tiling.ring_offset + stage * self.tiling.stage_bytes
        fence_products()
        scores: list[Any] = []
        for step in range(self.tiling.head_dim // 16):
            queries = [left[4 * step + i] for i in range(4)]
            right = RightOperand(descriptor(at + 2 * step * keys * CELL_BYTES, keys))
            scores = multiply_add_async(scores, queries, right) if scores else multiply_async(keys // 2, queries, right)
        commit_products()
        return scores

    def add_values(self, shared: Any, stage: Any, weights: Any, result: Any) -> None:
        """Start adding a tile's values by their weights."""
        keys, count = self.tiling.keys, self.tiling.head_dim // 2
        at = shared + self.tiling.ring_offset + stage * self.tiling.stage_bytes + self.tiling.tile_bytes
        fence_products()
        total = [result[i] for i in range(count)]
        for step in range(keys // 16):
            right = RightOperand(descriptor(at + 16 * step * CELL_BYTES, 8), keys, transposed=True)
            total = multiply_add_async(total, [weights[4 * step + i] for i in range(4)], right)
        commit_products()
        for i, value in enumerate(total):
            result[i] = value

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

    def write(self, queries: Any, item: Any, first_row: Any, sums: Any, result: Any) -> None:
        """Both rows' results, pairs of dimensions."""
        head_dim = self.tiling.head_dim
        factors = [queries.value_scale * cute.arch.rcp_approx(vector.group_sum(sums[i], 4)) for i in range(2)]
        values = scaled(result, factors)
        for i in range(2):
            row = first_row + 8 * i
            token = Int64(item.first_query + row // self.group)
            head = token * queries.heads + item.head * self.group + row % self.group
            target = queries.out + (head * head_dim + cute.arch.thread_idx()[0] % 4 * 2) * 2
            for place in range(head_dim // 8):
                pair = values[4 * place + 2 * i : 4 * place + 2 * i + 2]
                ptx.store_where(row < item.rows, target + place * 16, ptx.to_bf16x2(*pair))
