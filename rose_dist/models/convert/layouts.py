"""Translating a checkpoint between Hugging Face's layout and OpenAI's, and its experts between MXFP4 and bf16."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from rose_dist.kernels.mxfp4 import BLOCK, SCALE_NAN, dequantize_mxfp4, quantize_mxfp4
from rose_dist.models.checkpoint import CheckpointError, read_config
from rose_dist.models.convert.tensors import Stream, is_expert_matrix, read_checkpoint, weights_of
from rose_dist.models.convert.writer import DEFAULT_SHARD_BYTES, CheckpointWriter
from rose_dist.models.gpt_oss_config import GptOssConfig
from rose_dist.models.gpt_oss_layouts import openai_name
from rose_dist.models.gpt_oss_spellings import Layout, Weights, layout_of, stored_config


def convert_checkpoint(
    folder: Path,
    target: Path,
    *,
    layout: Layout | None = None,
    weights: Weights | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the checkpoint in `folder` to `target` in another layout or representation, one tensor at a time.

    Nothing changes, bit for bit, but names and the place of q, k and v, where `weights` is what the source has. MXFP4
    to bf16 is exact too.

    Args:
        layout: None keeps the source's.
        weights: of the experts' matrices; None keeps the source's. OpenAI's layout has MXFP4 only.

    Raises:
        CheckpointError: a tensor is missing, surplus or misshapen.
        ConfigError: the target layout can't express the config.
    """
    source_config = read_config(folder)
    config = GptOssConfig.from_json(source_config)
    layout = layout or layout_of(source_config)
    weights = weights or weights_of(config)
    with CheckpointWriter(target, shard_bytes) as writer:
        writer.add_json("config.json", stored_config(source_config, layout, weights))
        stream = experts_as(weights, read_checkpoint(folder, config))
        writer.add_all(openai_tensors(stream) if layout == "openai" else stream)
        for file in _companions(folder):
            writer.add_file(file)


def experts_as(weights: Weights, stream: Stream) -> Stream:
    """The same stream with every expert matrix as MXFP4 blocks and scales, or as bf16 [experts, inputs, outputs]."""
    blocks: torch.Tensor | None = None
    for name, tensor in stream:
        if weights == "bf16" and name.endswith("_blocks"):
            blocks = tensor
        elif weights == "bf16" and name.endswith("_scales"):
            assert blocks is not None, f"{name} comes before its blocks"
            yield name.removesuffix("_scales"), dequantize_mxfp4(blocks, tensor).transpose(1, 2)
        elif weights == "mxfp4" and is_expert_matrix(name):
            yield from _quantize(name, tensor.transpose(1, 2))
        else:
            yield name, tensor


def _quantize(name: str, matrix: torch.Tensor) -> Stream:
    if matrix.shape[-1] % BLOCK:
        raise CheckpointError(f"{name}: MXFP4 needs {BLOCK} to divide the {matrix.shape[-1]} inputs; keep bf16")
    blocks, scales = quantize_mxfp4(matrix, search=True)
    if (scales == SCALE_NAN).any():
        raise CheckpointError(f"{name} holds NaN or infinity, which MXFP4 has not")
    yield f"{name}_blocks", blocks
    yield f"{name}_scales", scales


def openai_tensors(stream: Stream) -> Stream:
    """The same stream under OpenAI's names, with q, k and v fused, and tied output weights written out."""
    fused: list[torch.Tensor] = []
    embedding: torch.Tensor | None = None
    names = set()
    for name, tensor in stream:
        names.add(name)
        if name == "model.embed_tokens.weight":
            embedding = tensor
        if re.search(r"\.[qkv]_proj\.", name):
            fused.append(tensor)
            if len(fused) == 3:
                yield openai_name(name), torch.cat(fused)
                fused = []
        else:
            yield openai_name(name), tensor
    if "lm_head.weight" not in names and embedding is not None:
        yield openai_name("lm_head.weight"), embedding.clone()


def _companions(folder: Path) -> Iterator[Path]:
    """The folder's other files: tokenizer, chat template, generation settings, licence."""
    for path in sorted(folder.iterdir()):
        weights = path.suffix == ".safetensors" or path.name == "model.safetensors.index.json"
        if path.is_file() and not weights and path.name != "config.json":
            yield path
