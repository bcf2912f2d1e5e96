"""A step's plan: made by the scheduler, sent to the tensor-parallel peers, never changed."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step.

    tokens: the ids to compute, at positions `start`, `start` + 1, …. −1 − r is what the step before sampled in its row
        r, which only the device knows yet.
    tables: for each KV group, the index of the first block and the blocks from there to the last token's.
    sample: whether the next token is wanted.
    """

    tokens: list[int]
    start: int
    tables: list[tuple[int, list[int]]]
    sample: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def slots(self, group: int, block_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """The flat cache slots of positions `start` to `end` − 1 in a KV group."""
        first, blocks = self.tables[group]
        start, end = start - first * block_size, end - first * block_size
        skipped = start // block_size
        table = np.array(blocks[skipped : -(-end // block_size)], np.int64)
        places: npt.NDArray[np.int64] = (table[:, None] * block_size + np.arange(block_size)).reshape(-1)
        return places[start - skipped * block_size : end - skipped * block_size]


class Step(msgspec.Struct, frozen=True, array_like=True):
    """The sequences of one step, those of one token first and among them the shortest first; none on an idle rank
    whose peers need it.
    """

    sequences: list[SequenceStep] = []

    @property
    def token_count(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def decodes_only(self) -> bool:
        """Every sequence computes one token and wants the next."""
        return bool(self.sequences) and all(s.sample and len(s.tokens) == 1 for s in self.sequences)
