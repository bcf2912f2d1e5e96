"""Attention of one query a request over a paged cache; what it computes: `rose_dist.kernels.paged_attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector, warp_matrix
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import (
    TYPES,
    Float32,
    Int32,
    Int64,
    Stream,
    Uint32,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.paged_attention import MIN_TILES, TILE, partial_floats
from rose_dist.kernels.variants import WARP

WARPS = 4
THREADS = WARPS * WARP
STAGE_BYTES = 16384
"""Of keys and values that a warp has on their way or in use, at least."""
SM_SHARED_BYTES, BLOCK_OVERHEAD_BYTES = 228 << 10, 2 << 10
"""Shared memory of an SM, Hopper's and Blackwell's, and what a block takes beside its warps' share."""
AT_ONCE = 64
"""fp32 of other blocks' results that a thread has in flight when it merges."""
NOTHING = -1e30
"""The maximum of no scores: finite, so that no difference of two is NaN."""


@cache
def launcher(arch: Arch, dtype: torch.dtype, head_dim: int, wide_group: bool, block_tiles: int) -> jit.Launcher:
    return jit.load(DecodeAttention(arch, dtype, head_dim, wide_group, block_tiles))


@dataclass(frozen=True)
class DecodeAttention(jit.Kernel):
    """A block for each split of a request's keys, for each key head: the key head's query heads are the rows of one
    matrix product, so every key and value is read once.

    A warp takes every fourth tile of 16 keys. Its lanes copy keys and values into shared memory in the very order in
    which they need them as fragments, each lane its own: the head's dimensions, as the summed index of q · k and as
    the columns of p · v, may stand in any order. So a lane waits for nothing but its own copies.

    The block's warps merge in shared memory, in the order of warps. The last block of a request's splits to arrive
    merges them all from global memory, in the order of splits, and adds the sink.
    """

    dtype: torch.dtype
    """bf16."""
    head_dim: int
    wide_group: bool
    """More than 8 query heads a key head."""
    block_tiles: int
    """Tiles a cache block."""

    @property
    def rows(self) -> int:
        """Query heads a key head, padded."""
        return 16 if self.wide_group else 8

    @property
    def vectors(self) -> int:
        """16-byte vectors of a tile's keys, and of its values, a lane."""
        return TILE * self.head_dim * self.dtype.itemsize // (16 * WARP)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a tile."""
        return 2 * self.vectors * 16 * WARP

    @property
    def stages(self) -> int:
        return max(3, STAGE_BYTES // self.stage_bytes)

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp: first its tiles, then its result."""
        return max(self.stages * self.stage_bytes, self.rows * self.pitch * 4)

    @property
    def blocks_per_sm(self) -> int:
        """As many as shared memory has room for."""
        return SM_SHARED_BYTES // (WARPS * self.warp_bytes + BLOCK_OVERHEAD_BYTES)

    @property
    def pitch(self) -> int:
        """fp32 of one query head's result: the sums, the largest score and the sum of weights."""
        return partial_floats(self.head_dim)

    @property
    def each(self) -> int:
        """Dimensions a thread merges."""
        return self.head_dim * self.rows // THREADS

    @cute.jit
    def __call__(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        tables: Int64, table_stride: Int64, first_blocks: Int64, lengths: Int64, live_rows: Int64, sinks: Int64,
        out: Int64, partials: Int64, counters: Int64, requests: Int32, key_heads: Int32, group: Int32,
        window: Int32, most_splits: Int32, scale: Float32, sms: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Strides in elements; `scale` is that of the scores times log2 e."""
        items = requests * key_heads * most_splits
        blocks = vector.min_of(items, sms * self.blocks_per_sm)
        self.kernel(
            q, q_stride, keys, values, slot_stride, head_stride, tables, table_stride, first_blocks, lengths, live_rows,
            sinks, out, partials, counters, requests, key_heads, group, window, most_splits, scale,
        ).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=self.blocks_per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: Int64, q_stride: Int64, keys: Int64, values: Int64, slot_stride: Int64, head_stride: Int64,
        tables: Int64, table_stride: Int64, first_blocks: Int64, lengths: Int64, live_rows: Int64, sinks: Int64,
        out: Int64, partials: Int64, counters: Int64, requests: Int32, key_heads: Int32, group: Int32,
        window: Int32, most_splits: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        ring = cute.arch.alloc_smem(Uint32, WARPS * self.warp_bytes // 4, alignment=16)
        arrived = cute.make_tensor(cute.arch.alloc_smem(Uint32, 1), cute.make_layout(1))
        thread, item = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        lane = thread % WARP
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live = vector.live_rows(live_rows, requests)
        first, before = Int32(0), Int32(0)
        # Items are (request, split, key head). 32 requests at a time, a lane for each, until the item's is among them.
        while first < requests:
            length = self.length(lengths, first + lane, live)
            splits, wanted = Int32(0), item // key_heads
            if first + lane < requests:
                splits = self.splits(length, window, most_splits)
            total = cute.arch.warp_redux_sync(splits, "add")
            if wanted >= before + total:
                first += WARP
                before += total
            else:
                start = before + self.exclusive_sum(splits, lane)
                owner = cute.arch.warp_redux_sync(vector.select(start <= wanted, lane, Int32(0)), "max")
                row, length = first + owner, cute.arch.shuffle_sync(length, owner)
                split = wanted - cute.arch.shuffle_sync(start, owner)
                splits = cute.arch.shuffle_sync(splits, owner)
                head = item % key_heads
                place = Int64(row) * key_heads + head
                low = vector.max_of(length - window, Int32(0))
                tiles = (length + (TILE - 1)) // TILE - low // TILE
                begin = low // TILE + split * tiles // splits
                end = low // TILE + (split + 1) * tiles // splits
                self.attend(
                    ring, q + (Int64(row) * q_stride + Int64(head) * group * self.head_dim) * self.dtype.itemsize,
                    keys + Int64(head) * head_stride * self.dtype.itemsize,
                    values + Int64(head) * head_stride * self.dtype.itemsize, slot_stride,
                    tables + (Int64(row) * table_stride - self.first_block(first_blocks, row)) * 4, low, length, begin,
                    end, group, scale,
                )  # fmt: skip
                cute.arch.sync_threads()
                self.finish(
                    ring, arrived, out + place * group * (self.head_dim * self.dtype.itemsize),
                    partials + place * most_splits * (self.rows * self.pitch * 4), counters + place * 4, sinks,
                    head * group, group, split, splits,
                )  # fmt: skip
                item += cute.arch.grid_dim()[0]

    def length(self, lengths: Any, row: Any, live: Any) -> Any:
        """Of a live request; 0 of any other."""
        known = vector.min_of(row, vector.max_of(live - 1, Int32(0)))
        return vector.select(row < live, vector.scalar(lengths + Int64(known) * 4, Int32)[0], Int32(0))

    def splits(self, length: Any, window: Any, most: Any) -> Any:
        """Blocks that share the keys of a request for one key head: they depend on nothing but its own length."""
        low = vector.max_of(length - window, Int32(0))
        tiles = (length + (TILE - 1)) // TILE - low // TILE
        return vector.max_of(vector.min_of(tiles // MIN_TILES, most), Int32(1))

    @cute.jit
    def first_block(self, first_blocks: Int64, row: Int32) -> Int64:
        """What block the request's table starts with."""
        first = Int32(0)
        if first_blocks != 0:
            first = vector.scalar(first_blocks + Int64(row) * 4, Int32)[0]
        return Int64(first)

    def exclusive_sum(self, value: Any, lane: Any) -> Any:
        """Of the lanes before this one."""
        total, offset = value, 1
        while offset < WARP:
            below = cute.arch.shuffle_sync_up(total, offset, mask_and_clamp=0)
            total = total + vector.select(lane >= offset, below, Int32(0))
            offset *= 2
        return total - value

    @cute.jit
    def attend(
        self, ring: cute.Pointer, q: Int64, keys: Int64, values: Int64, slot_stride: Int64, table: Int64, low: Int32,
        high: Int32, begin: Int32, end: Int32, group: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        """This warp's share of tiles `begin` … `end` − 1, keys `low` … `high` − 1 of them; into shared memory."""
        thread = cute.arch.thread_idx()[0]
        warp, lane = thread // WARP, thread % WARP
        mine = Uint32(ring.toint()) + Uint32(warp * self.warp_bytes)
        acc = cute.make_rmem_tensor(4 * (self.head_dim // 8), Float32)
        acc.fill(0.0)
        # For this lane's rows g and g + 8: the largest score, and its own part of the sum of weights.
        largest, weights = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        largest.fill(NOTHING)
        weights.fill(0.0)
        tile = begin + warp
        count = vector.max_of((end - tile + (WARPS - 1)) // WARPS, Int32(0))
        # All table entries are asked for before the first copy, which then waits once.
        bases = [self.tile_slot(table, tile + stage * WARPS, end) for stage in range(self.stages)]
        for stage in range_constexpr(self.stages - 1):
            self.copy_tile(
                mine + Uint32(stage * self.stage_bytes), keys, values, slot_stride, bases[stage], tile + stage * WARPS,
                low, high, end,
            )  # fmt: skip
        base = bases[-1]
        queries = self.load_queries(q, group, lane)
        for i in cutlass.range(count, unroll=1):
            ahead = tile + (i + (self.stages - 1)) * WARPS
            warp_matrix.await_copies(self.stages - 2)
            self.copy_tile(
                mine + Uint32((i + (self.stages - 1)) % self.stages * self.stage_bytes), keys, values, slot_stride,
                base, ahead, low, high, end,
            )  # fmt: skip
            base = self.tile_slot(table, ahead + WARPS, end)
            self.multiply(
                mine + Uint32(i % self.stages * self.stage_bytes) + Uint32(lane * 16), queries, acc, largest, weights,
                (tile + i * WARPS) * TILE, low, high, scale,
            )  # fmt: skip
        warp_matrix.await_copies(0)
        cute.arch.sync_warp()
        self.store_result(mine, acc, largest, weights, lane)

    @cute.jit
    def tile_slot(self, table: Int64, tile: Int32, end: Int32) -> Int64:
        """The cache slot of a tile's first key; any for a tile beyond the last."""
        block = Int32(0)
        if tile < end:
            block = vector.scalar(table + Int64(tile // self.block_tiles) * 4, Int32)[0]
        return (Int64(block) * self.block_tiles + tile % self.block_tiles) * TILE

    @cute.jit
    def copy_tile(
        self, stage: Uint32, keys: Int64, values: Int64, slot_stride: Int64, base: Int64, tile: Int32, low: Int32,
        high: Int32, end: Int32,
    ) -> None:  # fmt: skip
        """Start this lane's copies of a tile: a group of them, empty beyond the last tile."""
        if tile < end:
            lane = cute.arch.thread_idx()[0] % WARP
            g, j = lane // 4, lane % 4
            size, target = self.dtype.itemsize, stage + Uint32(lane * 16)
            row = slot_stride * size
            per_key = self.vectors // 2
            for i in range_constexpr(self.vectors):
                token = g + 8 * (i // per_key)
                source = keys + (base + token) * row + (i % per_key * 64 + j * 16)
                warp_matrix.copy_async_16b(target + Uint32(i * 512), source, self.counts(tile, token, low, high))
            per_value = self.vectors // 4
            for i in range_constexpr(self.vectors):
                token = 2 * j + (0, 1, 8, 9)[i // per_value]
                source = values + (base + token) * row + (i % per_value * 128 + g * 16)
                place = target + Uint32((self.vectors + i) * 512)
                warp_matrix.copy_async_16b(place, source, self.counts(tile, token, low, high))
        warp_matrix.commit_copies()

    def counts(self, tile: Any, token: Any, low: Any, high: Any) -> Any:
        """1 where the query sees this key, else 0."""
        position = tile * TILE + token
        return vector.select((position >= low) & (position < high), Uint32(1), Uint32(0))

    def load_queries(self, q: Any, group: Any, lane: Any) -> Any:
        """Rows g and g + 8 as fragments, in the order of dimensions that keys have; zeros beyond the group."""
        g, j = lane // 4, lane % 4
        halves = []
        for half in range(self.rows // 8):
            row = g + 8 * half
            address = q + Int64(vector.min_of(row, group - 1)) * (self.head_dim * self.dtype.itemsize) + j * 16
            words = []
            for i in range(self.vectors // 2):
                loaded = vector.load(address + i * 64, Uint32, 4, 16)
                words += [vector.select(row < group, loaded[k], Uint32(0)) for k in range(4)]
            halves.append(words)
        return halves

    def fragments(self, halves: Any, step: int) -> Any:
        """a of product step `step` from words of rows g and g + 8."""
        zero = Uint32(0)
        low, high = (halves[0][2 * step + i] for i in range(2))
        if self.wide_group:
            return [low, halves[1][2 * step], high, halves[1][2 * step + 1]]
        return [low, zero, high, zero]

    @cute.jit
    def multiply(
        self, stage: Uint32, queries: list[Any], acc: cute.Tensor, largest: cute.Tensor, weights: cute.Tensor,
        position: Int32, low: Int32, high: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        """One tile: scores, weights, and the weighted sum of values."""
        j = cute.arch.thread_idx()[0] % 4
        per_key = self.vectors // 2
        scores = []
        for n in range_constexpr(2):
            c = [Float32(0.0)] * 4
            for i in range_constexpr(per_key):
                words = warp_matrix.load_shared_16b(stage + Uint32((n * per_key + i) * 512))
                for k in range_constexpr(2):
                    c = warp_matrix.multiply_add(c, self.fragments(queries, 2 * i + k), words[2 * k : 2 * k + 2])
            scores.append(c)
        halves, factors = [], []
        for half in range_constexpr(self.rows // 8):
            values = []
            for n in range_constexpr(2):
                for k in range_constexpr(2):
                    at = position + (8 * n + 2 * j + k)
                    seen = (at >= low) & (at < high)
                    values.append(vector.select(seen, scores[n][2 * half + k] * scale, Float32(-math.inf)))
            top = cute.arch.fmax(cute.arch.fmax(values[0], values[1]), cute.arch.fmax(values[2], values[3]))
            top = cute.arch.fmax(top, largest[half])
            for offset in (1, 2):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
            factor = _exp2(largest[half] - top)
            shares = [_exp2(value - top) for value in values]
            weights[half] = weights[half] * factor + ((shares[0] + shares[1]) + (shares[2] + shares[3]))
            largest[half] = top
            factors.append(factor)
            halves.append([ptx.to_bf16x2(shares[0], shares[1]), ptx.to_bf16x2(shares[2], shares[3])])
        self.add_values(stage + Uint32(self.vectors * 512), self.fragments(halves, 0), factors, acc)

    def add_values(self, stage: Any, shares: Any, factors: Any, acc: Any) -> None:
        """acc · factor + shares · values. Column g of product n is dimension 8g + n % 8 of the n // 8-th 64."""
        per_value = self.vectors // 4
        for block in range(per_value):
            tokens = [warp_matrix.load_shared_16b(stage + Uint32((t * per_value + block) * 512)) for t in range(4)]
            for n in range(8):
                selector = warp_matrix.HIGH_HALVES if n % 2 else warp_matrix.LOW_HALVES
                words = [
                    warp_matrix.permute(tokens[2 * k][n // 2], tokens[2 * k + 1][n // 2], selector) for k in range(2)
                ]
                at = 4 * (8 * block + n)
                c = [acc[at + i] * factors[i // 2] if i // 2 < len(factors) else Float32(0.0) for i in range(4)]
                for i, value in enumerate(warp_matrix.multiply_add(c, shares, words)):
                    acc[at + i] = value

    def store_result(self, mine: Any, acc: Any, largest: Any, weights: Any, lane: Any) -> None:
        """Sums, largest scores and sums of weights of this warp, a row each query head."""
        g, j = lane // 4, lane % 4
        for half in range(self.rows // 8):
            row = mine + Uint32((g + 8 * half) * (self.pitch * 4))
            total = vector.group_sum(weights[half], 4)
            for block in range(self.head_dim // 64):
                for k in range(2):
                    for first in (0, 4):
                        words = [acc[4 * (8 * block + first + n) + 2 * half + k] for n in range(4)]
                        warp_matrix.store_shared_16b(
                            row + Uint32(block * 256) + Uint32((2 * j + k) * 32) + Uint32(first * 4), words
                        )
            # All four lanes of a row have the same; they write the same.
            last = [largest[half], total, total, total]
            warp_matrix.store_shared_16b(row + Uint32(self.head_dim * 4), last)

    @cute.jit
    def finish(
        self, ring: cute.Pointer, arrived: cute.Tensor, out: Int64, partials: Int64, counter: Int64, sinks: Int64,
        first_head: Int32, group: Int32, split: Int32, splits: Int32,
    ) -> None:  # fmt: skip
        """Merge the warps' results, and those of all splits if this block is the last of them.

        counter: u32, 0 between launches. Every block of a request's splits adds 1 after it has written its result
        (release), and whoever comes last has thereby seen the others' (acquire) and sets it back.
        """
        thread = cute.arch.thread_idx()[0]
        row, column = thread * self.each // self.head_dim, thread * self.each % self.head_dim
        state = self.merge(
            [self.read_shared(ring, warp, row, column) for warp in range(WARPS)], self.nothing(), [True] * WARPS
        )
        sink = Float32(NOTHING)
        if (sinks != 0) & (row < group):
            sink = vector.scalar(sinks + Int64(first_head + row) * 4, Float32)[0] * Float32(1 / math.log(2))
        target = out + Int64(row * self.head_dim + column) * self.dtype.itemsize
        mine = partials + Int64(row * self.pitch) * 4
        if splits == 1:
            if row < group:
                self.write(target, state, sink)
            cute.arch.sync_threads()
        else:
            if row < group:
                self.write_partial(mine + Int64(split) * (self.rows * self.pitch * 4), column, state)
            cute.arch.sync_threads()
            if thread == 0:
                arrived[0] = ptx.fetch_add(counter, Uint32(1), "gpu")
            cute.arch.sync_threads()
            if arrived[0] == Uint32(splits - 1):
                if row < group:
                    self.write(target, self.merge_splits(mine, column, splits), sink)
                if thread == 0:
                    ptx.store_relaxed(counter, Uint32(0), "gpu")

    def nothing(self) -> Any:
        """(largest score, sum of weights, sums) of no keys."""
        return Float32(NOTHING), Float32(0.0), [Float32(0.0)] * self.each

    def merge(self, parts: Any, state: Any, valid: Any) -> Any:
        """`state` and then `parts`, one after another."""
        largest, weights, sums = state
        for (other, more, added), counts in zip(parts, valid, strict=True):
            top = cute.arch.fmax(largest, other)
            factor = vector.select(counts, _exp2(other - top), Float32(0.0))
            top = vector.select(counts, top, largest)
            keep = _exp2(largest - top)
            weights = weights * keep + more * factor
            sums = [a * keep + b * factor for a, b in zip(sums, added, strict=True)]
            largest = top
        return largest, weights, sums

    def read_shared(self, ring: Any, warp: int, row: Any, column: Any) -> Any:
        """A warp's result for this thread's dimensions."""
        place = Uint32(ring.toint()) + Uint32(warp * self.warp_bytes) + Uint32(row * (self.pitch * 4))
        sums = [
            ptx.from_bits(word)
            for i in range(0, self.each, 4)
            for word in warp_matrix.load_shared_16b(place + Uint32(column * 4) + Uint32(i * 4))
        ]
        last = warp_matrix.load_shared_16b(place + Uint32(self.head_dim * 4))
        return ptx.from_bits(last[0]), ptx.from_bits(last[1]), sums

    def read_partial(self, partial: Any, column: Any) -> Any:
        """Another block's result for this thread's dimensions."""
        sums = [
            ptx.from_bits(word)
            for i in range(0, self.each, 4)
            for word in ptx.load_16b(partial + Int64(column + i) * 4)
        ]
        last = ptx.load_16b(partial + self.head_dim * 4)
        return ptx.from_bits(last[0]), ptx.from_bits(last[1]), sums

    def write_partial(self, partial: Any, column: Any, state: Any) -> None:
        largest, weights, sums = state
        for i in range(0, self.each, 4):
            ptx.store_16b(partial + Int64(column + i) * 4, tuple(ptx.bits(value) for value in sums[i : i + 4]))
        last = ptx.bits(weights)
        # Every thread of the row writes the same.
        ptx.store_16b(partial + self.head_dim * 4, (ptx.bits(largest), last, last, last))

    @cute.jit
    def merge_splits(self, partials: Int64, column: Int32, splits: Int32) -> Any:
        """All splits in their order."""
        batch = AT_ONCE // self.each
        size = self.rows * self.pitch * 4
        sums = cute.make_rmem_tensor(self.each, Float32)
        sums.fill(0.0)
        largest, weights = Float32(NOTHING), Float32(0.0)
        for first in range(0, splits, batch):
            places = [vector.min_of(first + i, splits - 1) for i in range(batch)]
            parts = [self.read_partial(partials + Int64(place) * size, column) for place in places]
            state = (largest, weights, [sums[i] for i in range(self.each)])
            largest, weights, added = self.merge(parts, state, [first + i < splits for i in range(batch)])
            for i in range_constexpr(self.each):
                sums[i] = added[i]
        return largest, weights, [sums[i] for i in range(self.each)]

    def write(self, address: Any, state: Any, sink: Any) -> None:
        """The sums over all weights, the sink's among them."""
        largest, weights, sums = state
        top = cute.arch.fmax(largest, sink)
        keep = _exp2(largest - top)
        total = weights * keep + _exp2(sink - top)
        share = keep * cute.arch.rcp_approx(total)
        kind = TYPES[self.dtype]
        words = [(value * share).to(kind) for value in sums]
        vector.store_words(address, words, kind, min(16, self.each * self.dtype.itemsize))


def _exp2(x: Any) -> Any:
    return cute.math.exp2(x, fastmath=True)
