"""How large the block pools are: from a number of tokens, or from the memory that is there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import torch

from rose_dist.comm.layout import Layout
from rose_dist.comm.world import Groups
from rose_dist.engine.config import EngineConfig, EngineConfigError
from rose_dist.engine.kv_cache import GroupSpec
from rose_dist.kernels.deep_gemm import ALIGNMENT
from rose_dist.layers.forward_batch import KVGroup
from rose_dist.models.gpt_oss_config import GptOssConfig

_MOST_BLOCKS = 1 << 32


def group_specs(groups: Sequence[KVGroup], config: EngineConfig) -> list[GroupSpec]:
    """Sizes of the block pools for `config.kv_tokens`. A pool of a group with a window holds the windows of all running
    requests, one step's tokens, and as much again for beginnings that may be used once more, but never more than the
    tokens of all.
    """
    assert config.kv_tokens is not None
    return _specs(groups, config, config.kv_tokens // config.block_size)


def kv_bytes(groups: Sequence[KVGroup], specs: Sequence[GroupSpec], config: EngineConfig) -> int:
    """Memory of the KV cache once every block has been written."""
    return sum(
        group.bytes_per_token(config.torch_dtype) * spec.blocks * config.block_size
        for group, spec in zip(groups, specs, strict=True)
    )


def fit_kv(config: EngineConfig, groups: Sequence[KVGroup], model: GptOssConfig, ranks: Groups) -> EngineConfig:
    """With the KV tokens that the GPU's memory leaves room for once the model is there, unless they are given. All
    tensor-parallel ranks, whose blocks are the same, go by the least.
    """
    if config.kv_tokens is not None:
        return config
    torch.cuda.synchronize(config.device)
    free, total = torch.cuda.mem_get_info(config.device)
    budget = free - int((1 - config.memory_share) * total) - activation_bytes(config, model, ranks.layout)
    blocks = -ranks.tp.all_reduce_max([-fitting_blocks(groups, config, budget)])[0]
    if blocks < 1:
        raise EngineConfigError(
            f"{config.device}, or a peer's GPU, has too little memory left beside the weights for a KV cache within "
            f"{config.memory_share:.0%} of it ({free / 1e9:.1f} GB here); lower --max-step-tokens, or "
            "raise --gpu-memory-utilization"
        )
    return replace(config, kv_tokens=blocks * config.block_size)


def fitting_blocks(groups: Sequence[KVGroup], config: EngineConfig, budget: int) -> int:
    """The most blocks a full-attention group for which all pools together take at most `budget` bytes."""
    return bisect_right(
        range(1, _MOST_BLOCKS), budget, key=lambda blocks: kv_bytes(groups, _specs(groups, config, blocks), config)
    )


def activation_bytes(config: EngineConfig, model: GptOssConfig, layout: Layout) -> int:
    """What a step takes beside weights and KV cache, generously: rows that experts work on, of all ranks that share
    them and might send theirs to this one, and, in FP8, that pad each expert's, logits and their sorted copies, and
    what libraries keep for themselves. Prefill graphs have memory of their own.
    """
    tokens, size = config.max_step_tokens + max(config.prefill_ladder, default=0), config.torch_dtype.itemsize
    dense = tokens * (8 * model.hidden_size + 3 * model.num_attention_heads * model.head_dim) * size
    reaching = tokens if layout.moe_mode == "tensor_parallel" else layout.ep * -(-tokens // layout.tp)
    rows = reaching * model.num_experts_per_tok
    if config.moe_weights == "fp8":
        rows += model.num_local_experts * ALIGNMENT
    experts = rows * (3 * model.hidden_size + 3 * model.intermediate_size) * size
    logits = config.max_running * model.vocab_size * 4 * 8
    return dense + experts + logits + (3 << 30)


def _specs(groups: Sequence[KVGroup], config: EngineConfig, blocks: int) -> list[GroupSpec]:
    specs = []
    for group in groups:
        size = blocks
        if group.window is not None:
            per_request = -(-group.window // config.block_size) + 1
            step = -(-config.max_step_tokens // config.block_size)
            size = min(blocks, 2 * (config.max_running * per_request + step))
        specs.append(GroupSpec(size, group.window))
    return specs
