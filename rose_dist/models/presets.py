"""Configurations that are known by name, for benchmarks with random weights. Spelled as OpenAI does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GPT_OSS = {
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000.0,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_experts": 128},
}
"""As published."""
