"""GPT-OSS's config.json in its two spellings: Hugging Face's and OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rose_dist.models.convert.errors import ConversionError

Layout = Literal["hf", "openai"]
Config = Mapping[str, Any]

_PLAIN = {
    "num_hidden_layers": "num_hidden_layers",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "swiglu_limit": "swiglu_limit",
    "head_dim": "head_dim",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "sliding_window": "sliding_window",
}
"""Hugging Face's key to OpenAI's."""

_IMPLIED = {"rms_norm_eps": 1e-5, "swiglu_alpha": 1.702, "hidden_act": "silu", "attention_bias": True}
"""What OpenAI's code fixes and Hugging Face's config states."""

MXFP4_QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}

_HARMONY_VOCABULARY = 201088
_HARMONY_SPECIAL = {"eos_token_id": 200002, "pad_token_id": 199999}


@dataclass(frozen=True)
class GptOssShape:
    """The numbers that fix the shapes of a GPT-OSS checkpoint's tensors."""

    layers: int
    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    tied: bool
    """The output projection is the embedding; Hugging Face's layout stores it once."""

    @classmethod
    def from_hf(cls, config: Config) -> GptOssShape:
        if config.get("model_type") != "gpt_oss":
            raise ConversionError(f"model_type is {config.get('model_type')!r}; only gpt_oss can be converted")
        keys = {
            "layers": "num_hidden_layers",
            "vocabulary": "vocab_size",
            "hidden": "hidden_size",
            "intermediate": "intermediate_size",
            "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
            "experts": "num_local_experts",
        }
        wrong = [key for key in keys.values() if not isinstance(config.get(key), int) or config[key] <= 0]
        if wrong:
            raise ConversionError(f"config.json must give a whole number above 0 for {', '.join(wrong)}")
        return cls(**{field: config[key] for field, key in keys.items()}, tied=config.get("tie_word_embeddings", False))


def layout_of(config: Config) -> Layout:
    """Which spelling a config.json has."""
    if "experts_per_token" in config:
        return "openai"
    if "num_experts_per_tok" in config:
        return "hf"
    raise ConversionError(
        "config.json is neither Hugging Face's (num_experts_per_tok) nor OpenAI's (experts_per_token) for GPT-OSS"
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The Hugging Face spelling of a config in either; without `quantization_config` where it was OpenAI's."""
    if layout_of(config) == "hf":
        return dict(config)
    missing = [key for key in _PLAIN.values() if key not in config]
    if missing:
        raise ConversionError(f"OpenAI's config.json lacks {', '.join(missing)}")
    factor = float(config.get("rope_scaling_factor", 32.0))
    context = int(config.get("initial_context_length", 4096))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.get("rope_theta", 150000.0))}
    if factor > 1:
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": float(config.get("rope_ntk_beta", 32.0)),
            "beta_slow": float(config.get("rope_ntk_alpha", 1.0)),
            "original_max_position_embeddings": context,
            "truncate": False,
        }
    layers = config["num_hidden_layers"]
    special = _HARMONY_SPECIAL if config["vocab_size"] == _HARMONY_VOCABULARY else {}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        **{key: config[other] for key, other in _PLAIN.items()},
        **_IMPLIED,
        "layer_types": _alternating(layers),
        "max_position_embeddings": int(context * max(factor, 1)),
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        **special,
    }


def to_openai(config: Config) -> dict[str, Any]:
    """OpenAI's spelling of Hugging Face's config; refuses what OpenAI's code could not run the same way."""
    rope = {"rope_theta": config.get("rope_theta")} | (
        config.get("rope_parameters") or config.get("rope_scaling") or {}
    )
    checks = {key: (config.get(key, value), value) for key, value in _IMPLIED.items()}
    layers = config["num_hidden_layers"]
    checks["layer_types"] = (config.get("layer_types") or _alternating(layers), _alternating(layers))
    yarn = rope.get("rope_type", "default") == "yarn"
    if yarn:
        checks["rope truncate"] = (rope.get("truncate", True), False)
    else:
        checks["rope_type"] = (rope.get("rope_type", "default"), "default")
    for key, (found, allowed) in checks.items():
        if found != allowed:
            raise ConversionError(f"OpenAI's layout can't say {key} = {found!r}: its code fixes {allowed!r}")
    context = rope["original_max_position_embeddings"] if yarn else config["max_position_embeddings"]
    return {other: config[key] for key, other in _PLAIN.items()} | {
        "initial_context_length": context,
        "rope_theta": rope["rope_theta"],
        "rope_scaling_factor": rope["factor"] if yarn else 1.0,
        "rope_ntk_alpha": rope.get("beta_slow", 1.0),
        "rope_ntk_beta": rope.get("beta_fast", 32.0),
    }


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
