"""Expert choice, a warp a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import (
    TYPES,
    Float32,
    Int32,
    Int64,
    Stream,
    Uint32,
    Uint64,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.routing import Score
from rose_dist.kernels.sorting_network import comparators
from rose_dist.kernels.variants import WARP, RouterShape

MAX_UNROLLED = 8
"""Rounds up to which the choice is unrolled; more of them only take long to compile."""


@cache
def launcher(
    arch: Arch, dtype: torch.dtype, experts: int, k: int, score: Score, groups: int, top_groups: int, bias: bool,
    counts: bool, load: bool, shape: RouterShape, vector_bytes: int,
) -> jit.Launcher:  # fmt: skip
    return jit.load(Route(arch, dtype, experts, k, score, groups, top_groups, bias, counts, shape, vector_bytes, load))


@dataclass(frozen=True)
class Route(jit.Kernel):
    """A warp a token. A lane keeps the keys of some neighbouring experts in registers, best first; k rounds of a warp
    maximum choose, and lane i computes the weight of choice i.

    A choice also adds to its expert's load, if that is given.

    Counts of few tokens: one cluster of blocks, a warp for every token, adds into the shared memory of its first block,
    which writes them. Of many: every block adds its own histogram to counts that a launch before has zeroed.
    """

    dtype: torch.dtype
    experts: int
    k: int
    score: Score
    groups: int
    top_groups: int
    bias: bool
    counts: bool
    shape: RouterShape
    vector_bytes: int
    adds_load: bool = False

    @property
    def per_lane(self) -> int:
        """Experts a lane."""
        return -(-self.experts // WARP)

    @property
    def unique_keys(self) -> bool:
        """bf16 preferences leave the lower half of a key to the expert, so that one maximum names it."""
        return self.dtype is torch.bfloat16 and self.score is not Score.SIGMOID

    @cute.jit
    def __call__(
        self, logits: Int64, stride: Int64, bias: Int64, ids: Int64, weights: Int64, counts: Int64, load: Int64,
        live_rows: Int64, tokens: Int32, blocks: Int32, scale: Float32, stream: Stream,
    ) -> None:  # fmt: skip
        threads = self.shape.warps * WARP
        # A cluster of one would be launched as a cluster, too.
        cluster = [self.shape.cluster, 1, 1] if self.shape.cluster else None
        if const_expr(self.counts and not self.shape.cluster):
            self.zero(counts).launch(grid=[1, 1, 1], block=[self.per_lane * WARP, 1, 1], stream=stream, use_pdl=True)
        self.kernel(logits, stride, bias, ids, weights, counts, load, live_rows, tokens, scale).launch(
            grid=[blocks, 1, 1], block=[threads, 1, 1], cluster=cluster, stream=stream, use_pdl=True
        )

    @cute.kernel
    def zero(self, counts: Int64) -> None:
        thread = cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if thread < self.experts:
            vector.scalar(counts + Int64(thread) * 4, Int32)[0] = Int32(0)

    @cute.kernel
    def kernel(
        self, logits: Int64, stride: Int64, bias: Int64, ids: Int64, weights: Int64, counts: Int64, load: Int64,
        live_rows: Int64, tokens: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        blocks = cute.arch.grid_dim()[0]
        warp, lane = thread // WARP, thread % WARP
        threads = self.shape.warps * WARP
        histogram = cute.make_tensor(
            cute.arch.alloc_smem(Int32, self.experts if self.counts else 1), cute.make_layout(self.experts)
        )
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.counts):
            for first in range_constexpr(0, self.experts, threads):
                if thread + first < self.experts:
                    histogram[thread + first] = Int32(0)
            self.arrive()
        cute.arch.griddepcontrol_wait()
        live = vector.live_rows(live_rows, tokens)
        if const_expr(self.counts and self.shape.cluster > 0):
            # At most one token a warp, neighbours on different blocks. The zeroes are awaited after the choice only.
            chosen = self.serve(
                warp * blocks + block, tokens, live, logits, stride, bias, ids, weights, load, scale, lane
            )
            self.await_all()
            if chosen >= 0:
                self.count(histogram, chosen)
        else:
            if const_expr(self.counts):
                self.await_all()
            for token in range(warp * blocks + block, tokens, blocks * self.shape.warps):
                chosen = self.serve(token, tokens, live, logits, stride, bias, ids, weights, load, scale, lane)
                if const_expr(self.counts):
                    if chosen >= 0:
                        self.count(histogram, chosen)
        if const_expr(self.counts):
            self.write_counts(histogram, counts, thread, block)

    @cute.jit
    def serve(
        self, token: Int32, tokens: Int32, live: Int32, logits: Int64, stride: Int64, bias: Int64, ids: Int64,
        weights: Int64, load: Int64, scale: Float32, lane: Int32,
    ) -> Int32:  # fmt: skip
        """Route one token; returns what this lane has to count, −1 for nothing."""
        chosen = Int32(-1)
        if token < tokens:
            chosen, weight = self.choose(logits + Int64(token) * stride * self.dtype.itemsize, bias, lane)
            if token >= live:
                chosen, weight = Int32(-1), Float32(0.0)
            if lane < self.k:
                place = (Int64(token) * self.k + lane) * 4
                vector.scalar(ids + place, Int32)[0] = chosen
                vector.scalar(weights + place, Float32)[0] = weight * scale
                if const_expr(self.adds_load):
                    if chosen >= 0:
                        ptx.add_relaxed_u64(load + Int64(chosen) * 8, Uint64(1), "gpu")
            else:
                chosen = Int32(-1)
        return chosen

    def arrive(self) -> None:
        """Say that this thread's shared memory accesses so far are done."""
        if self.shape.cluster > 1:
            cute.arch.cluster_arrive()

    def await_all(self) -> None:
        """Wait for the arrival of all threads of the cluster, or of the block where there is none."""
        if self.shape.cluster > 1:
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def count(self, histogram: Any, expert: Any) -> None:
        """One more token for an expert."""
        place = Uint32(histogram.iterator.toint()) + Uint32(expert) * Uint32(4)
        if self.shape.cluster > 1:
            ptx.cluster_add_shared(place, Uint32(0), Uint32(1))
        else:
            ptx.add_shared(place, Uint32(1))

    @cute.jit
    def write_counts(self, histogram: cute.Tensor, counts: Int64, thread: Int32, block: Int32) -> None:
        """The histogram to global memory: stored by the cluster's first block, or added by every block."""
        self.arrive()
        self.await_all()
        for first in range_constexpr(0, self.experts, self.shape.warps * WARP):
            expert = thread + first
            if expert < self.experts:
                place = counts + Int64(expert) * 4
                if const_expr(self.shape.cluster > 0):
                    if block == 0:
                        vector.scalar(place, Int32)[0] = histogram[expert]
                elif histogram[expert] != 0:
                    ptx.add_relaxed(place, Uint32(histogram[expert]), "gpu")

    @cute.jit
    def choose(self, logits: Int64, bias: Int64, lane: Int32) -> Any:
        """This lane's choice and weight; lanes from k on return what no one reads."""
        values = self.load(logits, self.dtype, lane)
        preferences = values
        if const_expr(self.score is Score.SIGMOID):
            preferences = [_sigmoid(value) for value in values]
        if const_expr(self.bias):
            biases = self.load(bias, torch.float32, lane)
            preferences = [a + b for a, b in zip(preferences, biases, strict=True)]
        kind = Uint32 if const_expr(self.unique_keys) else Uint64
        keys = cute.make_rmem_tensor(self.per_lane, kind)
        for j in range_constexpr(self.per_lane):
            exists = lane * self.per_lane + j < self.experts
            keys[j] = vector.select(exists, self.key(preferences[j], lane * self.per_lane + j), kind(0))
        for a, b in comparators(self.per_lane):
            keys[a], keys[b] = self.in_order(keys[a], keys[b])
        if const_expr(self.groups > 1):
            eligible = self.group_eligible(preferences, lane)
            for j in range_constexpr(self.per_lane):
                keys[j] = vector.select(eligible, keys[j], kind(0))
        chosen = Int32(0)
        if const_expr(self.k <= MAX_UNROLLED):
            for i in range_constexpr(self.k):
                chosen = self.round(keys, lane, i, chosen)
        else:
            for i in cutlass.range(self.k, unroll=1):
                chosen = self.round(keys, lane, i, chosen)
        return chosen, self.weigh(self.load_one(logits, chosen), values, lane)

    def key(self, preference: Any, expert: Any) -> Any:
        """Orders experts as they are preferred, equal ones by the lower number; never 0."""
        key = _key(preference)
        if self.unique_keys:
            return (key & Uint32(0xFFFF0000)) | (Uint32(0xFFFF) - Uint32(expert))
        return Uint64(key) << Uint64(32) | Uint64(~Uint32(expert))

    def in_order(self, a: Any, b: Any) -> Any:
        """Two keys, the better one first."""
        best = vector.max_of(a, b)
        # A minimum of 64 bits would be compared once more.
        return best, vector.min_of(a, b) if self.unique_keys else a ^ b ^ best

    def round(self, keys: Any, lane: Any, i: Any, chosen: Any) -> Any:
        """Choose the warp's best key, take it from its lane, and keep its expert if this is lane `i`."""
        if self.unique_keys:
            best = cute.arch.warp_redux_sync(keys[0], "umax")
            mine, expert = keys[0] == best, Uint32(0xFFFF) - (best & Uint32(0xFFFF))
        else:
            high, low = Uint32(keys[0] >> Uint64(32)), Uint32(keys[0])
            low = vector.select(high == cute.arch.warp_redux_sync(high, "umax"), low, Uint32(0))
            best = cute.arch.warp_redux_sync(low, "umax")
            mine, expert = low == best, ~best
        for j in range(self.per_lane):
            after = keys[j + 1] if j + 1 < self.per_lane else type(keys[j])(0)
            keys[j] = vector.select(mine, after, keys[j])
        return vector.select(lane == i, Int32(expert), chosen)

    def load(self, row: Any, dtype: Any, lane: Any) -> Any:
        """This lane's values of a row of experts, as fp32; anything beyond the last expert."""
        size = dtype.itemsize
        if self.experts % WARP == 0:
            address = row + Int64(lane) * (self.per_lane * size)
            loaded = vector.load(address, TYPES[dtype], self.per_lane, self.vector_bytes).to(Float32)
            return [loaded[j] for j in range(self.per_lane)]
        indices = [vector.min_of(lane * self.per_lane + j, Int32(self.experts - 1)) for j in range(self.per_lane)]
        return [vector.scalar(row + Int64(index) * size, TYPES[dtype])[0].to(Float32) for index in indices]

    def load_one(self, row: Any, expert: Any) -> Any:
        """One logit of a row, as fp32."""
        return vector.scalar(row + Int64(expert) * self.dtype.itemsize, TYPES[self.dtype])[0].to(Float32)

    def group_eligible(self, preferences: Any, lane: Any) -> Any:
        """Whether this lane's group is among the best; a group is a run of lanes."""
        lanes = WARP // self.groups
        first, second = preferences[0], Float32(-math.inf)
        for value in preferences[1:]:
            second = cute.arch.fmax(second, cute.arch.fmin(first, value))
            first = cute.arch.fmax(first, value)
        offset = lanes // 2
        while offset:
            other_first = cute.arch.shuffle_sync_bfly(first, offset=offset)
            other_second = cute.arch.shuffle_sync_bfly(second, offset=offset)
            second = cute.arch.fmax(cute.arch.fmin(first, other_first), cute.arch.fmax(second, other_second))
            first = cute.arch.fmax(first, other_first)
            offset //= 2
        score = first + second if self.experts > self.groups else first
        rank = Int32(0)
        for group in range(self.groups):
            other = cute.arch.shuffle_sync(score, group * lanes)
            ahead = (other > score) | ((other == score) & (Int32(group) < lane // lanes))
            rank = rank + vector.select(ahead, Int32(1), Int32(0))
        return rank < self.top_groups

    def weigh(self, logit: Any, values: Any, lane: Any) -> Any:
        """This lane's weight from its chosen logit."""
        used = lane < self.k
        if self.score is Score.SIGMOID:
            share = vector.select(used, _sigmoid(logit), Float32(0.0))
            return share * cute.arch.rcp_approx(vector.group_sum(share, WARP) + Float32(1e-20))
        largest = cute.arch.shuffle_sync(logit, 0)
        share = vector.select(used, _exp(logit - largest), Float32(0.0))
        if self.score is Score.SOFTMAX_OF_CHOSEN:
            return share * cute.arch.rcp_approx(vector.group_sum(share, WARP))
        total = Float32(0.0)
        for j in range(self.per_lane):
            exists = lane * self.per_lane + j < self.experts
            total = total + vector.select(exists, _exp(values[j] - largest), Float32(0.0))
        return share * cute.arch.rcp_approx(vector.group_sum(total, WARP))


def _key(value: Any) -> Any:
    """A u32 that orders as fp32 values do, NaN below all numbers, and is never 0."""
    bits = ptx.bits(value)
    ordered = vector.select(Int32(bits) < 0, ~bits, bits | Uint32(0x80000000))
    return vector.select((bits & Uint32(0x7FFFFFFF)) > Uint32(0x7F800000), Uint32(1), ordered)


def _exp(x: Any) -> Any:
    return cute.math.exp2(x * Float32(1.0 / math.log(2.0)), fastmath=True)


def _sigmoid(x: Any) -> Any:
    return cute.arch.rcp_approx(Float32(1.0) + _exp(Float32(0.0) - x))
