"""Dispatch and combine between two real GPUs: fresh routing, bounds and delays, to the bit; and a dead peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gpu(2)
def test_two_gpus(tmp_path: Path) -> None:
    arguments = ["--ranks", "2", "--sections", "checks,dead", "--budget", "30", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.exchange", *arguments], capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "exchange_2.json").read_text())
    assert all(line["replays"] >= 25 and not line["wrong"] for line in results["checks"])
    assert results["dead"].startswith("rank 0 waited for rank 1")
