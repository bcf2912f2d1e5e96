"""Expert choice: router logits become the k experts of every token and their weights."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch
from rose_dist.kernels.variants import WARP, router_shape

MAX_EXPERTS = 1024
MAX_K = 32


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


def route(
    logits: Tensor, router: Router, *, bias: Tensor | None = None, counts: bool = False, load: Tensor | None = None,
    live_rows: Tensor | None = None,
) -> Routing:  # fmt: skip
    """Apply a routing rule.

    Args:
        logits: [tokens, experts], fp32, bf16 or fp16. A NaN is never preferred to a number.
        bias: fp32 [experts], added to sigmoid scores for the choice alone.
        counts: whether to count tokens an expert.
        load: int64 [experts], to which how often each was chosen is added.
        live_rows: int32 [1]; tokens from there on are dead.
    """
    if logits.is_cuda:
        return _launch(logits, router, bias, counts, load, live_rows)
    quick = None
    if router.score is Score.SOFTMAX_OF_CHOSEN and bias is None and live_rows is None and not counts:
        quick = _without_ties(logits, router)
    if quick is None:
        _check(logits, router, bias, load)
        quick = reference(logits, router, bias=bias, counts=counts, live_rows=live_rows)
    if load is not None:
        add_load(load, quick.ids)
    return quick


def add_load(load: Tensor, ids: Tensor) -> None:
    """Count the experts of `ids`, −1 excepted, on the CPU; in numpy, where a small array costs a third of torch's."""
    counts = load.numpy()
    counts += np.bincount(ids.numpy().ravel() + 1, minlength=len(counts) + 1)[1:]


def _without_ties(logits: Tensor, router: Router) -> Routing | None:
    """`reference` in half the time; None where equal logits or a NaN need its order."""
    experts = logits.shape[1]
    router.check(experts)
    values, ids = torch.topk(logits.float(), min(router.k + 1, experts))
    if not all(a > b for row in values.tolist() for a, b in pairwise(row)):
        return None
    weights = values[:, : router.k].softmax(-1)
    return Routing(ids[:, : router.k].to(torch.int32), weights if router.scale == 1.0 else weights * router.scale)


def _check(logits: Tensor, router: Router, bias: Tensor | None, load: Tensor | None) -> None:
    checks.shape("logits", logits, None, None)
    router.check(logits.shape[1])
    if load is not None:
        checks.shape("load", load, logits.shape[1])
        checks.dtype("load", load, torch.int64)
        checks.dense("load", load, 8)
        checks.same_device("load", load, logits.device)
    if bias is not None:
        checks.shape("bias", bias, logits.shape[1])
        checks.dtype("bias", bias, torch.float32)
        checks.same_device("bias", bias, logits.device)
        if router.score is not Score.SIGMOID:
            raise checks.fail("bias", "is only for sigmoid scores")


def reference(
    logits: Tensor, router: Router, *, bias: Tensor | None = None, counts: bool = False, live_rows: Tensor | None = None
) -> Routing:
    """`route` in torch, fp32."""
    tokens, experts = logits.shape
    wide = logits.float()
    scores = wide.sigmoid() if router.score is Score.SIGMOID else wide
    choice = scores if bias is None else scores + bias
    if router.groups > 1:
        grouped = choice.view(tokens, router.groups, experts // router.groups)
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
    logits: Tensor, router: Router, bias: Tensor | None, counts: bool, load: Tensor | None, live_rows: Tensor | None
) -> Routing:
    launcher, blocks = _prepare(logits, router, bias, counts, load, live_rows)
    tokens, experts = logits.shape
    ids = torch.empty(tokens, router.k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, router.k, dtype=torch.float32, device=logits.device)
    hits = torch.empty(experts, dtype=torch.int32, device=logits.device) if counts else None
    if tokens == 0:
        return Routing(ids, weights, None if hits is None else hits.zero_())
    launch.run(
        launcher, logits, logits, logits.stride(0), bias, ids, weights, hits, load, live_rows, tokens, blocks,
        router.scale,
    )  # fmt: skip
    return Routing(ids, weights, hits)


@checks.once
def _prepare(
    logits: Tensor, router: Router, bias: Tensor | None, counts: bool, load: Tensor | None, live_rows: Tensor | None
) -> tuple[jit.Launcher, int]:
    """The kernel for arguments that have been checked, and its blocks."""
    _check(logits, router, bias, load)
    checks.dtype("logits", logits, torch.float32, torch.bfloat16, torch.float16)
    checks.rows("logits", logits, align=logits.element_size())
    checks.live_rows(live_rows, logits.device)
    tokens, experts = logits.shape
    device = launch.device(logits)
    shape = router_shape(tokens, counts)
    steps = (logits.data_ptr(), logits.stride(0) * logits.element_size())
    vector_bytes = launch.widest(device.arch, 16, *steps)
    from rose_dist.kernels.cute import routing as cute  # noqa: PLC0415 - it loads the compiler

    launcher = cute.launcher(
        device.arch, logits.dtype, experts, router.k, router.score, router.groups, router.top_groups,
        bias is not None, counts, load is not None, shape, vector_bytes,
    )  # fmt: skip
    return launcher, shape.cluster or min(-(-tokens // shape.warps), device.sms * 4)
