"""Attention work that follows block tables on a device, for one KV group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rose_dist.engine.attention_planner import first_key, single_tokens
from rose_dist.engine.step import SequenceStep
from rose_dist.engine.step_inputs import StepInputs
from rose_dist.kernels.paged_attention import DecodeWorkspace
from rose_dist.layers.attention_work import AttentionWork, PagedChunks, PagedDecode
from rose_dist.layers.forward_batch import GroupBatch, KVStorage


@dataclass(frozen=True)
class PagedPlanner:
    """Block tables and lengths, in the `inputs` of every step; other arguments as of `GatheringPlanner`."""

    number: int
    window: int | None
    block_size: int
    storage: KVStorage
    inputs: StepInputs
    workspace: DecodeWorkspace | None

    def plan(self, sequences: Sequence[SequenceStep], slots: Tensor) -> GroupBatch:
        return GroupBatch(self.storage, slots, tuple(self._work(sequences)))

    def _work(self, sequences: Sequence[SequenceStep]) -> Iterator[AttentionWork]:
        single = single_tokens(sequences)
        if single:
            yield self._decode(sequences[:single])
        if sequences[single:]:
            yield self._chunks(sequences[single:], single)

    def _decode(self, sequences: Sequence[SequenceStep]) -> PagedDecode:
        held = [sequence.tables[self.number] for sequence in sequences]
        counts = np.array([len(blocks) for _, blocks in held])
        tables = np.zeros((len(held), counts.max()), np.int32)
        tables[np.arange(tables.shape[1]) < counts[:, None]] = list(chain.from_iterable(blocks for _, blocks in held))
        return PagedDecode(
            slice(0, len(held)),
            self.inputs.put(tables),
            self.inputs.put(np.array([first for first, _ in held], np.int32)),
            self.inputs.put(np.array([sequence.end for sequence in sequences], np.int32)),
            self.window,
            self.block_size,
            self.workspace,
        )

    def _chunks(self, sequences: Sequence[SequenceStep], row: int) -> PagedChunks:
        slots = [
            sequence.slots(self.number, self.block_size, first_key(sequence, self.window), sequence.end)
            for sequence in sequences
        ]
        queries, keys = [len(sequence.tokens) for sequence in sequences], [len(each) for each in slots]
        return PagedChunks(
            slice(row, row + sum(queries)),
            self._slots(np.concatenate(slots)),
            self.inputs.put(_starts(queries)),
            self.inputs.put(_starts(keys)),
            max(queries),
            max(keys),
            self.window,
        )

    def _slots(self, slots: npt.NDArray[np.int64]) -> Tensor | slice:
        """Those of one prompt follow one another where the pool hands out its blocks in order."""
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and (np.diff(slots) == 1).all():
            return slice(first, last + 1)
        return self.inputs.put(slots)


def _starts(lengths: list[int]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
