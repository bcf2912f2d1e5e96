"""What an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rose_dist.errors import RoseError

DType = Literal["float32", "bfloat16"]


class EngineConfigError(RoseError):
    """A setting out of range."""


@dataclass(frozen=True)
class EngineConfig:
    """
    model: checkpoint folder.
    dtype: of weights, activations and KV cache.
    block_size: tokens a KV block.
    kv_tokens: tokens that the KV cache of one rank holds, all requests together.
    max_step_tokens: the token budget of one step on one rank; longer prompts are prefilled in chunks of it.
    max_running: requests that run at once on one data-parallel rank.
    max_waiting: requests that may queue for that; more are turned away.
    max_context: most tokens of prompt and output; None is the model's own.
    prefix_cache: reuse the blocks of equal prompt beginnings.
    redundant_experts: slots of each layer, over all ranks, for copies of popular experts.
    """

    model: Path
    dtype: DType = "float32"
    block_size: int = 16
    kv_tokens: int = 32768
    max_step_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 100
    max_context: int | None = None
    prefix_cache: bool = True
    redundant_experts: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_tokens", "max_step_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise EngineConfigError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.max_waiting < 0:
            raise EngineConfigError(f"max_waiting is at least 0, got {self.max_waiting}")
        if self.max_running > self.max_step_tokens:
            raise EngineConfigError(
                f"max_running {self.max_running} requests need max_step_tokens of at least as many, "
                f"got {self.max_step_tokens}"
            )
        if self.kv_tokens < self.block_size:
            raise EngineConfigError(f"kv_tokens {self.kv_tokens} is less than one block of {self.block_size}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16
