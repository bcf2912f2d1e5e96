"""Seeded random GPT-OSS checkpoints of any shape."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rose_dist.kernels.mxfp4 import BLOCK, MAGNITUDES, SCALE_BIAS
from rose_dist.models.convert.layouts import experts_as, openai_tensors
from rose_dist.models.convert.tensors import Stream, is_expert_matrix, matrix_shapes
from rose_dist.models.convert.writer import DEFAULT_SHARD_BYTES, CheckpointWriter
from rose_dist.models.gpt_oss_config import GptOssConfig
from rose_dist.models.gpt_oss_spellings import ConfigError, Layout, Weights, stored_config, to_hf
from rose_dist.models.presets import PRESETS as PUBLISHED

_RMS_OF_UNIFORM_CODES = math.sqrt(sum(m * m for m in MAGNITUDES) / 8)

_TINY = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "experts_per_token": 4,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "swiglu_limit": 7.0,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 16,
    "initial_context_length": 4096,
    "rope_theta": 150000.0,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _TINY,
    "20b": PUBLISHED["gpt-oss-20b"],
    "120b": PUBLISHED["gpt-oss-120b"],
}
"""Config in OpenAI's spelling: gpt-oss-20b and gpt-oss-120b as published, and one for tests."""


def write_random_checkpoint(
    config: Mapping[str, Any],
    target: Path,
    *,
    seed: int = 0,
    layout: Layout = "hf",
    weights: Weights = "mxfp4",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a checkpoint whose values depend on `seed` and each tensor's name alone.

    So every layout and representation holds the same model. The scale of the values keeps activations and
    logits near 1, as in a trained model.

    Args:
        config: in either spelling.
    """
    architecture = GptOssConfig.from_json(to_hf(config))
    if architecture.hidden_size % BLOCK or architecture.intermediate_size % BLOCK:
        raise ConfigError(f"hidden_size and intermediate_size must be multiples of {BLOCK}, MXFP4's block")
    with CheckpointWriter(target, shard_bytes) as writer:
        writer.add_json("config.json", stored_config(config, layout, weights))
        stream = experts_as(weights, _random_tensors(architecture, seed))
        writer.add_all(openai_tensors(stream) if layout == "openai" else stream)


def _random_tensors(config: GptOssConfig, seed: int) -> Stream:
    for name, shape in matrix_shapes(config).items():
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if is_expert_matrix(name):
            yield from _random_experts(name, shape, generator)
        else:
            yield name, _random_tensor(name, shape, generator)


def _random_tensor(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> torch.Tensor:
    values = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
    if name.endswith("norm.weight"):
        return (1 + 0.1 * values).bfloat16()
    if name.endswith(("embed_tokens.weight", "sinks")):
        return values.bfloat16()
    if name.endswith("weight"):
        return (values / math.sqrt(shape[-1])).bfloat16()
    return (0.1 * values).bfloat16()


def _random_experts(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> Stream:
    """Uniform codes, and scales within a factor of 2 of what makes an output of unit inputs have unit variance."""
    experts, outputs, inputs = shape
    blocks = (experts, outputs, inputs // BLOCK)
    middle = SCALE_BIAS + round(math.log2(1 / (math.sqrt(inputs) * _RMS_OF_UNIFORM_CODES)))
    codes = np.frombuffer(bytearray(generator.bytes(math.prod(shape) // 2)), np.uint8).reshape(*blocks, BLOCK // 2)
    yield f"{name}_blocks", torch.from_numpy(codes)
    yield f"{name}_scales", torch.from_numpy(generator.integers(middle - 1, middle + 2, blocks, dtype=np.uint8))
