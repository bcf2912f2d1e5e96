"""GPT-OSS's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.layers.rotary import RotaryConfig
from rose_dist.models.gpt_oss_spellings import FIXED, ConfigError, layout_of, stored_config

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "sliding_window",
)
_LAYER_TYPES = ("sliding_attention", "full_attention")


@dataclass(frozen=True)
class GptOssConfig:
    """Field names are Hugging Face's.

    sliding_layers: for each layer, whether it sees only the last `sliding_window` tokens, the current one included.
    mxfp4: the experts' weights are stored as MXFP4 blocks and scales.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int
    sliding_layers: tuple[bool, ...]
    swiglu_limit: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rotary: RotaryConfig
    mxfp4: bool

    @property
    def max_context(self) -> int:
        return self.rotary.max_positions

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> GptOssConfig:
        """Raises `ConfigError` naming the field that is missing or has a value that is not supported."""
        try:
            return cls._from_hugging_face(
                stored_config(config, "hf", "mxfp4") if layout_of(config) == "openai" else config
            )
        except KeyError as missing:
            raise ConfigError(f"config.json has no field {missing}; a GPT-OSS checkpoint needs it") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"config.json has a field of another type than GPT-OSS's: {error}") from None

    @classmethod
    def _from_hugging_face(cls, config: dict[str, Any]) -> GptOssConfig:
        for name in _COUNTS:
            if not isinstance(config[name], int) or config[name] < 1:
                raise ConfigError(f"config.json's {name} is {config[name]!r}; it must be a whole number above 0")
        rope = config.get("rope_parameters") or {
            **(config.get("rope_scaling") or {}),
            "rope_theta": config.get("rope_theta", 150000.0),
        }
        for name, only in FIXED.items():
            if config.get(name, only) != only:
                raise ConfigError(f"config.json's {name} is {config[name]!r}; GPT-OSS's is {only!r}")
        layers = config["num_hidden_layers"]
        kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * layers
        if len(kinds) < layers or not set(kinds) <= set(_LAYER_TYPES):
            raise ConfigError(
                f"config.json's layer_types must have {layers} entries, each of {' and '.join(_LAYER_TYPES)}"
            )
        quantization = (config.get("quantization_config") or {}).get("quant_method")
        if quantization not in (None, "mxfp4"):
            raise ConfigError(f"quant_method {quantization!r} is not supported; GPT-OSS experts are mxfp4 or bf16")
        return cls(
            **{name: config[name] for name in _COUNTS},
            sliding_layers=tuple(kind == "sliding_attention" for kind in kinds[:layers]),
            swiglu_limit=config.get("swiglu_limit", 7.0),
            rms_norm_eps=config.get("rms_norm_eps", 1e-5),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            rotary=_rotary_from_hugging_face(rope, config),
            mxfp4=quantization == "mxfp4",
        )


def _rotary_from_hugging_face(rope: dict[str, Any], config: dict[str, Any]) -> RotaryConfig:
    kind = rope.get("rope_type", "default")
    plain = RotaryConfig(
        head_dim=config["head_dim"],
        theta=float(rope["rope_theta"]),
        max_positions=config["max_position_embeddings"],
    )
    if kind == "default":
        return plain
    if kind != "yarn":
        raise ConfigError(f"rope_type {kind!r} is not supported; GPT-OSS uses yarn or default")
    return RotaryConfig(
        head_dim=plain.head_dim,
        theta=plain.theta,
        max_positions=plain.max_positions,
        factor=float(rope["factor"]),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        original_context=rope["original_max_position_embeddings"],
        truncate=rope.get("truncate", True),
    )
