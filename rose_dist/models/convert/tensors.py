"""The tensors of a GPT-OSS checkpoint, as a stream in the order of the layers under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from rose_dist.kernels.mxfp4 import BLOCK
from rose_dist.layers.weights import Piece
from rose_dist.models.checkpoint import Reader, check, list_tensors
from rose_dist.models.gpt_oss_config import GptOssConfig
from rose_dist.models.gpt_oss_layouts import hugging_face_names
from rose_dist.models.gpt_oss_spellings import Weights

Stream = Iterator[tuple[str, torch.Tensor]]
"""(name, tensor). An expert matrix's scales follow its blocks, and k and v follow q."""


def matrix_shapes(config: GptOssConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape; an expert matrix counts as one, [experts, outputs, inputs], however it is stored."""
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def _layer_shapes(config: GptOssConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.sinks": (config.num_attention_heads,),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.o_proj.bias": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, 2 * intermediate, hidden),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * intermediate),
        "mlp.experts.down_proj": (experts, hidden, intermediate),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }


def is_expert_matrix(name: str) -> bool:
    return name.endswith((".gate_up_proj", ".down_proj"))


def read_checkpoint(folder: Path, config: GptOssConfig) -> Stream:
    """Every tensor of a checkpoint in either layout, each read when it is asked for.

    Raises:
        CheckpointError: tensors are missing, surplus or misshapen; the message lists them.
    """
    tensors = hugging_face_names(list_tensors(folder), config)
    pieces = list(_pieces(config))
    check(pieces, tensors)
    with Reader(tensors) as reader:
        for piece in pieces:
            yield piece.name, reader.read(piece)


def _pieces(config: GptOssConfig) -> Iterator[Piece]:
    for name, shape in matrix_shapes(config).items():
        if not is_expert_matrix(name):
            yield Piece.of(name, shape)
        elif config.mxfp4:
            scales = (*shape[:2], shape[2] // BLOCK)
            yield Piece.of(f"{name}_blocks", (*scales, BLOCK // 2), dtype=torch.uint8)
            yield Piece.of(f"{name}_scales", scales, dtype=torch.uint8)
        else:
            yield Piece.of(name, (shape[0], shape[2], shape[1]))


def weights_of(config: GptOssConfig) -> Weights:
    return "mxfp4" if config.mxfp4 else "bf16"
