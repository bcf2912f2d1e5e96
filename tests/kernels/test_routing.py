"""Routing against plain Python on float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.routing import Router, Score, reference, route

RULES = {
    "gpt_oss_20b": (32, Router(4)),
    "gpt_oss_120b": (128, Router(4)),
    "qwen3": (128, Router(8)),
    "deepseek": (256, Router(8, Score.SIGMOID, groups=8, top_groups=4, scale=2.5)),
    "one_of_one": (1, Router(1)),
    "odd": (60, Router(5, Score.SOFTMAX)),
    "largest": (1024, Router(32, Score.SOFTMAX)),
}


def expected(row: list[float], bias: list[float], router: Router) -> tuple[list[int], list[float]]:
    sigmoid = [1 / (1 + math.exp(-x)) for x in row]
    score = sigmoid if router.score is Score.SIGMOID else row
    choice = [s + b for s, b in zip(score, bias, strict=True)]
    eligible = set(range(len(row)))
    if router.groups > 1:
        size = len(row) // router.groups
        best = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(router.groups)]
        chosen = sorted(range(router.groups), key=lambda g: (-best[g], g))[: router.top_groups]
        eligible = {e for g in chosen for e in range(g * size, (g + 1) * size)}
    ids = sorted(eligible, key=lambda e: (-choice[e], e))[: router.k]
    if router.score is Score.SIGMOID:
        total = sum(sigmoid[e] for e in ids)
        return ids, [sigmoid[e] / total * router.scale for e in ids]
    over = ids if router.score is Score.SOFTMAX_OF_CHOSEN else range(len(row))
    total = sum(math.exp(row[e] - row[ids[0]]) for e in over)
    return ids, [math.exp(row[e] - row[ids[0]]) / total * router.scale for e in ids]


def check(logits: torch.Tensor, bias: torch.Tensor | None, router: Router, ids: Any, weights: Any) -> None:
    zeros = [0.0] * logits.shape[1]
    for token, row in enumerate(logits.float().tolist()):
        wanted_ids, wanted_weights = expected(row, zeros if bias is None else bias.tolist(), router)
        assert ids[token].tolist() == wanted_ids
        assert weights[token].tolist() == pytest.approx(wanted_weights, rel=2e-6, abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("counts", [False, True])
def test_matches_plain_python(gpu: Any, rule: str, counts: bool) -> None:
    experts, router = RULES[rule]
    for tokens in (1, 3, 8, 128, 1000) if gpu.real else (1, 3):
        logits = torch.randn(tokens, experts)
        bias = torch.randn(experts) * 0.1 if router.score is Score.SIGMOID else None
        if tokens == 3 and bias is None:
            logits = logits.bfloat16()
        moved = None if bias is None else gpu.tensor(bias)
        routing = route(gpu.tensor(logits), router, bias=moved, counts=counts)
        ids = gpu.plain(routing.ids)
        check(logits, bias, router, ids, gpu.plain(routing.weights))
        if routing.counts is not None:
            wanted = torch.bincount(ids.flatten().long(), minlength=experts)
            assert torch.equal(gpu.plain(routing.counts).long(), wanted)


@pytest.mark.parametrize("tokens", [20, 64, 128, 300])
def test_counts_of_many_tokens(gpu: Any, tokens: int) -> None:
    """One cluster counts up to 32 tokens; beyond, every block adds to global counts."""
    experts = 32
    logits = torch.randn(tokens, experts)
    routing = route(gpu.tensor(logits), Router(2), counts=True)
    wanted = torch.bincount(logits.topk(2).indices.flatten(), minlength=experts)
    assert torch.equal(gpu.plain(routing.counts).long(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties_nan_and_infinity(gpu: Any, dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 128, dtype=dtype)
    logits[1, ::3] = math.nan
    logits[2] = -math.inf
    logits[2, 70], logits[2, 9] = 1.0, 2.0
    logits[3] = -0.0
    logits[3, 100] = 0.0
    ids = gpu.plain(route(gpu.tensor(logits), Router(4)).ids)
    assert ids[0].tolist() == [0, 1, 2, 3]
    assert ids[1].tolist() == [1, 2, 4, 5]
    assert ids[2].tolist() == [9, 70, 0, 1]
    assert sorted(ids[3].tolist())[:2] == [0, 1]


def test_bf16_logits_and_dead_tokens(gpu: Any) -> None:
    logits = torch.randn(5, 128).bfloat16()
    live = gpu.tensor(torch.tensor([3], dtype=torch.int32))
    routing = route(gpu.tensor(logits), Router(4), counts=True, live_rows=live)
    ids, weights = gpu.plain(routing.ids), gpu.plain(routing.weights)
    check(logits[:3], None, Router(4), ids[:3], weights[:3])
    assert (ids[3:] == -1).all()
    assert (weights[3:] == 0).all()
    assert int(gpu.plain(routing.counts).sum()) == 12


@pytest.mark.parametrize("live", [None, 9])
def test_what_is_chosen_adds_to_the_load(gpu: Any, live: int | None) -> None:
    logits, before = torch.randn(13, 40).bfloat16(), torch.arange(40) << 32
    load = gpu.tensor(before.clone())
    bound = None if live is None else gpu.tensor(torch.tensor([live], dtype=torch.int32))
    ids = gpu.plain(route(gpu.tensor(logits), Router(4), load=load, live_rows=bound).ids)
    wanted = torch.bincount(reference(logits, Router(4)).ids[:live].flatten().long(), minlength=40)
    assert torch.equal(gpu.plain(load), before + wanted)
    on_cpu = before.clone()
    routing = route(logits, Router(4), load=on_cpu, live_rows=None if live is None else torch.tensor([live]))
    assert torch.equal(on_cpu, before + wanted)
    assert torch.equal(routing.ids, ids)


@pytest.mark.parametrize("rule", RULES)
def test_cpu_path(rule: str) -> None:
    experts, router = RULES[rule]
    logits = torch.randn(7, experts)
    bias = torch.randn(experts) * 0.1 if router.score is Score.SIGMOID else None
    routing = route(logits, router, bias=bias)
    check(logits, bias, router, routing.ids, routing.weights)


def test_no_tokens(gpu: Any) -> None:
    routing = route(gpu.tensor(torch.zeros(0, 32)), Router(4), counts=True)
    assert routing.ids.shape == (0, 4)
    assert not gpu.plain(routing.counts).any()


@pytest.mark.parametrize(
    ("experts", "router", "message"),
    [
        (8, Router(9), "k: is 9; must be in 1 … 8"),
        (64, Router(33), "k: is 33"),
        (2048, Router(4), "logits: 2048 experts; at most 1024"),
        (128, Router(4, groups=4), "groups: 4 groups need sigmoid"),
        (256, Router(8, Score.SIGMOID, groups=8, top_groups=9), "top_groups: is 9"),
    ],
)
def test_bad_arguments(experts: int, router: Router, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        route(torch.zeros(2, experts), router)


def test_bias_needs_sigmoid() -> None:
    with pytest.raises(KernelArgumentError, match="bias: is only for sigmoid"):
        route(torch.zeros(2, 32), Router(4), bias=torch.zeros(32))


def test_ties_and_nan_take_the_long_way_to_the_same_answer() -> None:
    """On a CPU, where rows without either are answered sooner."""
    logits = torch.randn(6, 32)
    logits[1, 5] = logits[1, 9] = 4.0
    logits[2, 7] = math.nan
    logits[3] = 1.0
    logits[4, 3] = math.inf
    for rows in (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4), slice(5, 6), slice(0, 6)):
        for router in (Router(4), Router(32), Router(4, scale=2.0)):
            found, wanted = route(logits[rows], router), reference(logits[rows], router)
            assert torch.equal(found.ids, wanted.ids)
            assert torch.equal(found.weights.nan_to_num(), wanted.weights.nan_to_num())
