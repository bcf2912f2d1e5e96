"""From a tile's scores to its weights, in the registers of prefill attention.

A lane has two rows: of every four scores the first two are its first row's, the others its second row's, and every four
belong to 8 columns further on. Four lanes share a row.
"""

from __future__ import annotations

import math
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.attention_results import exp2
from rose_dist.kernels.dsl import Float32, Uint32, cute


def hide(scores: Any, bounds: Any, first: Any) -> Any:
    """−∞ for keys that a row does not see.

    bounds: of each row the first key that it sees, less this lane's first column, and how many it sees after that one.
    first: the tile's first key.
    """
    shown = [(Uint32(first - low), Uint32(span)) for low, span in bounds]
    values = []
    for i, score in enumerate(scores):
        begin, span = shown[_row(i)]
        seen = begin + Uint32(i // 4 * 8 + i % 2) <= span
        values.append(vector.select(seen, score, Float32(-math.inf)))
    return values


def raise_tops(scores: Any, scale: Any, tops: Any) -> Any:
    """Make `tops` both rows' largest scaled scores with this tile. Returns what earlier weights are to be multiplied
    by.
    """
    factors = []
    for row in range(2):
        own = [score for i, score in enumerate(scores) if _row(i) == row]
        while len(own) > 1:
            own = [cute.arch.fmax(*own[i : i + 2]) if i + 1 < len(own) else own[i] for i in range(0, len(own), 2)]
        top = own[0]
        for offset in (1, 2):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
        top = cute.arch.fmax(top * scale, tops[row])
        factors.append(exp2(tops[row] - top))
        tops[row] = top
    return factors


def powers(scores: Any, scale: Any, tops: Any, factors: Any, sums: Any) -> Any:
    """The tile's weights, in fp32, added to this lane's share of each row's sum."""
    weights = [exp2(ptx.multiply_add(score, scale, -tops[_row(i)])) for i, score in enumerate(scores)]
    for row in range(2):
        halves = [sums[row] * factors[row], Float32(0.0)]
        for i, weight in enumerate(weight for i, weight in enumerate(weights) if _row(i) == row):
            halves[i % 2] += weight
        sums[row] = halves[0] + halves[1]
    return weights


def scaled(values: Any, factors: Any) -> Any:
    """Values that lie as scores do, each row's times its factor."""
    return [value * factors[_row(i)] for i, value in enumerate(values)]


def _row(i: int) -> int:
    return i // 2 % 2
