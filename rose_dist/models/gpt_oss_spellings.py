"""GPT-OSS's config.json in its two spellings: Hugging Face's and OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rose_dist.errors import RoseError

Layout = Literal["hf", "openai"]
Weights = Literal["mxfp4", "bf16"]
"""How the experts' matrices are stored."""
Config = Mapping[str, Any]


class ConfigError(RoseError):
    """A config.json that this model family can't be built from."""


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

FIXED = {"swiglu_alpha": 1.702, "hidden_act": "silu", "attention_bias": True}
"""What every GPT-OSS has, by Hugging Face's keys."""
_IMPLIED = {"rms_norm_eps": 1e-5, **FIXED}
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


def layout_of(config: Config) -> Layout:
    """Which spelling a config.json has."""
    return "hf" if "model_type" in config else "openai"


def stored_config(config: Config, layout: Layout, weights: Weights) -> dict[str, Any]:
    """What the config.json of a checkpoint in `layout` says, given one in either spelling."""
    if layout == "openai":
        if weights != "mxfp4":
            raise ConfigError("OpenAI's layout stores experts in MXFP4 only; choose --layout hf for bf16")
        return dict(config) if layout_of(config) == "openai" else to_openai(config)
    kept = {key: value for key, value in to_hf(config).items() if key != "quantization_config"}
    return kept | ({"quantization_config": MXFP4_QUANTIZATION} if weights == "mxfp4" else {})


def to_hf(config: Config) -> dict[str, Any]:
    """The Hugging Face spelling of a config in either; without `quantization_config` where it was OpenAI's."""
    if layout_of(config) == "hf":
        return dict(config)
    missing = [key for key in _PLAIN.values() if key not in config]
    if missing:
        raise ConfigError(f"OpenAI's config.json lacks {', '.join(missing)}")
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
            raise ConfigError(f"OpenAI's layout can't say {key} = {found!r}: its code fixes {allowed!r}")
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
