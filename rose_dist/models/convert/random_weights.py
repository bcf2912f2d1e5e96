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
from rose_dist.models.convert.config import GptOssShape, Layout, to_hf
from rose_dist.models.convert.errors import ConversionError
from rose_dist.models.convert.layouts import stored_config
from rose_dist.models.convert.parts import Experts, Mxfp4, Weights, parts_of
from rose_dist.models.convert.writer import DEFAULT_SHARD_BYTES, CheckpointWriter

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
_PUBLISHED = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "sliding_window": 128,
    "num_key_value_heads": 8,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _TINY,
    "20b": _TINY | _PUBLISHED | {"num_hidden_layers": 24, "num_experts": 32},
    "120b": _TINY | _PUBLISHED | {"num_hidden_layers": 36, "num_experts": 128},
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

    So the four combinations of layout and weights hold the same model. The scale of the values keeps activations and
    logits near 1, as in a trained model.

    Args:
        config: in either spelling.
    """
    shape = GptOssShape.from_hf(to_hf(config))
    if shape.hidden % BLOCK or shape.intermediate % BLOCK:
        raise ConversionError(f"hidden_size and intermediate_size must be multiples of {BLOCK}, MXFP4's block")
    with CheckpointWriter(target, shard_bytes) as writer:
        writer.add_json("config.json", stored_config(config, layout, weights))
        for part in parts_of(shape):
            if isinstance(part, Experts):
                part.write(writer, layout, part.store_as(_random_experts(part, seed), weights))
            elif not (shape.tied and part.hf == "lm_head.weight"):
                part.write(writer, layout, _random_tensor(part.openai, part.shape, seed))


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.from_numpy(_generator(name, seed).standard_normal(shape, dtype=np.float32))
    if name.endswith("norm.scale"):
        return (1 + 0.1 * values).bfloat16()
    if name == "embedding.weight" or name.endswith("sinks"):
        return values.bfloat16()
    if name.endswith("weight"):
        return (values / math.sqrt(shape[-1])).bfloat16()
    return (0.1 * values).bfloat16()


def _random_experts(part: Experts, seed: int) -> Mxfp4:
    """Uniform codes, and scales within a factor of 2 of what makes an output of unit inputs have unit variance."""
    generator = _generator(part.openai, seed)
    shape = (part.experts, part.outputs, part.inputs // BLOCK)
    middle = SCALE_BIAS + round(math.log2(1 / (math.sqrt(part.inputs) * _RMS_OF_UNIFORM_CODES)))
    codes = np.frombuffer(generator.bytes(math.prod(shape) * BLOCK // 2), np.uint8).reshape(*shape, BLOCK // 2)
    scales = generator.integers(middle - 1, middle + 2, shape, dtype=np.uint8)
    return Mxfp4(torch.from_numpy(codes.copy()), torch.from_numpy(scales))
