"""What an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from rose_dist.errors import RoseError
from rose_dist.layers.expert_matrices import MoeActivations, MoeWeights

DType = Literal["float32", "bfloat16"]
LoadFormat = Literal["checkpoint", "random"]
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Sizes that batches of decode steps are filled up to on a GPU."""
PREFILL_LADDER = (
    16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, *range(1280, 4096 + 1, 256),
)  # fmt: skip
"""Token counts that steps with prompts in them are filled up to; experts compute no row that only fills up. Above, a
GPU is busy for several times as long as the host needs to launch kernel by kernel, even on cores that others use too.
"""


class EngineConfigError(RoseError):
    """A setting out of range; named as the command line names it."""


@dataclass(frozen=True)
class EngineConfig:
    """
    model: checkpoint folder; with `load_format` random a folder with a config.json, or a preset's name.
    device: this rank's.
    dtype: of weights, activations and KV cache.
    moe_weights: how the experts' matrices are held in memory.
    moe_activations: what the experts multiply a prompt's rows as; FP8 on Hopper, with weights in MXFP4.
    block_size: tokens a KV block.
    kv_tokens: tokens that the KV cache of one rank holds, all requests together; None: what the memory leaves room for,
        on a GPU only.
    memory_share: of the GPU's memory, that weights, KV cache and activations may take.
    max_step_tokens: the token budget of one step on one rank; longer prompts are prefilled in chunks of it.
    max_running: requests that run at once on one data-parallel rank.
    max_waiting: requests that may queue for that; more are turned away.
    max_context: most tokens of prompt and output; None is the model's own.
    prefix_cache: reuse the blocks of equal prompt beginnings.
    redundant_experts: slots of each layer, over all ranks, for copies of popular experts.
    rail_forwarding: between nodes, send a row of an expert once to each node, where it is passed on.
    ladder: sizes of decode batches with inputs of their own on the device, on a GPU captured as graphs; empty: every
        step brings its inputs along.
    prefill_ladder: token counts of other steps for which a GPU captures graphs, where a replica has one GPU: of all but
        attention, on Hopper with it where a step has prompts alone; empty: none.
    overlap: plan and launch a step before the tokens of the one before are read.
    """

    model: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: DType = "float32"
    load_format: LoadFormat = "checkpoint"
    moe_weights: MoeWeights = "bf16"
    moe_activations: MoeActivations = "bf16"
    block_size: int = 16
    kv_tokens: int | None = 32768
    memory_share: float = 0.9
    max_step_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 100
    max_context: int | None = None
    prefix_cache: bool = True
    redundant_experts: int = 0
    rail_forwarding: bool = False
    ladder: tuple[int, ...] = ()
    prefill_ladder: tuple[int, ...] = ()
    overlap: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_tokens", "max_step_tokens", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineConfigError(f"--{name.replace('_', '-')} is at least 1, got {value}")
        if self.max_waiting < 0:
            raise EngineConfigError(f"--max-waiting is at least 0, got {self.max_waiting}")
        if self.max_running > self.max_step_tokens:
            raise EngineConfigError(
                f"--max-running {self.max_running}: so many requests need --max-step-tokens of at least as many, "
                f"got {self.max_step_tokens}"
            )
        if self.kv_tokens is None and self.device.type == "cpu":
            raise EngineConfigError("--kv-tokens must be given on a CPU: only a GPU's memory is the engine's alone")
        if self.kv_tokens is not None and self.kv_tokens < self.block_size:
            raise EngineConfigError(
                f"--kv-tokens {self.kv_tokens} is less than one block, --block-size {self.block_size}"
            )
        if self.moe_activations == "fp8" and self.moe_weights != "mxfp4":
            raise EngineConfigError(
                f"--moe-activations fp8 takes experts held as MXFP4, not as {self.moe_weights}; choose --moe-weights "
                "mxfp4, or --moe-activations bf16"
            )
        if not 0 < self.memory_share <= 1:
            raise EngineConfigError(f"--gpu-memory-utilization is above 0 and at most 1, got {self.memory_share}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


def ladder_for(max_running: int) -> tuple[int, ...]:
    """The ladder up to `max_running`, which is its last size."""
    return (*(size for size in LADDER if size < max_running), max_running)


def prefill_ladder_for(max_step_tokens: int) -> tuple[int, ...]:
    """The part of the ladder that steps can need."""
    most = min(max_step_tokens, PREFILL_LADDER[-1])
    return (*(size for size in PREFILL_LADDER if size < most), most)
