"""Drawing tokens at random, many rows at once, each from its request's seed and position alone.

A row is drawn by inverting its cumulative distribution at one uniform number. Temperature alone and min-p need no
order: the vocabulary's will do. Top-k and top-p need the likeliest first; to sort all of a large vocabulary may take
longer than the model, so that a small top-k is served from a few candidates. Sums are in fp64, so that their order,
which is the library's, does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.protocol import SamplingParams
from rose_dist.engine.request import Request
from rose_dist.engine.transfer import to_device

CANDIDATES = ((64, 128), (1024, 2048))
"""Largest top-k, and how many candidates serve it: more, so that equal logits at the end are cut alike."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class DrawRules:
    """Rows that are drawn in the same way.

    candidates: how many of the likeliest tokens; 0: all, in the vocabulary's order; −1: all, sorted.
    rows: int64 [n]; temperature, top_k, top_p, min_p: [n, 1]; all on the device.
    seeds: uint64 [n].
    """

    candidates: int
    places: list[int]
    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: npt.NDArray[np.uint64]

    @staticmethod
    def groups(requests: Sequence[Request], device: torch.device) -> list[DrawRules]:
        """All rows that are not greedy."""
        by_kind: dict[int, list[int]] = {}
        for row, request in enumerate(requests):
            if request.generate.sampling.temperature > 0:
                by_kind.setdefault(_candidates(request.generate.sampling), []).append(row)
        return [DrawRules._of(kind, rows, requests, device) for kind, rows in by_kind.items()]

    @staticmethod
    def _of(kind: int, rows: list[int], requests: Sequence[Request], device: torch.device) -> DrawRules:
        chosen = [requests[row].generate.sampling for row in rows]

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor([[getattr(sampling, name)] for sampling in chosen], dtype=dtype), device)

        return DrawRules(
            kind,
            rows,
            to_device(torch.tensor(rows), device),
            column("temperature", torch.float64),
            column("top_k", torch.int64),
            column("top_p", torch.float64),
            column("min_p", torch.float64),
            np.array([requests[row].seed & (1 << 64) - 1 for row in rows], np.uint64),
        )

    def draw(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """int64 [n] of `logits` [requests, vocabulary]."""
        positions = np.array([requests[row].output_length for row in self.places], np.uint64)
        numbers = to_device(torch.from_numpy(uniform(self.seeds, positions))[:, None], logits.device)
        weights = torch.softmax(logits[self.rows].double() / self.temperature, -1)
        if self.candidates == 0:
            return self._draw_unsorted(weights, numbers)
        return self._draw_sorted(weights, numbers)

    def _draw_unsorted(self, weights: Tensor, numbers: Tensor) -> Tensor:
        weights = torch.where(weights >= self.min_p * weights.amax(-1, keepdim=True), weights, 0.0)
        cumulative = weights.cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        drawn = torch.searchsorted(cumulative, numbers * total, right=True)
        return torch.minimum(drawn, torch.searchsorted(cumulative, total))[:, 0]

    def _draw_sorted(self, weights: Tensor, numbers: Tensor) -> Tensor:
        weights, ids = _likeliest(weights, self.candidates)
        places = torch.arange(weights.shape[1], device=weights.device)
        keep = (self.top_k == 0) | (places < self.top_k)
        cumulative = (weights * keep).cumsum(-1)
        # The fewest tokens that reach top_p of what top_k left: those before which it is not yet reached.
        before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
        keep &= before < self.top_p * cumulative[:, -1:]
        keep &= weights >= self.min_p * weights[:, :1]
        last = (keep.sum(-1, keepdim=True) - 1).clamp_(min=0)
        drawn = torch.searchsorted(cumulative, numbers * cumulative.gather(1, last), right=True)
        return ids.gather(1, torch.minimum(drawn, last))[:, 0]


def _candidates(sampling: SamplingParams) -> int:
    if sampling.top_k == 0 and sampling.top_p >= 1:
        return 0
    return next((count for most, count in CANDIDATES if 0 < sampling.top_k <= most), -1)


def _likeliest(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Weights and ids, the largest first, equal ones by id."""
    if not 0 < count < weights.shape[1]:
        return weights.sort(descending=True, stable=True)
    found, ids = weights.topk(count, sorted=False)
    ids, order = ids.sort()
    found, order = found.gather(1, order).sort(descending=True, stable=True)
    return found, ids.gather(1, order)


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """In [0, 1), from each seed and position alone: no state, so that preemption can't change it.

    Two rounds of splitmix64's output function (Steele, Lea, Flood 2014) over both.
    """
    return (bits(seeds, positions) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def bits(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The numbers of `uniform` times 2^64."""
    return _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN) & ~np.uint64((1 << 11) - 1)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
