"""What a captured pass reads of a step, in one memory: one copy brings it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.attention_planner import first_key
from rose_dist.engine.chunk_numbers import MOST_SEQUENCES, ChunkNumbers
from rose_dist.engine.step import SequenceStep
from rose_dist.engine.token_numbers import TokenNumbers
from rose_dist.layers.forward_batch import KVGroup

_WANTED = MOST_SEQUENCES + 1


@dataclass(frozen=True)
class PassNumbers:
    """Passes of all sizes share a memory, of which the tokens' numbers are the end: all else has the same place.

    memory: uint8 [nbytes], which the others are parts of.
    wanted: int64 [.]: rows whose logits are wanted, of steps of chunks alone.
    """

    memory: Tensor
    chunks: ChunkNumbers
    wanted: Tensor
    tokens: TokenNumbers

    @staticmethod
    def nbytes(groups: int, rows: int) -> int:
        """Of the memory that a pass of so many rows needs."""
        return ChunkNumbers.nbytes(groups) + (_WANTED + TokenNumbers.lines(groups) * rows) * 8

    @classmethod
    def laid_out(cls, memory: Tensor, groups: int, rows: int) -> PassNumbers:
        """At the beginning of uint8 [nbytes or more]."""
        memory = memory[: cls.nbytes(groups, rows)]
        sizes = [ChunkNumbers.nbytes(groups), _WANTED * 8, TokenNumbers.lines(groups) * rows * 8]
        chunks, wanted, tokens = torch.split(memory, sizes)
        return cls(
            memory,
            ChunkNumbers.laid_out(chunks, groups),
            wanted.view(torch.int64),
            TokenNumbers(tokens.view(torch.int64).view(TokenNumbers.lines(groups), rows)),
        )


@dataclass(frozen=True)
class PassArrays:
    """`PassNumbers` on the host, as numpy sees them: a device waits while a prompt's are put there, and of a processor
    that has slept every call takes three times as long. Fields as of `ChunkNumbers`, `PassNumbers` and `TokenNumbers`.
    """

    memory: Tensor
    starts: npt.NDArray[np.int32]
    slots: Sequence[npt.NDArray[np.int64]]
    wanted: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]

    @classmethod
    def of(cls, numbers: PassNumbers) -> PassArrays:
        slots = [one.numpy() for one in numbers.chunks.slots]
        tokens = numbers.tokens.tensor.numpy()
        return cls(numbers.memory, numbers.chunks.starts.numpy(), slots, numbers.wanted.numpy(), tokens)

    def fill(
        self, sequences: Sequence[SequenceStep], groups: Sequence[KVGroup], block_size: int, wanted: Sequence[int]
    ) -> None:
        """Put a step's numbers there, which `chunk_numbers.takes`."""
        counts = [len(sequence.tokens) for sequence in sequences]
        total = sum(counts)
        self.starts.fill(0)
        self.starts[0, :2] = len(sequences), max(counts)
        self.starts[1, 1 : 1 + len(counts)] = np.cumsum(counts)
        self.wanted[: len(wanted)] = wanted
        self.tokens[:2, total:] = 0
        self.tokens[2:-1, total:] = -1
        self.tokens[0, :total] = np.fromiter(chain.from_iterable(s.tokens for s in sequences), np.int64, total)
        self.tokens[-1, :1] = total
        end = 0
        for sequence in sequences:
            begin, end = end, end + len(sequence.tokens)
            self.tokens[1, begin:end] = np.arange(sequence.start, sequence.end)
        for number, group in enumerate(groups):
            self._fill_slots(number, sequences, group.window, block_size)

    def _fill_slots(self, number: int, sequences: Sequence[SequenceStep], window: int | None, block_size: int) -> None:
        """Of a group's keys, the last of which are the step's tokens."""
        keys = rows = 0
        for line, sequence in enumerate(sequences, 1):
            slots = sequence.slots(number, block_size, first_key(sequence, window), sequence.end)
            count = len(sequence.tokens)
            self.slots[number][keys : keys + len(slots)] = slots
            self.tokens[2 + number, rows : rows + count] = slots[len(slots) - count :]
            keys, rows = keys + len(slots), rows + count
            self.starts[2 + number, line] = keys


class PassStaging:
    """Where the host puts a pass's numbers together, for a ladder of rows. Two memories take turns: a copy out of one
    may still be under way.
    """

    def __init__(self, groups: int, ladder: Sequence[int], device: torch.device) -> None:
        self._locked = device.type == "cuda"
        size = PassNumbers.nbytes(groups, max(ladder))
        memories = [torch.zeros(size, dtype=torch.uint8, pin_memory=self._locked) for _ in range(2)]
        self._arrays = [
            {rows: PassArrays.of(PassNumbers.laid_out(memory, groups, rows)) for rows in ladder} for memory in memories
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def next(self, rows: int) -> PassArrays:
        """Of a pass of so many rows, which nothing reads any more."""
        for turns in (self._arrays, self._copied):
            turns.reverse()
        if self._copied[0] is not None:
            self._copied[0].synchronize()
        return self._arrays[0][rows]

    def copy(self, arrays: PassArrays, target: Tensor) -> None:
        """To uint8 [nbytes] on the device, in the order of the current stream. arrays: those of the last `next`."""
        target.copy_(arrays.memory, non_blocking=True)
        if self._locked:
            self._copied[0] = torch.cuda.current_stream().record_event()
