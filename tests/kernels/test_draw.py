"""Drawn tokens against a loop over the sorted row in fp64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_dist.kernels import draw as kernel
from rose_dist.kernels.draw import MOST_COLUMNS, NO_DRAW, DrawRule, RowSplit, rule_words
from rose_dist.kernels.errors import KernelArgumentError

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


def drawn(gpu: Any, logits: torch.Tensor, rules: list[DrawRule], numbers: list[int]) -> list[int]:
    words = np.concatenate((rule_words(rules), np.array([numbers], np.uint64).view(np.int64)))
    out = gpu.tensor(torch.full((len(rules),), -7))
    space = kernel.workspace(len(rules), logits.shape[1], torch.device("cuda", 0))
    kernel.draw(gpu.tensor(logits), gpu.tensor(torch.from_numpy(words)), out, space)
    found: list[int] = gpu.plain(out).tolist()
    return found


RULES = (
    DrawRule(),
    DrawRule(temperature=1.0),
    DrawRule(temperature=0.3, min_p=0.1),
    DrawRule(temperature=1.0, top_k=40, top_p=0.8, min_p=0.02),
    DrawRule(temperature=2.0, top_k=1),
    DrawRule(temperature=0.7, top_p=0.9),
    DrawRule(temperature=1.5, top_p=0.1),
    DrawRule(temperature=3.0, top_k=200, min_p=0.05),
    DrawRule(temperature=1.0, min_p=1.0),
    DrawRule(temperature=0.0, top_k=5),
)


@pytest.mark.parametrize("columns", [64, 3000])
def test_every_rule(gpu: Any, columns: int) -> None:
    """Logits as a head in bf16 gives them, many equal; some forbidden."""
    rows = len(RULES)
    logits = (torch.randn(rows, columns) * 3).bfloat16().float()
    logits[:, 5] = -math.inf
    logits[:, 7] = logits.amax(1)
    numbers = [NUMBERS[row % len(NUMBERS)] for row in range(rows)]
    expected = [by_hand(row, rule, number) for row, rule, number in zip(logits, RULES, numbers, strict=True)]
    assert drawn(gpu, logits, list(RULES), numbers) == expected


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        DrawRule(temperature=8.0, top_k=2500),
        DrawRule(temperature=8.0, top_k=2900, top_p=0.9, min_p=0.3),
        DrawRule(temperature=8.0, top_p=0.95),
    ],
    ids=str,
)
def test_more_tokens_than_are_sorted(gpu: Any, rule: DrawRule, ties: bool) -> None:
    columns = 3000
    assert RowSplit.of(columns).candidates < 2048
    logits = torch.zeros(1, columns) if ties else torch.randn(1, columns)
    logits[0, 100] = -math.inf
    assert drawn(gpu, logits, [rule], [NUMBERS[2]]) == [by_hand(logits[0], rule, NUMBERS[2])]


def test_a_wide_row_is_drawn_by_all_its_blocks(gpu: Any) -> None:
    """The vocabulary's end lies within a block, as GPT-OSS's does, and so does the token."""
    columns = 20_004
    assert RowSplit.of(columns).blocks == 8
    logits = torch.randn(2, columns)
    logits[:, -2] = 12.0
    rules, numbers = [DrawRule(temperature=1.0), DrawRule(temperature=1.0, top_k=50)], [NUMBERS[3], NUMBERS[1]]
    expected = [by_hand(row, rule, number) for row, rule, number in zip(logits, rules, numbers, strict=True)]
    assert drawn(gpu, logits, rules, numbers) == expected


def test_rows_without_a_rule_are_left_alone(gpu: Any) -> None:
    logits = torch.randn(3, 64)
    words = torch.from_numpy(NO_DRAW).repeat(1, 3)
    words[:3, 1:2] = torch.from_numpy(rule_words([DrawRule()]).copy())
    out, space = gpu.tensor(torch.full((3,), -7)), kernel.workspace(3, 64, torch.device("cuda", 0))
    kernel.draw(gpu.tensor(logits), gpu.tensor(words), out, space)
    assert gpu.plain(out).tolist() == [-7, int(logits[1].argmax()), -7]


def test_a_row_decides_by_itself(gpu: Any) -> None:
    logits = torch.randn(4, 64)
    rules = [DrawRule(temperature=1.0), DrawRule(), DrawRule(temperature=1.0, top_p=0.5), DrawRule(temperature=1.0)]
    numbers = [NUMBERS[2]] * 4
    alone = [drawn(gpu, logits[i : i + 1], rules[i : i + 1], numbers[:1])[0] for i in range(4)]
    assert drawn(gpu, logits, rules, numbers) == alone


def test_no_numbers_still_give_a_token(gpu: Any) -> None:
    """What a broken model may give: the token only has to be one."""
    logits = torch.randn(4, 64)
    logits[0] = math.nan
    logits[1] = -math.inf
    logits[2, 9] = math.inf
    logits[3, 3] = math.nan
    for rule in (DrawRule(), DrawRule(temperature=1.0), DrawRule(temperature=1.0, top_k=3)):
        found = drawn(gpu, logits, [rule] * 4, [NUMBERS[1]] * 4)
        assert all(0 <= token < 64 for token in found)
        assert found[3] != 3
        assert rule.temperature or found[2] == 9


@given(st.integers(1, MOST_COLUMNS // 4))
def test_every_row_fits_its_blocks(vectors: int) -> None:
    split = RowSplit.of(4 * vectors)
    assert split.blocks * split.elements >= 4 * vectors
    assert 8 * split.candidates <= 4 * split.elements <= 220_000
    assert split.candidates & (split.candidates - 1) == 0


@given(st.floats(1e-40, 1e6), st.integers(0, 10**12), st.floats(1e-30, 1), st.floats(0, 1))
@settings(max_examples=200)
def test_rules_say_what_they_are_given(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    words = rule_words([DrawRule(temperature, top_k, top_p, min_p)])
    high, low = words[0].copy().view(np.float32).astype(np.float64)
    assert high + low == pytest.approx(min(math.log2(math.e) / temperature, 1e30), rel=1e-13)
    count, least = words[1].copy().view(np.uint32).tolist()
    assert count == min(top_k, 2**31 - 1)
    assert least == math.ceil(min_p * 2**31)
    share = words[2].copy().view(np.uint64).item()
    assert share == 0 if top_p == 1 else 0 < share == pytest.approx(top_p * 2**64, rel=1e-15, abs=1)


def test_bad_arguments(gpu: Any) -> None:
    logits, rules, out = gpu.tensor(torch.zeros(2, 64)), gpu.tensor(torch.zeros(4, 2).long()), torch.zeros(2).long()
    space = kernel.workspace(1, 64, torch.device("cuda", 0))
    with pytest.raises(KernelArgumentError, match="space: is for 1 rows; there are 2"):
        kernel.draw(logits, rules, gpu.tensor(out), space)
    with pytest.raises(KernelArgumentError, match=r"rules: shape .* needs \(4, 2\)"):
        kernel.draw(logits, rules[:3], gpu.tensor(out), space)
