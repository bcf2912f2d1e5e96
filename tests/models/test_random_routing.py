"""With random weights tokens spread over the experts as with uniform routing, or benchmarks would read too few."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import comb
from pathlib import Path

import pytest
import torch

from rose_dist.cli.bench.expert_spread import uniform_share
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.runner import ModelRunner
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.layers.expert_matrices import MoeWeights
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.loader import random_model
from rose_dist.models.presets import PRESETS

TOKENS, CONTEXT, BLOCKS = 128, 47, 3
NARROW = {
    "hidden_size": 256, "intermediate_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2,
    "sliding_window": 32, "vocab_size": 1024,
}  # fmt: skip
"""All layers and experts of gpt-oss-120b, of less width."""


def decodes(tokens: list[int], groups: int) -> Step:
    """A step of requests whose caches hold whatever is there."""
    tables = [[(0, list(range(BLOCKS * n, BLOCKS * (n + 1))))] * groups for n in range(len(tokens))]
    return Step([SequenceStep([token], CONTEXT, own, True) for token, own in zip(tokens, tables, strict=True)])


def prompt(tokens: list[int], groups: int) -> Step:
    return Step([SequenceStep(tokens, 0, [(0, list(range(len(tokens) // 16)))] * groups, True)])


def touched(chosen: list[int], tokens: int) -> float:
    """Share of the experts that so many of the step's tokens go to, on average over all choices of them.

    `chosen`: how many of the step's tokens go to each expert.
    """
    return sum(1 - comb(TOKENS - count, tokens) / comb(TOKENS, tokens) for count in chosen) / len(chosen)


@pytest.mark.parametrize("step", [decodes, prompt])
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "bf16"])
def test_distinct_tokens_touch_as_many_experts_as_with_uniform_routing(
    tmp_path: Path, kind: MoeWeights, step: Callable[[list[int], int], Step]
) -> None:
    """In every layer."""
    (tmp_path / "config.json").write_text(json.dumps({**PRESETS["gpt-oss-120b"], **NARROW}))
    model = random_model(tmp_path, BuildOptions(World.join().groups(Layout.of(1)), TOKENS, moe_weights=kind))
    runner = ModelRunner(model, EngineConfig(tmp_path, kv_tokens=TOKENS * 16 * BLOCKS, max_running=TOKENS))
    draws = torch.Generator().manual_seed(0)
    for storage in runner.storages:
        storage.keys.normal_(generator=draws)
        storage.values.normal_(generator=draws)
    tokens = torch.randperm(model.config.vocab_size, generator=draws)[:TOKENS].tolist()
    logits = runner.run(step(tokens, len(runner.specs)))
    assert logits is not None
    assert logits.isfinite().all()
    for layer, chosen in enumerate(model.expert_load.tolist()):
        for some in (8, 32, 64):
            assert touched(chosen, some) == pytest.approx(uniform_share(model, some), rel=0.1), (layer, some)
