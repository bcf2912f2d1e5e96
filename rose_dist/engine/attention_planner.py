"""Block tables become cache slots and masks, for one KV group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rose_dist.engine.step import SequenceStep
from rose_dist.kernels.attention import AttentionBlock
from rose_dist.layers.forward_batch import GroupBatch, KVStorage

Slots = npt.NDArray[np.int64]

PADDING = 64
"""Keys by which the sequences of one batch may differ at least; beyond that, by a factor of two."""


@dataclass(frozen=True)
class AttentionPlanner:
    """
    number: the group's place among the block tables of a `SequenceStep`.
    window: tokens that a query sees, itself included; None sees all.
    """

    number: int
    window: int | None
    block_size: int
    storage: KVStorage
    dtype: torch.dtype

    def plan(self, sequences: Sequence[SequenceStep]) -> GroupBatch:
        """Where the step's tokens are written and what they read."""
        slots = [self._slots(sequence, sequence.start, sequence.end) for sequence in sequences]
        written = np.concatenate(slots) if slots else np.empty(0, np.int64)
        return GroupBatch(self.storage, torch.from_numpy(written), tuple(self._blocks(sequences)))

    def _blocks(self, sequences: Sequence[SequenceStep]) -> Iterator[AttentionBlock]:
        single = next((i for i, sequence in enumerate(sequences) if len(sequence.tokens) > 1), len(sequences))
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

    def _single_tokens(self, batch: Sequence[SequenceStep], row: int) -> AttentionBlock:
        lengths = [self._keys(sequence) for sequence in batch]
        slots = np.zeros((len(batch), max(lengths)), np.int64)
        for line, length, sequence in zip(slots, lengths, batch, strict=True):
            line[:length] = self._slots(sequence, self._first_key(sequence), sequence.end)
        beyond = np.arange(slots.shape[1]) >= np.array(lengths)[:, None]
        return AttentionBlock(
            slice(row, row + len(batch)), torch.from_numpy(slots).view(-1), self._mask(beyond)[:, None, None]
        )

    def _chunk(self, sequence: SequenceStep, row: int) -> AttentionBlock:
        """Several tokens of one sequence, causal."""
        first = self._first_key(sequence)
        keys = np.arange(first, sequence.end)
        queries = np.arange(sequence.start, sequence.end)[:, None]
        hidden = keys > queries
        if self.window is not None:
            hidden |= keys <= queries - self.window
        slots = torch.from_numpy(self._slots(sequence, first, sequence.end))
        return AttentionBlock(slice(row, row + len(sequence.tokens)), slots, self._mask(hidden)[None, None])

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)

    def _first_key(self, sequence: SequenceStep) -> int:
        """The earliest position that the sequence's first query sees."""
        return 0 if self.window is None else max(0, sequence.start - self.window + 1)

    def _slots(self, sequence: SequenceStep, start: int, end: int) -> Slots:
        """int64 [end − start], the flat slots of these positions."""
        first, blocks = sequence.tables[self.number]
        positions = np.arange(start, end) - first * self.block_size
        table = np.array(blocks, np.int64)
        slots: Slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots
