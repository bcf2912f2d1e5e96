"""Rotary tables: plain and YaRN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary embedding of one model.

    factor 1 is plain rotary. Otherwise YaRN (arXiv 2309.00071, section 3) from `original_context` to factor times it;
    `truncate` rounds the correction range to whole dimensions (DeepSeek does, GPT-OSS does not).
    """

    head_dim: int
    theta: float
    max_positions: int
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: int = 4096
    truncate: bool = True

    @cached_property
    def concentration(self) -> float:
        """Factor on cos and sin: 0.1 · ln(factor) + 1."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @cached_property
    def inverse_frequencies(self) -> Tensor:
        """fp32 [head_dim / 2]."""
        half = self.head_dim // 2
        frequencies = self.theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)
        if self.factor <= 1:
            return 1.0 / frequencies
        low, high = self._correction_range()
        ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return ramp / (self.factor * frequencies) + (1 - ramp) / frequencies

    def _correction_range(self) -> tuple[float, float]:
        low, high = (
            self.head_dim * math.log(self.original_context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, self.head_dim - 1.0)
        return low, high if high > low else low + 0.001

    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin, each fp32 [max_positions, head_dim / 2], scaled by the concentration."""
        positions = torch.arange(self.max_positions, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse_frequencies)
        return angles.cos() * self.concentration, angles.sin() * self.concentration
