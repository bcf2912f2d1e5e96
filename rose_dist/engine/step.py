"""A step's plan: made by the scheduler, sent to the tensor-parallel peers, never changed."""

from __future__ import annotations

import msgspec


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step.

    tokens: the ids to compute, at positions `start`, `start` + 1, ….
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


class Step(msgspec.Struct, frozen=True, array_like=True):
    """The sequences of one step, those of one token first and among them the shortest first; none on an idle rank
    whose peers need it.
    """

    sequences: list[SequenceStep] = []

    @property
    def token_count(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)
