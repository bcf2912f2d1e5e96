"""Translating a checkpoint between Hugging Face's layout and OpenAI's, and its experts between MXFP4 and bf16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rose_dist.models.convert.config import MXFP4_QUANTIZATION, GptOssShape, Layout, layout_of, to_hf, to_openai
from rose_dist.models.convert.errors import ConversionError
from rose_dist.models.convert.parts import Experts, Part, Tensor, Weights, parts_of
from rose_dist.models.convert.source import CheckpointSource
from rose_dist.models.convert.writer import DEFAULT_SHARD_BYTES, CheckpointWriter


def convert_checkpoint(
    folder: Path,
    target: Path,
    *,
    layout: Layout | None = None,
    weights: Weights | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the checkpoint in `folder` to `target` in another layout or representation, one tensor at a time.

    Nothing but the layout changes, bit for bit, where `weights` is what the source has; MXFP4 to bf16 is exact too.

    Args:
        layout: None keeps the source's.
        weights: of the experts' matrices; None keeps the source's.

    Raises:
        ConversionError: a tensor is missing, surplus or misshapen, or the target layout can't express the config.
    """
    with CheckpointSource(folder) as source, CheckpointWriter(target, shard_bytes) as writer:
        config = source.config()
        found = layout_of(config)
        wanted = layout or found
        shape = GptOssShape.from_hf(to_hf(config))
        stored = weights or _stored_weights(source, parts_of(shape))
        writer.add_json("config.json", stored_config(config, wanted, stored))
        for part in parts_of(shape):
            _convert_part(part, source, found, writer=writer, wanted=wanted, weights=stored, tied=shape.tied)
        if source.unread():
            raise ConversionError(f"{folder} holds tensors that GPT-OSS has not: {', '.join(source.unread()[:10])}")
        for file in source.companions():
            writer.add_file(file)


def stored_config(config: Mapping[str, Any], layout: Layout, weights: Weights) -> dict[str, Any]:
    """What the config.json of a checkpoint in `layout` says, given one of either layout."""
    if layout == "openai":
        return dict(config) if layout_of(config) == "openai" else to_openai(config)
    kept = {key: value for key, value in to_hf(config).items() if key != "quantization_config"}
    return kept | ({"quantization_config": MXFP4_QUANTIZATION} if weights == "mxfp4" else {})


def _convert_part(
    part: Part,
    source: CheckpointSource,
    found: Layout,
    *,
    writer: CheckpointWriter,
    wanted: Layout,
    weights: Weights,
    tied: bool,
) -> None:
    if isinstance(part, Experts):
        part.write(writer, wanted, part.store_as(part.read(source, found), weights))
        return
    if tied and part.hf == "lm_head.weight":
        if wanted == "openai":  # which always stores it
            assert isinstance(part, Tensor)
            writer.add(part.openai, source.read("model.embed_tokens.weight", part.shape))
        return
    part.write(writer, wanted, part.read(source, found))


def _stored_weights(source: CheckpointSource, parts: Iterable[Part]) -> Weights:
    experts = next(part for part in parts if isinstance(part, Experts))
    return "bf16" if experts.hf in source or experts.openai in source else "mxfp4"
