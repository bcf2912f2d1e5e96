"""The products of decode attention on tensor cores, for a warp: q · k, its weights, and their sum of values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import vector, warp_matrix
from rose_dist.kernels.attention_tiling import TILE
from rose_dist.kernels.cute.attention_results import exp2
from rose_dist.kernels.cute.kv_tiles import Tiles, key_token, seen
from rose_dist.kernels.dsl import Float32, Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class Products:
    """Of `tiles` and, for each of their key heads, `rows` query heads: one or two octets."""

    tiles: Tiles
    rows: int

    def load_queries(self, q: Any, group: Any, queries: Any) -> None:
        """Of every key head, query heads g and g + 8 in the order that `Tiles.keys` has."""
        g = cute.arch.thread_idx()[0] % WARP // 4
        words = [
            word
            for head in range(self.tiles.heads)
            for half in range(self.rows // 8)
            for word in self.tiles.queries(q + Int64(head * group) * (self.tiles.head_dim * 2), g + 8 * half, group)
        ]
        for i, word in enumerate(words):
            queries[i] = word

    @cute.jit
    def multiply(
        self, stage: Uint32, queries: cute.Tensor, acc: cute.Tensor, largest: cute.Tensor, weights: cute.Tensor,
        tile: Int32, low: Int32, high: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        """One tile: scores, weights, and the weighted sum of values. Keys are the rows of the scores and dimensions
        those of the sums, query heads the columns of both, eight at a time.
        """
        g = cute.arch.thread_idx()[0] % WARP // 4
        shown = [seen(tile * TILE + key_token(g, n), low, high) for n in range(2)]
        places = self.tiles.key_places(stage)
        # Octets of query heads one beside the other, as each is a chain of operations that wait for one another.
        scores = [c for head in range(self.tiles.heads) for c in self.scores(places, head, queries)]
        factors = []
        for octet, c in enumerate(scores):
            # Keys g and g + 8 of column 2j + k.
            for k in range_constexpr(2):
                at = 2 * octet + k
                values = [vector.select(shown[n], c[2 * n + k], Float32(-math.inf)) for n in range(2)]
                top = cute.arch.fmax(values[0], values[1])
                for offset in (4, 8, 16):
                    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
                top = cute.arch.fmax(top * scale, largest[at])
                factor = exp2(largest[at] - top)
                c[k], c[2 + k] = (exp2(value * scale - top) for value in values)
                weights[at] = weights[at] * factor + (c[k] + c[2 + k])
                largest[at] = top
                factors.append(factor)
        shares = [[warp_matrix.transpose(self.tiles.pair(c[2 * n], c[2 * n + 1])) for n in range(2)] for c in scores]
        places = self.tiles.value_places(stage)
        for head in range_constexpr(self.tiles.heads):
            self.add_values(places, head, shares, factors, acc)

    def scores(self, places: Any, head: int, queries: Any) -> list[Any]:
        """q · k of a head, for every octet of its query heads."""
        words, each = self.tiles.head_dim // 8, self.rows // 8
        keys, sums = self.tiles.keys(places, head), []
        for octet in range(head * each, head * each + each):
            c = [Float32(0.0)] * 4
            for step, a in enumerate(keys):
                at = octet * words + 2 * step
                c = self.tiles.multiply_add(c, a, [queries[at], queries[at + 1]])
            sums.append(c)
        return sums

    def add_values(self, places: Any, head: int, shares: Any, factors: Any, acc: Any) -> None:
        """acc · factor + values · shares; products in the order of `Tiles.values`, of every octet of query heads."""
        each = self.rows // 8
        for piece in range(self.tiles.value_pieces):
            for n, values in enumerate(self.tiles.values(places, head, piece)):
                for octet in range(head * each, head * each + each):
                    at = octet * (self.tiles.head_dim // 4) + 4 * (4 * piece + n)
                    c = [acc[at + i] * factors[2 * octet + i % 2] for i in range(4)]
                    for i, value in enumerate(self.tiles.multiply_add(c, values, shares[octet])):
                        acc[at + i] = value
