"""The batched sampler against a plain loop over rows, and against the distributions that it promises."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from rose_dist.engine.device_draw import DeviceDraw
from rose_dist.engine.draw import uniform
from rose_dist.engine.protocol import Generate, SamplingParams
from rose_dist.engine.request import Request
from rose_dist.engine.sampler import Sampler

VOCABULARY = 3000


def request(prompt: list[int], output: list[int], seed: int, stop: int | None = None, **rules: object) -> Request:
    generate = Generate(
        request_id="",
        prompt=prompt,
        sampling=SamplingParams(**rules),  # type: ignore[arg-type]
        stop_ids=[] if stop is None else [stop],
        min_tokens=0 if stop is None else 100,
    )
    made = Request(b"", generate, 1000, seed, [])
    made.tokens += output
    return made


def draw_one(logits: torch.Tensor, request: Request) -> int:
    """The rules of `SamplingParams`, one after another, in Python's numbers."""
    sampling = request.generate.sampling
    row = [float(value) for value in logits]
    for token in set(request.tokens):
        row[token] *= 1 / sampling.repetition_penalty if row[token] > 0 else sampling.repetition_penalty
    for token, times in Counter(request.output).items():
        row[token] -= sampling.presence_penalty + times * sampling.frequency_penalty
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    if request.output_length < request.generate.min_tokens:
        for token in request.stop_ids:
            row[token] = -math.inf
    if sampling.temperature == 0:
        return max(range(len(row)), key=lambda token: row[token])
    most = max(row)
    weights = {token: math.exp((value - most) / sampling.temperature) for token, value in enumerate(row)}
    order = sorted(weights, key=lambda token: (-weights[token], token))
    kept = order[: sampling.top_k or len(order)]
    if sampling.top_p < 1:
        total, reached = sum(weights[token] for token in kept), 0.0
        for place, token in enumerate(kept):
            reached += weights[token]
            if reached >= sampling.top_p * total:
                kept = kept[: place + 1]
                break
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights[order[0]]]
    if sampling.top_k == 0 and sampling.top_p == 1:
        kept.sort()  # no order is needed, so there is none
    number = float(uniform(np.array([request.seed], np.uint64), np.array([request.output_length], np.uint64))[0])
    reached, target = 0.0, number * sum(weights[token] for token in kept)
    for token in kept:
        reached += weights[token]
        if reached > target:
            return token
    return kept[-1]


RULES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "logit_bias": {5: 2.0, 9: -3.0}},
    {"temperature": 1.0},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 700},
    {"temperature": 1.5, "top_k": 1500, "min_p": 0.01},
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 2.0, "top_p": 0.95, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_k": 20, "stop": 3},
]


def batch(seed: int) -> tuple[torch.Tensor, list[Request]]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(RULES), VOCABULARY, generator=generator) * 3
    logits = logits.bfloat16().float()  # as a head in bf16 gives them, with many that are equal
    logits[-1, 3] = 50.0
    requests = [
        request([1, 2, seed % 50], [int(t) for t in logits[i].topk(3).indices], seed * 100 + i, **rules)  # type: ignore[arg-type]
        for i, rules in enumerate(RULES)
    ]
    return logits, requests


def sampler() -> Sampler:
    return Sampler(DeviceDraw(torch.zeros(64, dtype=torch.int64), VOCABULARY))


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_drawn_by_its_own_rules(seed: int) -> None:
    logits, requests = batch(seed)
    expected = [draw_one(row, each) for row, each in zip(logits, requests, strict=True)]
    assert [found.token for found in sampler().sample(logits.clone(), requests, None).result()] == expected


def test_the_batch_makes_no_difference() -> None:
    logits, requests = batch(7)
    together = sampler().sample(logits.clone(), requests, None).result()
    alone = [sampler().sample(logits[i : i + 1].clone(), [each], None).result()[0] for i, each in enumerate(requests)]
    assert together == alone


def test_tokens_stay_on_the_device_for_the_next_step() -> None:
    logits, requests = batch(1)
    left = torch.zeros(64, dtype=torch.int64)
    found = Sampler(DeviceDraw(left, VOCABULARY)).sample(logits, requests, None).result()
    assert left[: len(requests)].tolist() == [each.token for each in found]


def test_rules_of_any_batch_are_as_the_kernel_takes_them() -> None:
    """It reads them by columns; numpy may join arrays of another order to one of that order."""
    _, requests = batch(2)
    for count in (0, 1, 4, len(requests)):
        rules = DeviceDraw(torch.zeros(64, dtype=torch.int64), VOCABULARY).rules(requests[:count])
        assert rules.shape == (4, count)
        assert rules.flags.c_contiguous


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    shares = torch.softmax(logits, -1)
    draws, rules = 8000, sampler()
    counts = Counter(
        each.token
        for first in range(0, draws, 50)
        for each in rules.sample(
            logits.repeat(50, 1), [request([0], [0] * (first % 7), first + i) for i in range(50)], None
        ).result()
    )
    for token, share in enumerate(shares.tolist()):
        # Five standard deviations.
        assert abs(counts[token] - draws * share) < 5 * math.sqrt(draws * share * (1 - share))


def test_uniform_numbers_are_spread_and_differ_by_seed_and_position() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    numbers = uniform(seeds.ravel(), positions.ravel())
    assert len(set(numbers.tolist())) == 40_000
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, 100, (0, 1))
    assert abs(counts - 400).max() < 5 * math.sqrt(400)


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = torch.randn(3, 50)
    requests = [
        request([1], [], 0, temperature=1.5, top_k=3, logprobs=2, logit_bias={4: 5.0}),
        request([1], [], 1),
        request([1], [], 2, temperature=0.0, logprobs=0),
    ]
    plain = torch.log_softmax(logits, -1)
    first, second, third = sampler().sample(logits.clone(), requests, None).result()
    assert second.logprobs is None
    assert first.logprobs is not None
    assert third.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(float(plain[0, first.token]), abs=1e-6)
    assert [token for token, _ in first.logprobs.top] == plain[0].topk(2).indices.tolist()
    assert third.logprobs.top == []
    assert third.logprobs.logprob == pytest.approx(float(plain[2].max()), abs=1e-6)
