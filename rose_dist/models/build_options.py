"""What a model is built with beyond its own configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rose_dist.comm.world import Groups
from rose_dist.layers.expert_matrices import MoeActivations, MoeWeights


@dataclass(frozen=True)
class BuildOptions:
    """
    max_tokens: most tokens of one step on one rank.
    redundant_experts: slots of each layer beyond one an expert, for copies of popular experts.
    dtype: of weights and activations.
    moe_weights: how the experts' matrices are held; MXFP4 only of checkpoints that store it, FP8 of any.
    moe_activations: what many rows of the experts are multiplied as; FP8 only with weights in MXFP4.
    rail_forwarding: as in `AllToAllConfig`, for experts on GPUs of several nodes.
    """

    groups: Groups
    max_tokens: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    moe_weights: MoeWeights = "bf16"
    redundant_experts: int = 0
    moe_activations: MoeActivations = "bf16"
    rail_forwarding: bool = False
