"""The gated activation of GPT-OSS's experts."""

from __future__ import annotations

import torch
from torch import Tensor

ALPHA = 1.702
"""Slope of the gate's sigmoid, fixed by the model family (openai/gpt-oss, gpt_oss/torch/model.py)."""


def clamped_swiglu(gate_up: Tensor, *, alpha: float = ALPHA, limit: float) -> Tensor:
    """gate · sigmoid(alpha · gate) · (linear + 1), with gate ≤ limit and |linear| ≤ limit.

    Args:
        gate_up: [rows, 2 · intermediate]; even columns are gates, odd ones linear.
        limit: the checkpoint's `swiglu_limit`; the gate is clamped from above only.

    Returns:
        [rows, intermediate] of the same dtype.
    """
    gate = gate_up[..., 0::2].clamp(max=limit)
    linear = gate_up[..., 1::2].clamp(min=-limit, max=limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(linear + 1)
