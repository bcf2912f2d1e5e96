"""What one step puts through the model on one rank, and the KV groups that its layers keep their state in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose_dist.kernels.attention import AttentionBlock


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep their keys and values alike, in a block pool of their own.

    window: a layer sees this many tokens, the current one included; None sees all.
    """

    layers: tuple[int, ...]
    window: int | None
    key_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * len(self.layers) * self.key_heads * self.head_dim * dtype.itemsize

    def storage(self, slots: int, dtype: torch.dtype) -> KVStorage:
        """On the CPU. Zeros, since padding reads slots that were never written; memory is taken as it is written."""
        shape = (len(self.layers), slots, self.key_heads, self.head_dim)
        # numpy's zeros are pages that the kernel has yet to map, torch's are written: 2 GB a rank with 32,768 tokens.
        keys, values = (
            torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
            for _ in range(2)
        )
        return KVStorage(keys, values)


@dataclass(frozen=True)
class KVStorage:
    """One group's cache. keys, values: [layers of the group, slots, key heads, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class GroupBatch:
    """Where one KV group writes and reads in this step.

    slots: int64 [tokens], the flat cache slot of each token.
    blocks: the attention work; their rows follow one another and cover all tokens.
    """

    storage: KVStorage
    slots: Tensor
    blocks: tuple[AttentionBlock, ...]


@dataclass(frozen=True)
class ForwardBatch:
    """
    token_ids, positions: int64 [tokens].
    logits_rows: int64 [rows], the tokens whose next-token logits are wanted.
    groups: one entry a KV group of the model, in its order.
    """

    token_ids: Tensor
    positions: Tensor
    logits_rows: Tensor
    groups: tuple[GroupBatch, ...]
