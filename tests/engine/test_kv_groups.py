"""Block pools from the memory that is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rose_dist.engine.config import EngineConfig, EngineConfigError
from rose_dist.engine.kv_groups import fitting_blocks, group_specs, kv_bytes
from rose_dist.layers.forward_batch import KVGroup

GROUPS = (KVGroup((1, 3), None, 8, 64), KVGroup((0, 2), 128, 8, 64))
CONFIG = EngineConfig(Path(), dtype="bfloat16")


@pytest.mark.parametrize("budget", [10**6, 10**8, 10**10, 54 * 10**9])
def test_what_fits_fits_and_no_more(budget: int) -> None:
    blocks = fitting_blocks(GROUPS, CONFIG, budget)
    sized = replace(CONFIG, kv_tokens=blocks * CONFIG.block_size)
    larger = replace(CONFIG, kv_tokens=(blocks + 1) * CONFIG.block_size)
    assert kv_bytes(GROUPS, group_specs(GROUPS, sized), sized) <= budget
    assert kv_bytes(GROUPS, group_specs(GROUPS, larger), larger) > budget


def test_no_memory_no_blocks() -> None:
    assert fitting_blocks(GROUPS, CONFIG, -1) == 0


def test_a_cpu_must_be_told() -> None:
    with pytest.raises(EngineConfigError, match="kv_tokens must be given on a CPU"):
        EngineConfig(Path(), kv_tokens=None)


def test_rows_in_fp8_need_weights_in_mxfp4() -> None:
    with pytest.raises(EngineConfigError, match="fp8 takes experts held as MXFP4, not as bf16"):
        EngineConfig(Path(), moe_activations="fp8")
