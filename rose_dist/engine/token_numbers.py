"""What every token of a step comes with, side by side: one copy brings it to where a captured graph reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.attention_planner import single_tokens
from rose_dist.engine.step import SequenceStep


@dataclass(frozen=True)
class TokenNumbers:
    """
    tensor: int64 [lines, rows]: token ids, positions, each KV group's slots, and how many rows are live. Rows beyond
        have token 0 at position 0, and no slot.
    """

    tensor: Tensor

    @staticmethod
    def lines(groups: int) -> int:
        return 3 + groups

    @staticmethod
    def array(sequences: Sequence[SequenceStep], groups: int, block_size: int, rows: int) -> npt.NDArray[np.int64]:
        """What `tensor` is to hold for a step of at most so many tokens."""
        tokens = sum(len(sequence.tokens) for sequence in sequences)
        numbers = np.zeros((TokenNumbers.lines(groups), rows), np.int64)
        numbers[0, :tokens] = np.fromiter(chain.from_iterable(s.tokens for s in sequences), np.int64, tokens)
        numbers[1, :tokens] = _positions(sequences)
        for group in range(groups):
            numbers[2 + group, :tokens] = _slots(sequences, group, block_size)
            numbers[2 + group, tokens:] = -1
        numbers[-1, :1] = tokens
        return numbers

    @property
    def rows(self) -> int:
        return self.tensor.shape[1]

    @property
    def token_ids(self) -> Tensor:
        return self.tensor[0]

    @property
    def positions(self) -> Tensor:
        return self.tensor[1]

    def slots(self, group: int) -> Tensor:
        return self.tensor[2 + group]

    @property
    def live(self) -> Tensor:
        """int32 [1]."""
        return self.tensor[-1].view(torch.int32)[:1]


def _positions(sequences: Sequence[SequenceStep]) -> npt.NDArray[np.int64]:
    single = single_tokens(sequences)
    starts = np.array([sequence.start for sequence in sequences[:single]], np.int64)
    return np.concatenate([starts, *(np.arange(sequence.start, sequence.end) for sequence in sequences[single:])])


def _slots(sequences: Sequence[SequenceStep], group: int, block_size: int) -> npt.NDArray[np.int64]:
    """Where the step's tokens are written."""
    single = single_tokens(sequences)
    starts = np.array([sequence.start for sequence in sequences[:single]], np.int64)
    last = np.array([sequence.tables[group][1][-1] for sequence in sequences[:single]], np.int64)
    chunks = (sequence.slots(group, block_size, sequence.start, sequence.end) for sequence in sequences[single:])
    return np.concatenate([last * block_size + starts % block_size, *chunks])
