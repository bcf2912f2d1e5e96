"""Defaults that go by more than one option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose_dist.cli.engine_start import expert_ranks

PLAIN = {"tp": 2, "dp": None, "ep": None, "device": "cuda", "weights": "mxfp4", "rows": "bf16", "copies": 0, "ranks": 2}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 1), ({"ep": 2}, 2), ({"tp": None}, None), ({"tp": None, "dp": 1}, 1), ({"tp": 1}, None),
        ({"ranks": 4}, None), ({"tp": 4, "ranks": 4}, None), ({"device": "cpu"}, None),
        ({"weights": "fp8"}, None), ({"rows": "fp8"}, None), ({"copies": 2}, None),
    ],
    ids=str,
)  # fmt: skip
def test_two_gpus_hold_half_of_every_expert(change: dict[str, Any], expected: int | None) -> None:
    case: Any = SimpleNamespace(**PLAIN | change)
    options = SimpleNamespace(tp=case.tp, dp=case.dp, ep=case.ep)
    config = SimpleNamespace(
        device=torch.device(case.device), moe_weights=case.weights, moe_activations=case.rows,
        redundant_experts=case.copies,
    )  # fmt: skip
    assert expert_ranks(options, config, case.ranks) == expected  # type: ignore[arg-type]
