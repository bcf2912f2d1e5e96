"""What a captured pass reads of a step, in one memory: one copy brings it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.chunk_numbers import MOST_SEQUENCES, ChunkArrays, ChunkNumbers
from rose_dist.engine.token_numbers import TokenNumbers

_WANTED = MOST_SEQUENCES + 1


@dataclass(frozen=True)
class PassNumbers:
    """Passes of all sizes share a memory, of which the tokens' numbers are the end: all else has the same place.

    wanted: int64 [.]: rows whose logits are wanted, of steps of chunks alone.
    """

    chunks: ChunkNumbers
    wanted: Tensor
    tokens: TokenNumbers

    @staticmethod
    def nbytes(groups: int, rows: int) -> int:
        """Of the memory that a pass of so many rows needs."""
        return ChunkNumbers.nbytes(groups) + (_WANTED + TokenNumbers.lines(groups) * rows) * 8

    @classmethod
    def laid_out(cls, memory: Tensor, groups: int, rows: int) -> PassNumbers:
        """In uint8 [nbytes]."""
        sizes = [ChunkNumbers.nbytes(groups), _WANTED * 8, TokenNumbers.lines(groups) * rows * 8]
        chunks, wanted, tokens = torch.split(memory, sizes)
        return cls(
            ChunkNumbers.laid_out(chunks, groups),
            wanted.view(torch.int64),
            TokenNumbers(tokens.view(torch.int64).view(TokenNumbers.lines(groups), rows)),
        )

    def fill(self, tokens: npt.NDArray[np.int64], chunks: ChunkArrays, wanted: Sequence[int]) -> None:
        """On the host: take over a step's."""
        self.chunks.fill(chunks)
        self.wanted[: len(wanted)].copy_(torch.tensor(wanted, dtype=torch.int64))
        self.tokens.tensor.copy_(torch.from_numpy(tokens))
