"""Attention work that follows block tables on a device, for one KV group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rose_dist.engine.attention_planner import first_key, single_tokens, written_slots
from rose_dist.engine.step import SequenceStep
from rose_dist.engine.transfer import to_device
from rose_dist.kernels.paged_attention import DecodeWorkspace
from rose_dist.layers.attention_work import AttentionWork, PagedChunks, PagedDecode
from rose_dist.layers.forward_batch import GroupBatch, KVStorage


@dataclass(frozen=True)
class PagedPlanner:
    """Block tables, slots and lengths, moved to a device with every step; arguments as of `GatheringPlanner`."""

    number: int
    window: int | None
    block_size: int
    storage: KVStorage

    workspace: DecodeWorkspace | None

    def plan(self, sequences: Sequence[SequenceStep]) -> GroupBatch:
        slots = written_slots(sequences, self.number, self.block_size)
        return GroupBatch(self.storage, self._move(slots), tuple(self._work(sequences)))

    def _work(self, sequences: Sequence[SequenceStep]) -> Iterator[AttentionWork]:
        single = single_tokens(sequences)
        if single:
            yield self._decode(sequences[:single])
        if sequences[single:]:
            yield self._chunks(sequences[single:], single)

    def _decode(self, sequences: Sequence[SequenceStep]) -> PagedDecode:
        held = [sequence.tables[self.number] for sequence in sequences]
        tables = np.zeros((len(held), max(len(blocks) for _, blocks in held)), np.int32)
        for line, (_, blocks) in zip(tables, held, strict=True):
            line[: len(blocks)] = blocks
        return PagedDecode(
            slice(0, len(held)),
            self._move(tables),
            self._move(np.array([first for first, _ in held], np.int32)),
            self._move(np.array([sequence.end for sequence in sequences], np.int32)),
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
            self._move(np.concatenate(slots)),
            self._move(_starts(queries)),
            self._move(_starts(keys)),
            max(queries),
            max(keys),
            self.window,
        )

    def _move(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.storage.keys.device)


def _starts(lengths: list[int]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
