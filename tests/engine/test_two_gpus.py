"""The engine over two GPUs of one host, in every layout, against the CPU in fp32 and against itself without graphs.

Most of a layout's time its kernels are compiled, once for a kernel cache. `pytest -s -k "tp2 ep2"` runs one, and shows
how far it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rose_dist.models.convert.random_weights import PRESETS, write_random_checkpoint
from tests.engine.test_gpu import all_logits, errors
from tests.engine.two_gpus import CHUNKS, prompt_of
from tests.ranks import mpirun

LIMIT_S = 240.0
LAYOUTS = ({"tp": 2, "ep": 2}, {"tp": 2, "ep": 1}, {"dp": 2, "ep": 2}, {"dp": 2, "ep": 1})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    sizes = {"head_dim": 64, "sliding_window": 128, "hidden_size": 128, "intermediate_size": 128}
    write_random_checkpoint(PRESETS["tiny"] | sizes, folder)
    return folder


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda sizes: " ".join(f"{k}{n}" for k, n in sizes.items()))
def test_a_layout_computes_what_one_device_does(checkpoint: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    options = [text for name, size in layout.items() for text in (f"--{name}", str(size))]
    ranks = mpirun(2, sys.executable, "-m", "tests.engine.two_gpus", str(checkpoint), str(tmp_path), *options)
    try:
        assert ranks.wait(LIMIT_S) == 0
    finally:
        ranks.terminate()  # mpirun ends its ranks
        ranks.wait()
    for replica in range(layout.get("dp", 1)):
        found = torch.load(tmp_path / f"{replica}.pt")
        prompt = prompt_of(replica)
        expected = all_logits(checkpoint, "cpu", "float32", "bf16", prompt, 512)
        rounded = errors(all_logits(checkpoint, "cpu", "bfloat16", "bf16", prompt, 512), expected)
        for chunk in CHUNKS:
            wrong = errors(found[f"logits {chunk}"], expected)
            print(f"{layout}, chunks of {chunk}: median error {wrong.median():.3g}, CPU in bf16 {rounded.median():.3g}")
            assert wrong.median() < 1.3 * rounded.median()
            assert (wrong > 0.1).float().mean() < (rounded > 0.1).float().mean() + 0.05
        assert found["graphs"] == found["plain"]
        assert all(found["plain"])
