"""GPT-OSS against transformers' implementation, on one rank and in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rose_dist.comm.world import World
from tests.checkpoints import random_prompt, reference_logits, write_tiny
from tests.models.forward import all_logits
from tests.ranks import run_ranks

PROMPTS = [random_prompt(7, 1), random_prompt(130, 2), random_prompt(4200, 3)]
"""Within the window, beyond it, and beyond YaRN's original context."""

LAYOUTS = [
    pytest.param(2, {"tp": 2, "ep": 1}, marks=pytest.mark.mpi(2), id="tp2"),
    pytest.param(2, {"tp": 2, "ep": 2}, marks=pytest.mark.mpi(2), id="tp2-ep2"),
    pytest.param(2, {"dp": 2, "ep": 2}, marks=pytest.mark.mpi(2), id="dp2-ep2"),
    pytest.param(4, {"tp": 4, "ep": 1}, marks=pytest.mark.mpi(4), id="tp4"),
    pytest.param(4, {"tp": 4, "ep": 2}, marks=pytest.mark.mpi(4), id="tp4-ep2"),
    pytest.param(4, {"dp": 4, "ep": 4}, marks=pytest.mark.mpi(4), id="ep4"),
    pytest.param(4, {"tp": 2, "dp": 2, "ep": 4}, marks=pytest.mark.mpi(4), id="tp2-dp2-ep4"),
    pytest.param(4, {"tp": 2, "dp": 2, "ep": 2}, marks=pytest.mark.mpi(4), id="tp2-dp2-ep2"),
    pytest.param(3, {"dp": 3, "ep": 3}, marks=pytest.mark.mpi(3), id="dp3-ep3-uneven-experts"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[torch.Tensor]:
    return [reference_logits(tiny, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [512, 4200])
def test_one_rank(tiny: Path, expected: list[torch.Tensor], chunk: int) -> None:
    check(all_logits(World.join(), tiny, {}, PROMPTS, chunk), expected)


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS)
def test_layouts(tiny: Path, expected: list[torch.Tensor], ranks: int, sizes: dict[str, int]) -> None:
    results = run_ranks(ranks, all_logits, tiny, sizes, PROMPTS, 512, timeout=120)
    leaders = [logits for logits in results if logits is not None]
    assert len(leaders) == ranks // sizes.get("tp", 1)
    assert leaders[0].keys() == {0, 1, 2}
    for logits in leaders:
        check(logits, expected)


def check(ours: dict[int, npt.NDArray[np.float32]] | None, expected: list[torch.Tensor]) -> None:
    assert ours is not None
    for prompt, logits in ours.items():
        torch.testing.assert_close(torch.from_numpy(logits), expected[prompt], atol=1e-4, rtol=0)
