"""OpenAI's original GPT-OSS tensor names, mapped to Hugging Face's and back."""

from __future__ import annotations

import re

from rose_dist.models.checkpoint import CheckpointError, StoredTensor
from rose_dist.models.gpt_oss_config import GptOssConfig

_TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "unembedding.weight": "lm_head.weight",
    "norm.scale": "model.norm.weight",
}

_LAYER = {
    "attn.norm.scale": "input_layernorm.weight",
    "attn.out.weight": "self_attn.o_proj.weight",
    "attn.out.bias": "self_attn.o_proj.bias",
    "attn.sinks": "self_attn.sinks",
    "mlp.norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    "mlp.mlp1_weight.blocks": "mlp.experts.gate_up_proj_blocks",
    "mlp.mlp1_weight.scales": "mlp.experts.gate_up_proj_scales",
    "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_weight.blocks": "mlp.experts.down_proj_blocks",
    "mlp.mlp2_weight.scales": "mlp.experts.down_proj_scales",
    "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}

_TOP_INVERSE = {theirs: ours for ours, theirs in _TOP.items()}
_LAYER_INVERSE = {theirs: ours for ours, theirs in _LAYER.items()}


def hugging_face_names(tensors: dict[str, StoredTensor], config: GptOssConfig) -> dict[str, StoredTensor]:
    """The same tensors under Hugging Face's names; what is named so already passes through.

    The fused `attn.qkv` becomes three views of its rows, in the order q, k, v.
    """
    if not any(name.startswith("block.") for name in tensors):
        return tensors
    mapped: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        matched = re.fullmatch(r"block\.(\d+)\.(.+)", name)
        if matched is None:
            mapped[_TOP.get(name, name)] = tensor
            continue
        layer, rest = matched.groups()
        prefix = f"model.layers.{layer}."
        if rest.startswith("attn.qkv."):
            mapped |= {prefix + key: part for key, part in _split_qkv(rest, tensor, config)}
        else:
            mapped[prefix + _LAYER.get(rest, rest)] = tensor
    return mapped


def _split_qkv(name: str, tensor: StoredTensor, config: GptOssConfig) -> list[tuple[str, StoredTensor]]:
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    kind = name.removeprefix("attn.qkv.")
    if tensor.shape[0] != queries + 2 * keys:
        raise CheckpointError(
            f"{tensor.name} has {tensor.shape[0]} rows instead of {queries + 2 * keys} for q, k and v"
        )
    starts = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}
    return [(f"self_attn.{letter}_proj.{kind}", tensor.rows_of(slice(*rows))) for letter, rows in starts.items()]


def openai_name(name: str) -> str:
    """OpenAI's name for a tensor that both layouts hold alike; of q, k and v, the fused tensor's."""
    matched = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if matched is None:
        return _TOP_INVERSE[name]
    layer, rest = matched.groups()
    fused = re.fullmatch(r"self_attn\.[qkv]_proj\.(weight|bias)", rest)
    return f"block.{layer}." + (f"attn.qkv.{fused.group(1)}" if fused else _LAYER_INVERSE[rest])
