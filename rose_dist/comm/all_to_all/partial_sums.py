"""Combines in which every rank adds up its own experts' results of a token before they travel, on CPU ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rose_dist.comm.all_to_all.packing import FloatArray, Int64Array, Packing, weighted_sum

NOTE = np.dtype([("token", np.int32), ("place", np.int32), ("weight", np.float32)])
"""What the experts' rank must know of a row."""


def notes(packing: Packing, weights: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes of a `NOTE`], of each packed row; `weights` fp32 [tokens, top_k]."""
    here = packing.slots >= 0
    rows = packing.slots[here]
    noted = np.empty(rows.size, NOTE)
    noted["token"][rows], noted["place"][rows] = np.nonzero(here)
    noted["weight"][rows] = weights.numpy()[here]
    return torch.from_numpy(noted.view(np.uint8).reshape(-1, NOTE.itemsize))


@dataclass(frozen=True)
class ReceivedTokens:
    """The tokens that have rows at a rank, by source, then by number."""

    counts: list[int]
    """From each source."""
    slots: Int64Array
    """[tokens, top_k], the row of each place in expert order; −1 if it is another rank's."""
    weights: FloatArray
    """[tokens, top_k]."""

    @classmethod
    def of(cls, noted: torch.Tensor, received: list[int], order: Int64Array, top_k: int) -> ReceivedTokens:
        """`noted`: what `notes` made, in order of arrival, `received` rows from each source; `order` [rows]: which of
        them stands at each place in expert order.
        """
        told = noted.numpy().view(NOTE).ravel()
        source = np.repeat(np.arange(len(received)), received)
        tokens, record = np.unique(source << 32 | told["token"], return_inverse=True)
        slots = np.full((tokens.size, top_k), -1, np.int64)
        weights = np.zeros(slots.shape, np.float32)
        slots[record[order], told["place"][order]] = np.arange(order.size)
        weights[record, told["place"]] = told["weight"]
        return cls(np.bincount(tokens >> 32, minlength=len(received)).tolist(), slots, weights)

    def sums(self, expert_out: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of `expert_out`'s dtype."""
        return weighted_sum(expert_out, self.slots, torch.from_numpy(self.weights)).to(expert_out.dtype)


@dataclass(frozen=True)
class ReturnedSums:
    """The rows that come back to a source."""

    counts: list[int]
    """From each rank: the source's tokens with experts there, in their order."""
    slots: Int64Array
    """[tokens, top_k], the row from the rank that holds a place's expert; −1 where an earlier place has it."""

    @classmethod
    def of(cls, ids: npt.NDArray[np.int32], owners: Int64Array, ranks: int) -> ReturnedSums:
        """`ids` [tokens, top_k], −1 for none; `owners` [experts]: the rank of each."""
        rank = np.where(ids >= 0, owners[ids], -1)
        repeated = (rank[:, :, None] == rank[:, None, :]) & np.tri(ids.shape[1], k=-1, dtype=bool)
        tokens, places = np.nonzero((rank >= 0) & ~repeated.any(2))
        senders = rank[tokens, places]
        order = senders.argsort(kind="stable")
        slots = np.full(ids.shape, -1, np.int64)
        slots[tokens[order], places[order]] = np.arange(order.size)
        return cls(np.bincount(senders, minlength=ranks).tolist(), slots)

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] fp32."""
        return weighted_sum(rows, self.slots, torch.ones(self.slots.shape))
