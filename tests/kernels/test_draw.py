"""Drawn tokens against a loop over the sorted row in fp64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rose_dist.kernels import draw as kernel
from rose_dist.kernels.draw import DrawRule, rule_words

NUMBERS = (0, 1 << 63, 0x5A5A_1234_9876_0000, (1 << 64) - (1 << 11))


def by_hand(row: torch.Tensor, rule: DrawRule, number: int) -> int:
    logits = row.double().numpy()
    if rule.temperature == 0:
        return int(np.argmax(logits))
    weights = np.exp((logits - logits.max()) / rule.temperature)
    order = np.arange(len(logits))
    if rule.top_k or rule.top_p < 1:
        order = np.lexsort((order, -logits))
        kept = weights[order][: rule.top_k or None]
        before = np.concatenate(([0.0], np.cumsum(kept)[:-1]))
        order = order[: len(kept)][before < rule.top_p * kept.sum()]
    order = order[weights[order] >= rule.min_p]
    reached = np.cumsum(weights[order])
    return int(order[min(np.searchsorted(reached, number / 2.0**64 * reached[-1], side="right"), len(order) - 1)])


def drawn(gpu: Any, logits: torch.Tensor, rules: list[DrawRule | None], numbers: list[int]) -> list[int]:
    words = np.concatenate((rule_words(rules), np.array([numbers], np.uint64).view(np.int64)))
    out = gpu.tensor(torch.full((len(rules),), -7))
    space = kernel.workspace(len(rules), logits.shape[1], torch.device("cuda", 0))
    kernel.draw(gpu.tensor(logits), gpu.tensor(torch.from_numpy(words)), out, space)
    return gpu.plain(out).tolist()


RULES = (
    DrawRule(),
    DrawRule(temperature=1.0),
    DrawRule(temperature=0.3, min_p=0.1),
    DrawRule(temperature=2.0, top_k=1),
    DrawRule(temperature=1.0, top_k=40, top_p=0.8, min_p=0.02),
    DrawRule(temperature=0.7, top_p=0.9),
    DrawRule(temperature=1.5, top_p=0.1),
    DrawRule(temperature=5.0, top_k=900),
    DrawRule(temperature=1.0, top_k=10**9, top_p=0.999),
    DrawRule(temperature=0.0, top_k=5),
)


@pytest.mark.parametrize("columns", [64, 3000, 9000])
def test_every_rule(gpu: Any, columns: int) -> None:
    """Logits as a head in bf16 gives them, many equal; some forbidden."""
    rows = len(RULES)
    logits = (torch.randn(rows, columns) * 3).bfloat16().float()
    logits[:, 5] = -math.inf
    logits[:, 7] = logits.amax(1)
    numbers = [NUMBERS[row % len(NUMBERS)] for row in range(rows)]
    expected = [by_hand(row, rule, number) for row, rule, number in zip(logits, RULES, numbers, strict=True)]
    assert drawn(gpu, logits, list(RULES), numbers) == expected
