"""What one step puts through the model on one rank, and the KV groups that its layers keep their state in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose_dist.kernels.qk_norm import PagedCache
from rose_dist.layers.attention_work import AttentionWork


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

    def storage(self, slots: int, dtype: torch.dtype, device: torch.device) -> KVStorage:
        """Zeros, since padding reads slots that were never written. One slot more than asked for: `KVStorage.spare`."""
        shape = (len(self.layers), slots + 1, self.key_heads, self.head_dim)
        if device.type != "cpu":
            return KVStorage(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
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

    @property
    def spare(self) -> int:
        """The last slot, which belongs to no block: rows that only fill up a batch write there."""
        return self.keys.shape[1] - 1

    def layer(self, place: int, slots: Tensor) -> PagedCache:
        return PagedCache(self.keys[place], self.values[place], slots)


@dataclass(frozen=True)
class GroupBatch:
    """Where one KV group writes and reads in this step.

    slots: int64 [tokens], the flat cache slot of each token.
    work: the attention work; its rows follow one another and cover all tokens.
    """

    storage: KVStorage
    slots: Tensor
    work: tuple[AttentionWork, ...]


@dataclass(frozen=True)
class ForwardBatch:
    """
    token_ids, positions: int64 [tokens]. An id of −1 − r stands for `sampled[r]`.
    logits_rows: int64 [rows], the tokens whose next-token logits are wanted; None: all, in order.
    groups: one entry a KV group of the model, in its order.
    live_rows: int32 [1] on the device: tokens from there on only fill up the batch, and no expert computes them. None:
        all are live.
    sampled: int64, what the step before has drawn, by its rows.
    """

    token_ids: Tensor
    positions: Tensor
    logits_rows: Tensor | None
    groups: tuple[GroupBatch, ...]
    live_rows: Tensor | None = None
    sampled: Tensor | None = None
