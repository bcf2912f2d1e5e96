"""Block tables become attention work, for one KV group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.step import SequenceStep
from rose_dist.kernels.attention import AttentionBlock
from rose_dist.layers.attention_work import AttentionWork, Gathered
from rose_dist.layers.forward_batch import GroupBatch, KVStorage

PADDING = 64
"""Keys by which the sequences of one batch may differ at least; beyond that, by a factor of two."""


class AttentionPlanner(Protocol):
    def plan(self, sequences: Sequence[SequenceStep], slots: Tensor) -> GroupBatch:
        """What the step's tokens read; `slots`, int64 [tokens], are where they are written."""


@dataclass(frozen=True)
class GatheringPlanner:
    """Slots and masks, for the CPU.

    number: the group's place among the block tables of a `SequenceStep`.
    window: tokens that a query sees, itself included; None sees all.
    """

    number: int
    window: int | None
    block_size: int
    storage: KVStorage
    dtype: torch.dtype

    def plan(self, sequences: Sequence[SequenceStep], slots: Tensor) -> GroupBatch:
        """What the step's tokens read."""
        return GroupBatch(self.storage, slots, tuple(self._work(sequences)))

    def _work(self, sequences: Sequence[SequenceStep]) -> Iterator[AttentionWork]:
        single = single_tokens(sequences)
        row = 0
        for batch in self._alike(sequences[:single]):
            yield self._single_tokens(batch, row)
            row += len(batch)
        for sequence in sequences[single:]:
            yield self._chunk(sequence, row)
            row += len(sequence.tokens)

    def _alike(self, sequences: Sequence[SequenceStep]) -> Iterator[Sequence[SequenceStep]]:
        """Neighbours, shortest first, that read about as many keys, so that padding is a small part."""
        start = 0
        for end in range(1, len(sequences) + 1):
            most = 2 * self._keys(sequences[start]) + PADDING
            if end == len(sequences) or self._keys(sequences[end]) > most:
                yield sequences[start:end]
                start = end

    def _keys(self, sequence: SequenceStep) -> int:
        return sequence.end - self._first_key(sequence)

    def _single_tokens(self, batch: Sequence[SequenceStep], row: int) -> Gathered:
        lengths = [self._keys(sequence) for sequence in batch]
        slots = np.zeros((len(batch), max(lengths)), np.int64)
        for line, length, sequence in zip(slots, lengths, batch, strict=True):
            line[:length] = self._slots(sequence, self._first_key(sequence), sequence.end)
        beyond = np.arange(slots.shape[1]) >= np.array(lengths)[:, None]
        rows = slice(row, row + len(batch))
        return Gathered(AttentionBlock(rows, torch.from_numpy(slots).view(-1), self._mask(beyond)[:, None, None]))

    def _chunk(self, sequence: SequenceStep, row: int) -> Gathered:
        """Several tokens of one sequence, causal."""
        first = self._first_key(sequence)
        keys = np.arange(first, sequence.end)
        queries = np.arange(sequence.start, sequence.end)[:, None]
        hidden = keys > queries
        if self.window is not None:
            hidden |= keys <= queries - self.window
        slots = torch.from_numpy(self._slots(sequence, first, sequence.end))
        rows = slice(row, row + len(sequence.tokens))
        return Gathered(AttentionBlock(rows, slots, self._mask(hidden)[None, None]))

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)

    def _first_key(self, sequence: SequenceStep) -> int:
        return first_key(sequence, self.window)

    def _slots(self, sequence: SequenceStep, start: int, end: int) -> npt.NDArray[np.int64]:
        return sequence.slots(self.number, self.block_size, start, end)


def single_tokens(sequences: Sequence[SequenceStep]) -> int:
    """How many sequences, at the step's beginning, compute one token."""
    return next((i for i, sequence in enumerate(sequences) if len(sequence.tokens) > 1), len(sequences))


def first_key(sequence: SequenceStep, window: int | None) -> int:
    """The earliest position that the sequence's first query sees."""
    return 0 if window is None else max(0, sequence.start - window + 1)
