"""Emulated and real GPUs can share a process."""

from __future__ import annotations

from typing import Any

import torch

from rose_dist.kernels.cute import rms_norm as cute
from rose_dist.kernels.rms_norm import rms_norm


def test_an_emulated_launcher_is_remembered_in_a_test(gpu: Any) -> None:
    rms_norm(gpu.tensor(torch.randn(1, 64).bfloat16()), gpu.tensor(torch.ones(64).bfloat16()), 1e-5)
    assert cute.launcher.cache_info().currsize > 0


def test_and_not_after_it() -> None:
    assert cute.launcher.cache_info().currsize == 0
