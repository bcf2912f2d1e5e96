"""How the queries of a step find their keys: what the planner decides and an attention layer carries out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from rose_dist.kernels.attention import AttentionBlock
from rose_dist.kernels.attention import paged_attention as attend_gathered
from rose_dist.kernels.paged_attention import DecodeWorkspace, decode
from rose_dist.kernels.paged_prefill import prefill


class AttentionWork(ABC):
    """Some queries of a step, neighbours in its token batch."""

    @abstractmethod
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, scale: float, out: Tensor) -> None:
        """
        Args:
            q: [tokens, query heads, head_dim], the whole step's.
            keys, values: [slots, key heads, head_dim], one layer's cache.
            sinks: fp32 [query heads].
            out: as `q`; the work's rows are written.
        """


@dataclass(frozen=True)
class Gathered(AttentionWork):
    """Keys gathered by slot, and a mask: the CPU's way."""

    block: AttentionBlock

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, scale: float, out: Tensor) -> None:
        attend_gathered(q, keys, values, self.block, scale, sinks, out)


@dataclass(frozen=True)
class PagedDecode(AttentionWork):
    """One query a sequence, keys found through block tables on the device. The launch before it writes the step's
    queries, keys and values, and nothing else that it reads.

    rows: of the queries. live: int32 [1], sequences that there are. Others as `paged_attention.decode`.
    """

    rows: slice
    tables: Tensor
    first: Tensor
    lengths: Tensor
    window: int | None
    block_size: int
    workspace: DecodeWorkspace | None
    live: Tensor | None = None

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, scale: float, out: Tensor) -> None:
        decode(
            q[self.rows], keys, values, self.tables, self.first, self.lengths, sinks, window=self.window,
            block_size=self.block_size, scale=scale, out=out[self.rows], rows=self.live, workspace=self.workspace,
            early=True,
        )  # fmt: skip


@dataclass(frozen=True)
class PagedChunks(AttentionWork):
    """Neighbouring tokens of one or several sequences.

    rows: of the queries. slots: those of the keys, a slice where they follow one another. Others as
    `paged_prefill.prefill`.
    """

    rows: slice
    slots: Tensor | slice
    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int
    window: int | None
    shape: Tensor | None = None

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, scale: float, out: Tensor) -> None:
        slots: Tensor | None = None
        if isinstance(self.slots, slice):
            keys, values = keys[self.slots], values[self.slots]
        else:
            slots = self.slots
        prefill(
            q[self.rows], keys, values, slots, self.query_starts, self.key_starts, sinks,
            most_queries=self.most_queries, most_keys=self.most_keys, window=self.window, scale=scale,
            out=out[self.rows], shape=self.shape,
        )  # fmt: skip
