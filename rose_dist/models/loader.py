"""From a checkpoint folder to a model with this rank's weights."""

from __future__ import annotations

import logging
from pathlib import Path

from rose_dist.models.build_options import BuildOptions
from rose_dist.models.checkpoint import CheckpointError, Progress, list_tensors, load, named_weights, read_config
from rose_dist.models.gpt_oss import GptOssForCausalLM
from rose_dist.models.gpt_oss_config import GptOssConfig
from rose_dist.models.gpt_oss_layouts import hugging_face_names
from rose_dist.models.presets import PRESETS
from rose_dist.models.random_weights import fill_randomly

logger = logging.getLogger(__name__)


def read_model_config(folder: Path) -> GptOssConfig:
    """The configuration alone; quick, so that mistakes are found before any weight is read. A preset's name stands for
    its configuration where there is no such folder.
    """
    preset = None if folder.exists() else PRESETS.get(str(folder))
    config = read_config(folder) if preset is None else dict(preset)
    architectures = config.get("architectures", ["GptOssForCausalLM"])
    if architectures != ["GptOssForCausalLM"]:
        raise CheckpointError(f"{folder} holds {', '.join(architectures)}; supported is GptOssForCausalLM")
    return GptOssConfig.from_json(config)


def load_model(folder: Path, options: BuildOptions, progress: Progress | None = None) -> GptOssForCausalLM:
    """Build the model and read this rank's part of its weights, straight to its device."""
    config = read_model_config(folder)
    if not folder.exists():
        raise CheckpointError(f"there is no folder {folder}; give a checkpoint's, or --load-format random")
    tensors = hugging_face_names(list_tensors(folder), config)
    model = _build(config, options)
    load(named_weights(model), tensors, progress)
    return model.eval()


def random_model(folder: Path, options: BuildOptions, seed: int = 0) -> GptOssForCausalLM:
    """The model of a config.json alone, with random weights made on its device."""
    model = _build(read_model_config(folder), options)
    fill_randomly(model, seed)
    return model.eval()


def _build(config: GptOssConfig, options: BuildOptions) -> GptOssForCausalLM:
    """The model with all its memory taken, and nothing in it."""
    model = GptOssForCausalLM(config, options)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    logger.info(
        "weights take %.2f GB on %s, of which %.2f GB are this rank's experts as %s",
        sum(sizes.values()) / 1e9, options.device, experts / 1e9, options.moe_weights,
    )  # fmt: skip
    return model
