"""Expert choice: router logits become the k experts of every token and their weights."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import (
    TYPES, Float32, Int32, Int64, Stream, Uint32, const_expr, cute, cutlass, range_constexpr,
)  # fmt: skip
from rose_dist.kernels.variants import WARP, RouterShape, router_shape

MAX_EXPERTS = 1024
MAX_K = 32
MAX_UNROLLED = 8
"""Rounds up to which the choice is unrolled; more of them only take long to compile."""


class Score(enum.Enum):
    """How logits become weights."""

    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """Softmax over the k chosen logits alone (GPT-OSS); the same as softmax over all, renormalised (Qwen3)."""
    SOFTMAX = "softmax"
    """Softmax over all logits, the chosen ones' shares as they are."""
    SIGMOID = "sigmoid"
    """Sigmoid of each chosen logit over their sum (DeepSeek-V3); the choice goes by sigmoid + bias."""


@dataclass(frozen=True)
class Router:
    """A model's routing rule.

    groups, top_groups: DeepSeek's node limit. Experts stand in `groups` equal groups; only the `top_groups` with the
    largest sum of two best scores are eligible. `scale` multiplies the weights.
    """

    k: int
    score: Score = Score.SOFTMAX_OF_CHOSEN
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def check(self, experts: int) -> None:
        """Raise `KernelArgumentError` if the rule can't be applied to so many experts."""
        if not 1 <= self.k <= min(experts, MAX_K):
            raise checks.fail("k", f"is {self.k}; must be in 1 … {min(experts, MAX_K)} (experts, at most {MAX_K})")
        if experts > MAX_EXPERTS:
            raise checks.fail("logits", f"{experts} experts; at most {MAX_EXPERTS}")
        if self.groups == 1:
            return
        if self.score is not Score.SIGMOID or experts % WARP or WARP % self.groups:
            raise checks.fail(
                "groups", f"{self.groups} groups need sigmoid scores, a power of two up to {WARP} and experts % 32 = 0"
            )
        if not 1 <= self.top_groups <= self.groups or self.top_groups * (experts // self.groups) < self.k:
            raise checks.fail("top_groups", f"is {self.top_groups}; must be in 1 … {self.groups} and hold k experts")


@dataclass(frozen=True)
class Routing:
    """What each token goes to.

    ids: int32 [tokens, k], best first, ties by the lower id; −1 for dead tokens.
    weights: fp32 [tokens, k]; 0 for dead tokens.
    counts: int32 [experts], how often each expert was chosen; None if not asked for.
    """

    ids: Tensor
    weights: Tensor
    counts: Tensor | None = None


def topk_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of a token, weighted by the softmax over those k alone (GPT-OSS).

    Args:
        logits: [tokens, experts].
        k: experts a token, 1 ≤ k ≤ experts.

    Returns:
        ids: int32 [tokens, k], best first.
        weights: fp32 [tokens, k], each row sums to 1.
    """
    if logits.is_cuda:
        routing = route(logits, Router(k))
        return routing.ids, routing.weights
    values, ids = torch.topk(logits, k, dim=-1)
    return ids.to(torch.int32), torch.softmax(values.float(), dim=-1)


def route(
    logits: Tensor, router: Router, *, bias: Tensor | None = None, counts: bool = False, live_rows: Tensor | None = None
) -> Routing:
    """Apply a routing rule.

    Args:
        logits: [tokens, experts], fp32, bf16 or fp16. A NaN is never preferred to a number.
        bias: fp32 [experts], added to sigmoid scores for the choice alone.
        counts: whether to count tokens an expert.
        live_rows: int32 [1]; tokens from there on are dead.
    """
    checks.shape("logits", logits, None, None)
    router.check(logits.shape[1])
    if bias is not None:
        checks.shape("bias", bias, logits.shape[1])
        checks.dtype("bias", bias, torch.float32)
        checks.same_device("bias", bias, logits.device)
        if router.score is not Score.SIGMOID:
            raise checks.fail("bias", "is only for sigmoid scores")
    return _launch(logits, router, bias, counts, live_rows) if logits.is_cuda else reference(
        logits, router, bias=bias, counts=counts, live_rows=live_rows
    )  # fmt: skip


def reference(
    logits: Tensor, router: Router, *, bias: Tensor | None = None, counts: bool = False, live_rows: Tensor | None = None
) -> Routing:
    """`route` in torch, fp32."""
    tokens, experts = logits.shape
    wide = logits.float()
    scores = wide.sigmoid() if router.score is Score.SIGMOID else wide
    choice = scores if bias is None else scores + bias
    if router.groups > 1:
        grouped = choice.view(tokens, router.groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        order = best.sort(descending=True, stable=True, dim=-1).indices[:, : router.top_groups]
        eligible = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
        choice = choice.masked_fill(~eligible.repeat_interleave(experts // router.groups, 1), -math.inf)
    ranked = choice.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    ids = ranked.sort(descending=True, stable=True, dim=-1).indices[:, : router.k]
    chosen = scores.gather(1, ids)
    if router.score is Score.SOFTMAX_OF_CHOSEN:
        weights = chosen.softmax(-1)
    elif router.score is Score.SOFTMAX:
        weights = wide.softmax(-1).gather(1, ids)
    else:
        weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    weights = weights * router.scale
    ids = ids.to(torch.int32)
    if live_rows is not None:
        live = int(live_rows)
        ids[live:], weights[live:] = -1, 0.0
    hits = torch.bincount(ids[ids >= 0].flatten().long(), minlength=experts).to(torch.int32) if counts else None
    return Routing(ids, weights, hits)


def _launch(
    logits: Tensor, router: Router, bias: Tensor | None, counts: bool, live_rows: Tensor | None
) -> Routing:
    checks.dtype("logits", logits, torch.float32, torch.bfloat16, torch.float16)
    checks.rows("logits", logits, align=logits.element_size())
    checks.live_rows(live_rows, logits.device)
    tokens, experts = logits.shape
    ids = torch.empty(tokens, router.k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, router.k, dtype=torch.float32, device=logits.device)
    hits = torch.empty(experts, dtype=torch.int32, device=logits.device) if counts else None
    device = launch.device(logits)
    if tokens == 0:
        return Routing(ids, weights, None if hits is None else hits.zero_())
    shape = router_shape(tokens, counts)
    steps = (logits.data_ptr(), logits.stride(0) * logits.element_size())
    vector_bytes = vector.widest(device.arch, 16, *steps)
    launcher = _launcher(
        device.arch, logits.dtype, experts, router.k, router.score, router.groups, router.top_groups,
        bias is not None, counts, shape, vector_bytes,
    )  # fmt: skip
    blocks = shape.cluster or min(-(-tokens // shape.warps), device.sms * 4)
    launch.run(
        launcher, logits, logits, logits.stride(0), bias, ids, weights, hits, live_rows, tokens, blocks, router.scale
    )
    return Routing(ids, weights, hits)


@cache
def _launcher(
    arch: Arch, dtype: torch.dtype, experts: int, k: int, score: Score, groups: int, top_groups: int, bias: bool,
    counts: bool, shape: RouterShape, vector_bytes: int,
) -> jit.Launcher:  # fmt: skip
    return jit.load(Route(arch, dtype, experts, k, score, groups, top_groups, bias, counts, shape, vector_bytes))


@dataclass(frozen=True)
class Route(jit.Kernel):
    """A warp a token. A lane keeps the keys of some neighbouring experts in registers; k rounds of a warp maximum
    choose, and lane i computes the weight of choice i.

    Counts of few tokens: one cluster of blocks adds into the shared memory of its first block, which writes them. Of
    many: every block adds its own histogram to counts that a launch before has zeroed.
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
        self, logits: Int64, stride: Int64, bias: Int64, ids: Int64, weights: Int64, counts: Int64, live_rows: Int64,
        tokens: Int32, blocks: Int32, scale: Float32, stream: Stream,
    ):  # fmt: skip
        threads = self.shape.warps * WARP
        cluster = [max(self.shape.cluster, 1), 1, 1]
        if const_expr(self.counts and not self.shape.cluster):
            self.zero(counts).launch(grid=[1, 1, 1], block=[MAX_EXPERTS, 1, 1], stream=stream, use_pdl=True)
        self.kernel(logits, stride, bias, ids, weights, counts, live_rows, tokens, scale).launch(
            grid=[blocks, 1, 1], block=[threads, 1, 1], cluster=cluster, stream=stream, use_pdl=True
        )

    @cute.kernel
    def zero(self, counts: Int64):
        thread = cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        if thread < self.experts:
            vector.scalar(counts + Int64(thread) * 4, Int32)[0] = Int32(0)

    @cute.kernel
    def kernel(
        self, logits: Int64, stride: Int64, bias: Int64, ids: Int64, weights: Int64, counts: Int64, live_rows: Int64,
        tokens: Int32, scale: Float32,
    ):  # fmt: skip
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        blocks = cute.arch.grid_dim()[0]
        warp, lane = thread // WARP, thread % WARP
        threads = self.shape.warps * WARP
        histogram = cute.make_tensor(
            cute.arch.alloc_smem(Int32, self.experts if self.counts else 1), cute.make_layout(self.experts)
        )
        if const_expr(self.counts):
            for first in range_constexpr(0, self.experts, threads):
                if thread + first < self.experts:
                    histogram[thread + first] = Int32(0)
            self.arrive()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live = vector.live_rows(live_rows, tokens)
        if const_expr(self.counts and self.shape.cluster > 0):
            # At most one token a warp, neighbours on different blocks. The zeroes are awaited after the choice only.
            chosen = self.serve(warp * blocks + block, tokens, live, logits, stride, bias, ids, weights, scale, lane)
            self.await_all()
            if chosen >= 0:
                self.count(histogram, chosen)
        else:
            if const_expr(self.counts):
                self.await_all()
            for token in range(warp * blocks + block, tokens, blocks * self.shape.warps):
                chosen = self.serve(token, tokens, live, logits, stride, bias, ids, weights, scale, lane)
                if const_expr(self.counts):
                    if chosen >= 0:
                        self.count(histogram, chosen)
        if const_expr(self.counts):
            self.arrive()
            self.await_all()
            for first in range_constexpr(0, self.experts, threads):
                expert = thread + first
                if expert < self.experts:
                    self.write_count(histogram, counts, expert, block)

    @cute.jit
    def serve(
        self, token: Int32, tokens: Int32, live: Int32, logits: Int64, stride: Int64, bias: Int64, ids: Int64,
        weights: Int64, scale: Float32, lane: Int32,
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
            else:
                chosen = Int32(-1)
        return chosen

    def arrive(self):  # type: ignore[no-untyped-def]
        """Say that this thread's shared memory accesses so far are done."""
        if self.shape.cluster > 1:
            cute.arch.cluster_arrive()

    def await_all(self):  # type: ignore[no-untyped-def]
        """Wait for the arrival of all threads of the cluster, or of the block where there is none."""
        if self.shape.cluster > 1:
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def count(self, histogram, expert):  # type: ignore[no-untyped-def]
        """One more token for an expert."""
        place = Uint32(histogram.iterator.toint()) + Uint32(expert) * Uint32(4)
        if self.shape.cluster > 1:
            ptx.cluster_add_shared(place, Uint32(0), Uint32(1))
        else:
            ptx.add_shared(place, Uint32(1))

    @cute.jit
    def write_count(self, histogram: cute.Tensor, counts: Int64, expert: Int32, block: Int32) -> None:
        """A histogram's entry to global memory: stored by the first block, or added by every block."""
        place = counts + Int64(expert) * 4
        if const_expr(self.shape.cluster > 0):
            if block == 0:
                vector.scalar(place, Int32)[0] = histogram[expert]
        else:
            if histogram[expert] != 0:
                ptx.add_relaxed(place, Uint32(histogram[expert]), "gpu")

    @cute.jit
    def choose(self, logits: Int64, bias: Int64, lane: Int32):
        """This lane's choice and weight; lanes from k on return what no one reads."""
        values = self.load(logits, self.dtype, lane)
        preferences = values
        if const_expr(self.score is Score.SIGMOID):
            preferences = [_sigmoid(value) for value in values]
        if const_expr(self.bias):
            biases = self.load(bias, torch.float32, lane)
            preferences = [a + b for a, b in zip(preferences, biases, strict=True)]
        keys = cute.make_rmem_tensor(self.per_lane, Uint32)
        for j in range_constexpr(self.per_lane):
            exists = lane * self.per_lane + j < self.experts
            key = _key(preferences[j])
            if const_expr(self.unique_keys):
                key = (key & Uint32(0xFFFF0000)) | (Uint32(0xFFFF) - Uint32(lane * self.per_lane + j))
            keys[j] = vector.select(exists, key, Uint32(0))
        if const_expr(self.groups > 1):
            eligible = self.group_eligible(preferences, lane)
            for j in range_constexpr(self.per_lane):
                keys[j] = vector.select(eligible, keys[j], Uint32(0))
        chosen = Int32(0)
        if const_expr(self.k <= MAX_UNROLLED):
            for i in range_constexpr(self.k):
                chosen = self.round(keys, lane, i, chosen)
        else:
            for i in cutlass.range(self.k, unroll=1):
                chosen = self.round(keys, lane, i, chosen)
        logit = vector.scalar(logits + Int64(chosen) * self.dtype.itemsize, TYPES[self.dtype])[0].to(Float32)
        return chosen, self.weigh(logit, values, lane)

    def round(self, keys, lane, i, chosen):  # type: ignore[no-untyped-def]
        """Choose the warp's best key, strike it out, and keep it if this is lane `i`."""
        best = keys[0]
        for j in range(1, self.per_lane):
            best = vector.max_u32(best, keys[j])
        best = cute.arch.warp_redux_sync(best, "umax")
        if self.unique_keys:
            for j in range(self.per_lane):
                keys[j] = vector.select(keys[j] == best, Uint32(0), keys[j])
            return vector.select(lane == i, Int32(Uint32(0xFFFF) - (best & Uint32(0xFFFF))), chosen)
        mine = Uint32(self.experts)
        for j in reversed(range(self.per_lane)):
            mine = vector.select(keys[j] == best, Uint32(lane * self.per_lane + j), mine)
        winner = cute.arch.warp_redux_sync(mine, "umin")
        for j in range(self.per_lane):
            keys[j] = vector.select(Uint32(lane * self.per_lane + j) == winner, Uint32(0), keys[j])
        return vector.select(lane == i, Int32(winner), chosen)

    def load(self, row, dtype, lane):  # type: ignore[no-untyped-def]
        """This lane's values of a row of experts, as fp32; anything beyond the last expert."""
        size = dtype.itemsize
        if self.experts % WARP == 0:
            address = row + Int64(lane) * (self.per_lane * size)
            loaded = vector.load(address, TYPES[dtype], self.per_lane, self.vector_bytes).to(Float32)
            return [loaded[j] for j in range(self.per_lane)]
        indices = [vector.min_of(lane * self.per_lane + j, Int32(self.experts - 1)) for j in range(self.per_lane)]
        return [vector.scalar(row + Int64(index) * size, TYPES[dtype])[0].to(Float32) for index in indices]

    def group_eligible(self, preferences, lane):  # type: ignore[no-untyped-def]
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

    def weigh(self, logit, values, lane):  # type: ignore[no-untyped-def]
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


def _key(value):  # type: ignore[no-untyped-def]
    """A u32 that orders as fp32 values do, NaN below all numbers, and is never 0."""
    bits = ptx.bits(value)
    ordered = vector.select(Int32(bits) < 0, ~bits, bits | Uint32(0x80000000))
    return vector.select((bits & Uint32(0x7FFFFFFF)) > Uint32(0x7F800000), Uint32(1), ordered)


def _exp(x):  # type: ignore[no-untyped-def]
    return cute.math.exp2(x * Float32(1.0 / math.log(2.0)), fastmath=True)


def _sigmoid(x):  # type: ignore[no-untyped-def]
    return cute.arch.rcp_approx(Float32(1.0) + _exp(Float32(0.0) - x))
