"""Where a step's chunks of prompts have their queries and keys, in one place on the device: attention in a captured
graph reads them there, whatever the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.attention_planner import first_key, single_tokens
from rose_dist.engine.step import SequenceStep
from rose_dist.layers.attention_work import PagedChunks
from rose_dist.layers.forward_batch import KVGroup

MOST_SEQUENCES = 31
"""In a step; with one, their starts are 32 numbers."""
MOST_KEYS = 8192
"""Of a step in a KV group. With more, attention takes so long that a graph saves nothing worth it."""
_LINE = MOST_SEQUENCES + 1


@dataclass(frozen=True)
class ChunkArrays:
    """A step's numbers on the host. starts: int32 [lines of `ChunkNumbers`]. slots: int64, of each KV group's keys."""

    starts: npt.NDArray[np.int32]
    slots: list[npt.NDArray[np.int64]]

    @classmethod
    def of(cls, sequences: Sequence[SequenceStep], groups: Sequence[KVGroup], block_size: int) -> ChunkArrays | None:
        """None where some sequence computes but one token, which other kernels serve, and where there is no room."""
        if single_tokens(sequences) or len(sequences) > MOST_SEQUENCES:
            return None
        if any(sum(s.end - first_key(s, group.window) for s in sequences) > MOST_KEYS for group in groups):
            return None
        queries = [len(sequence.tokens) for sequence in sequences]
        starts = np.zeros((2 + len(groups), _LINE), np.int32)
        starts[0, :2] = len(sequences), max(queries)
        starts[1, 1 : 1 + len(sequences)] = np.cumsum(queries)
        slots = []
        for number, group in enumerate(groups):
            parts = [
                sequence.slots(number, block_size, first_key(sequence, group.window), sequence.end)
                for sequence in sequences
            ]
            starts[2 + number, 1 : 1 + len(sequences)] = np.cumsum([len(part) for part in parts])
            slots.append(np.concatenate(parts))
        return cls(starts, slots)


@dataclass(frozen=True)
class ChunkNumbers:
    """
    starts: int32 [2 + KV groups, .]: how many sequences and the most queries of one; where queries start; where each
        group's keys start.
    slots: int64 [keys] of each KV group.
    """

    starts: Tensor
    slots: Sequence[Tensor]

    @staticmethod
    def nbytes(groups: int) -> int:
        """Of the memory that holds them for so many KV groups."""
        return ((2 + groups) * _LINE) * 4 + groups * MOST_KEYS * 8

    @classmethod
    def laid_out(cls, memory: Tensor, groups: int) -> ChunkNumbers:
        """In uint8 [nbytes]."""
        starts, slots = torch.split(memory, [(2 + groups) * _LINE * 4, groups * MOST_KEYS * 8])
        return cls(
            starts.view(torch.int32).view(2 + groups, _LINE), slots.view(torch.int64).view(groups, MOST_KEYS).unbind()
        )

    def fill(self, step: ChunkArrays) -> None:
        """On the host: take over those of a step, of which there may be fewer slots."""
        self.starts.copy_(torch.from_numpy(step.starts))
        for own, slots in zip(self.slots, step.slots, strict=True):
            own[: len(slots)].copy_(torch.from_numpy(slots))

    def work(self, number: int, rows: int, window: int | None) -> PagedChunks:
        """A KV group's attention of up to so many tokens."""
        return PagedChunks(
            slice(0, rows), self.slots[number], self.starts[1], self.starts[2 + number], rows, MOST_KEYS, window,
            self.starts[0, :2],
        )  # fmt: skip
