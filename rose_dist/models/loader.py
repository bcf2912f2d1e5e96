"""From a checkpoint folder to a model with this rank's weights."""

from __future__ import annotations

from pathlib import Path

import torch

from rose_dist.comm.world import Groups
from rose_dist.models.checkpoint import CheckpointError, Progress, list_tensors, load, named_weights, read_config
from rose_dist.models.gpt_oss import GptOssForCausalLM
from rose_dist.models.gpt_oss_config import GptOssConfig
from rose_dist.models.gpt_oss_layouts import hugging_face_names


def read_model_config(folder: Path) -> GptOssConfig:
    """The configuration alone; quick, so that mistakes are found before any weight is read."""
    config = read_config(folder)
    architectures = config.get("architectures", ["GptOssForCausalLM"])
    if architectures != ["GptOssForCausalLM"]:
        raise CheckpointError(f"{folder} holds {', '.join(architectures)}; supported is GptOssForCausalLM")
    return GptOssConfig.from_json(config)


def load_model(
    folder: Path,
    groups: Groups,
    *,
    max_tokens: int,
    dtype: torch.dtype,
    redundant_experts: int = 0,
    progress: Progress | None = None,
) -> GptOssForCausalLM:
    """Build the model and read this rank's part of its weights.

    Args:
        max_tokens: most tokens of one step on one rank.
        dtype: of weights and activations in memory.
        redundant_experts: slots of each layer beyond one an expert.
    """
    config = read_model_config(folder)
    tensors = hugging_face_names(list_tensors(folder), config)
    model = GptOssForCausalLM(config, groups, max_tokens, dtype, redundant_experts)
    load(named_weights(model), tensors, progress)
    return model.eval()
