"""Runs steps on this rank's part of the model: plans become tensors, tensors become logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rose_dist.engine.attention_planner import AttentionPlanner
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.kv_cache import GroupSpec
from rose_dist.engine.step import Step
from rose_dist.layers.forward_batch import ForwardBatch, KVGroup
from rose_dist.models.gpt_oss import GptOssForCausalLM


def group_specs(groups: Sequence[KVGroup], config: EngineConfig) -> list[GroupSpec]:
    """Sizes of the block pools. A pool of a group with a window holds the windows of all running requests, one step's
    tokens, and as much again for beginnings that may be used once more, but never more than the tokens of all.
    """
    blocks = config.kv_tokens // config.block_size
    specs = []
    for group in groups:
        size = blocks
        if group.window is not None:
            per_request = -(-group.window // config.block_size) + 1
            step = -(-config.max_step_tokens // config.block_size)
            size = min(blocks, 2 * (config.max_running * per_request + step))
        specs.append(GroupSpec(size, group.window))
    return specs


class ModelRunner:
    """The model, its KV storage and the way from a `Step` to a `ForwardBatch`."""

    def __init__(self, model: GptOssForCausalLM, config: EngineConfig) -> None:
        self.model = model
        self.config = config
        self.specs = group_specs(model.kv_groups, config)
        dtype = config.torch_dtype
        self.planners = [
            AttentionPlanner(
                number,
                spec.window,
                config.block_size,
                group.storage(spec.blocks * config.block_size, dtype),
                dtype,
            )
            for number, (group, spec) in enumerate(zip(model.kv_groups, self.specs, strict=True))
        ]

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache once every block has been written."""
        return sum(
            group.bytes_per_token(self.config.torch_dtype) * spec.blocks * self.config.block_size
            for group, spec in zip(self.model.kv_groups, self.specs, strict=True)
        )

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor | None:
        """Collective over the ranks that share experts or heads; an empty step takes part in their exchanges.

        Returns:
            fp32 [sequences that sample, vocabulary] on the first rank of the tensor-parallel group, None elsewhere.
        """
        logits: Tensor | None = self.model(self._batch(step))
        return logits

    def _batch(self, step: Step) -> ForwardBatch:
        sequences = step.sequences
        tokens = [token for sequence in sequences for token in sequence.tokens]
        positions = [position for sequence in sequences for position in range(sequence.start, sequence.end)]
        ends = _running_sum(len(sequence.tokens) for sequence in sequences)
        last = [end - 1 for end, sequence in zip(ends, sequences, strict=True) if sequence.sample]
        return ForwardBatch(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(last, dtype=torch.int64),
            tuple(planner.plan(sequences) for planner in self.planners),
        )


def _running_sum(counts: Iterator[int]) -> list[int]:
    total, sums = 0, []
    for count in counts:
        total += count
        sums.append(total)
    return sums
