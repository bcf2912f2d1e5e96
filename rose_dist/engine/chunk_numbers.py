"""Where a step's chunks of prompts have their queries and keys, in one place on the device: attention in a captured
graph reads them there, whatever the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def takes(sequences: Sequence[SequenceStep], groups: Sequence[KVGroup]) -> bool:
    """Whether there is room for a step, and none of its sequences computes but one token, which other kernels serve."""
    if single_tokens(sequences) or len(sequences) > MOST_SEQUENCES:
        return False
    return all(sum(s.end - first_key(s, group.window) for s in sequences) <= MOST_KEYS for group in groups)


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

    def work(self, number: int, rows: int, window: int | None) -> PagedChunks:
        """A KV group's attention of up to so many tokens."""
        return PagedChunks(
            slice(0, rows), self.slots[number], self.starts[1], self.starts[2 + number], rows, MOST_KEYS, window,
            self.starts[0, :2],
        )  # fmt: skip
