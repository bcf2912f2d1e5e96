"""The parts of a GPT-OSS checkpoint: what each holds, and its names and shapes in the two layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from rose_dist.kernels.mxfp4 import BLOCK, dequantize_mxfp4, quantize_mxfp4
from rose_dist.models.convert.config import GptOssShape, Layout
from rose_dist.models.convert.errors import ConversionError
from rose_dist.models.convert.source import CheckpointSource
from rose_dist.models.convert.writer import CheckpointWriter

Weights = Literal["mxfp4", "bf16"]
"""How the experts' matrices are stored."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that both layouts hold alike."""

    hf: str
    openai: str
    shape: tuple[int, ...]

    def read(self, source: CheckpointSource, layout: Layout) -> torch.Tensor:
        return source.read(self.hf if layout == "hf" else self.openai, self.shape)

    def write(self, writer: CheckpointWriter, layout: Layout, value: torch.Tensor) -> None:
        writer.add(self.hf if layout == "hf" else self.openai, value)


@dataclass(frozen=True)
class Qkv:
    """Query, key and value rows: three tensors in Hugging Face's layout, one in OpenAI's. Its value is the latter."""

    hf: tuple[str, str, str]
    openai: str
    rows: tuple[int, int, int]
    columns: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.rows), *self.columns)

    def read(self, source: CheckpointSource, layout: Layout) -> torch.Tensor:
        if layout == "openai":
            return source.read(self.openai, self.shape)
        return torch.cat([source.read(n, (r, *self.columns)) for n, r in zip(self.hf, self.rows, strict=True)])

    def write(self, writer: CheckpointWriter, layout: Layout, value: torch.Tensor) -> None:
        if layout == "openai":
            writer.add(self.openai, value)
            return
        for name, part in zip(self.hf, torch.split(value, list(self.rows)), strict=True):
            writer.add(name, part.clone())


@dataclass(frozen=True)
class Mxfp4:
    """[E, out, in] as blocks u8 [E, out, in/32, 16] and scales u8 [E, out, in/32]."""

    blocks: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class Experts:
    """The experts' matrices of one projection. Its value is `Mxfp4` or bf16 [E, out, in].

    Hugging Face's bf16 tensor is [E, in, out]; OpenAI's is [E, out, in].
    """

    hf: str
    openai: str
    experts: int
    outputs: int
    inputs: int

    def read(self, source: CheckpointSource, layout: Layout) -> Mxfp4 | torch.Tensor:
        name, blocks, scales = self._names(layout)
        if blocks in source:
            shape = (self.experts, self.outputs, self.inputs // BLOCK)
            return Mxfp4(source.read(blocks, (*shape, BLOCK // 2)), source.read(scales, shape))
        if layout == "openai":
            return source.read(name, (self.experts, self.outputs, self.inputs))
        return source.read(name, (self.experts, self.inputs, self.outputs)).transpose(1, 2)

    def write(self, writer: CheckpointWriter, layout: Layout, value: Mxfp4 | torch.Tensor) -> None:
        name, blocks, scales = self._names(layout)
        if isinstance(value, Mxfp4):
            writer.add(blocks, value.blocks)
            writer.add(scales, value.scales)
        else:
            writer.add(name, value if layout == "openai" else value.transpose(1, 2))

    def store_as(self, value: Mxfp4 | torch.Tensor, weights: Weights) -> Mxfp4 | torch.Tensor:
        """The same matrices in the other representation; unchanged where they have it already."""
        if isinstance(value, Mxfp4):
            return value if weights == "mxfp4" else dequantize_mxfp4(value.blocks, value.scales)
        if weights == "bf16":
            return value.bfloat16()
        if self.inputs % BLOCK:
            raise ConversionError(f"{self.hf}: MXFP4 needs {BLOCK} to divide the {self.inputs} inputs; keep bf16")
        per_expert = [quantize_mxfp4(expert.contiguous(), search=True) for expert in value]
        blocks, scales = (torch.stack(parts) for parts in zip(*per_expert, strict=True))
        if (scales == 255).any():
            raise ConversionError(f"{self.hf} holds NaN or infinity; MXFP4 has neither")
        return Mxfp4(blocks, scales)

    def _names(self, layout: Layout) -> tuple[str, str, str]:
        name, joint = (self.hf, "_") if layout == "hf" else (self.openai, ".")
        return name, f"{name}{joint}blocks", f"{name}{joint}scales"


Part = Tensor | Qkv | Experts


def parts_of(shape: GptOssShape) -> Iterator[Part]:
    """Every part of a checkpoint, in the order of the layers. The output projection is last, tied or not."""
    yield Tensor("model.embed_tokens.weight", "embedding.weight", (shape.vocabulary, shape.hidden))
    for layer in range(shape.layers):
        yield from _layer_parts(f"model.layers.{layer}.", f"block.{layer}.", shape)
    yield Tensor("model.norm.weight", "norm.scale", (shape.hidden,))
    yield Tensor("lm_head.weight", "unembedding.weight", (shape.vocabulary, shape.hidden))


def _layer_parts(hf: str, openai: str, shape: GptOssShape) -> Iterator[Part]:
    hidden, experts = shape.hidden, shape.experts
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Tensor(f"{hf}input_layernorm.weight", f"{openai}attn.norm.scale", (hidden,))
    for kind, columns in (("weight", (hidden,)), ("bias", ())):
        names = (f"{hf}self_attn.q_proj.{kind}", f"{hf}self_attn.k_proj.{kind}", f"{hf}self_attn.v_proj.{kind}")
        yield Qkv(names, f"{openai}attn.qkv.{kind}", (queries, keys, keys), columns)
    yield Tensor(f"{hf}self_attn.sinks", f"{openai}attn.sinks", (shape.heads,))
    yield Tensor(f"{hf}self_attn.o_proj.weight", f"{openai}attn.out.weight", (hidden, queries))
    yield Tensor(f"{hf}self_attn.o_proj.bias", f"{openai}attn.out.bias", (hidden,))
    yield Tensor(f"{hf}post_attention_layernorm.weight", f"{openai}mlp.norm.scale", (hidden,))
    yield Tensor(f"{hf}mlp.router.weight", f"{openai}mlp.gate.weight", (experts, hidden))
    yield Tensor(f"{hf}mlp.router.bias", f"{openai}mlp.gate.bias", (experts,))
    for hf_name, openai_name, outputs, inputs in (
        ("gate_up_proj", "mlp1", 2 * shape.intermediate, hidden),
        ("down_proj", "mlp2", hidden, shape.intermediate),
    ):
        name = f"{hf}mlp.experts.{hf_name}"
        yield Experts(name, f"{openai}mlp.{openai_name}_weight", experts, outputs, inputs)
        yield Tensor(f"{name}_bias", f"{openai}mlp.{openai_name}_bias", (experts, outputs))
