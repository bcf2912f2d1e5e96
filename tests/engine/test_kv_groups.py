"""Block pools from the memory that is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rose_dist.comm.layout import Layout
from rose_dist.engine.config import EngineConfig, EngineConfigError
from rose_dist.engine.kv_groups import activation_bytes, fitting_blocks, group_specs, kv_bytes
from rose_dist.layers.forward_batch import KVGroup
from rose_dist.models.convert.random_weights import PRESETS
from rose_dist.models.gpt_oss_config import GptOssConfig

GROUPS = (KVGroup((1, 3), None, 8, 64), KVGroup((0, 2), 128, 8, 64))
CONFIG = EngineConfig(Path(), dtype="bfloat16")


@pytest.mark.parametrize("budget", [10**6, 10**8, 10**10, 54 * 10**9])
def test_what_fits_fits_and_no_more(budget: int) -> None:
    blocks = fitting_blocks(GROUPS, CONFIG, budget)
    sized = replace(CONFIG, kv_tokens=blocks * CONFIG.block_size)
    larger = replace(CONFIG, kv_tokens=(blocks + 1) * CONFIG.block_size)
    assert kv_bytes(GROUPS, group_specs(GROUPS, sized), sized) <= budget
    assert kv_bytes(GROUPS, group_specs(GROUPS, larger), larger) > budget


@pytest.mark.parametrize(
    ("layout", "ranks"), [("1 1 1", 1), ("4 1 4", 1), ("2 2 2", 1), ("1 8 8", 8), ("4 2 8", 2), ("1 8 4", 4)]
)
def test_experts_need_room_for_what_all_ranks_may_send(layout: str, ranks: int) -> None:
    """ranks: whose whole share of tokens may come to one rank's experts."""
    tp, dp, ep = map(int, layout.split())
    model = GptOssConfig.from_json(dict(PRESETS["tiny"]))
    alone = activation_bytes(CONFIG, model, Layout(1, 1, 1, 1))
    row = 3 * (model.hidden_size + model.intermediate_size) * 2
    more = (ranks - 1) * CONFIG.max_step_tokens * model.num_experts_per_tok * row
    assert activation_bytes(CONFIG, model, Layout(tp * dp, tp, dp, ep)) - alone == more


def test_no_memory_no_blocks() -> None:
    assert fitting_blocks(GROUPS, CONFIG, -1) == 0


def test_a_cpu_must_be_told() -> None:
    with pytest.raises(EngineConfigError, match="--kv-tokens must be given on a CPU"):
        EngineConfig(Path(), kv_tokens=None)


def test_rows_in_fp8_need_weights_in_mxfp4() -> None:
    with pytest.raises(EngineConfigError, match="fp8 takes experts held as MXFP4, not as bf16"):
        EngineConfig(Path(), moe_activations="fp8")
