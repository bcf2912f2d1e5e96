"""How many experts a benchmark's tokens go to, and how many they would with uniform routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rose_dist.cli.bench.floor import synchronize
from rose_dist.engine.engine import Engine
from rose_dist.models.gpt_oss import GptOssForCausalLM


def touched_share(engine: Engine, work: Callable[[], Any]) -> float:
    """Share of all layers' experts that the tokens of all ranks go to while `work` runs. Collective."""
    load = engine.runner.model.expert_load
    synchronize(load.device)
    before = load.clone()
    work()
    synchronize(load.device)
    # Ranks that share experts send one another their tokens.
    touched = engine.groups.lockstep.all_reduce_max((load > before).flatten().tolist())
    return sum(touched) / len(touched)


def uniform_share(model: GptOssForCausalLM, tokens: int) -> float:
    """What `touched_share` is on average if each token chooses its experts at random."""
    config = model.config
    return 1.0 - (1 - config.num_experts_per_tok / config.num_local_experts) ** tokens
