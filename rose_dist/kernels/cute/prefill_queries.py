"""The queries of prefill attention, as left operands in the registers of the warps that compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.prefill_items import Items
from rose_dist.kernels.dsl import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.prefill_tiling import PrefillTiling
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class Queries:
    """And what becomes of them; traced values, strides in elements."""

    address: Any
    stride: Any
    head_stride: Any
    heads: Any
    cos: Any
    """Address of fp32 [tokens, head_dim / 2], by which they are yet to be rotated."""
    sin: Any
    sinks: Any
    """0 without."""
    out: Any
    scale: Any
    """Of the scores times log2 e, positive."""
    value_scale: Any


@dataclass(frozen=True)
class QueryReader:
    """Reads the queries of an item, and rotates them."""

    tiling: PrefillTiling
    group: int
    """Query heads a key head."""
    rotary: bool
    """Queries are yet to be rotated."""

    def item(self, items: Any, number: Any) -> Any:
        return items.of(number, self.group, self.tiling.rows, self.tiling.keys)

    def rows(self, item: Any, warp: Any) -> Any:
        """Lane 4g + j of a warp has rows g and g + 8 of its 16; the item's last one in place of any beyond."""
        first = item.row + warp * 16 + cute.arch.thread_idx()[0] % WARP // 4
        return [vector.min_of(first + 8 * i, item.rows - 1) for i in range(2)]

    @cute.jit
    def load(
        self, queries: Queries, items: Items, number: Int32, warp: Int32, left: cute.Tensor, turns: cute.Tensor
    ) -> None:
        """An item's left operands, or any if there is none: of each 16 dimensions both rows' pair 2j, then both rows'
        pair 2j + 8. And their angles: of each 8 dimensions of a half cosines and sines of both rows' pair.
        """
        item, half = self.item(items, number), self.tiling.head_dim // 2
        for i, row in enumerate(self.rows(item, warp)):
            token, place = Int64(item.first_query + row // self.group), cute.arch.thread_idx()[0] % 4 * 2
            head = Int64(item.head * self.group + row % self.group) * queries.head_stride
            source = self.where(item, queries.address, (token * queries.stride + head) * 2) + place * 2
            for at in range_constexpr(2 * half // 8):
                left[2 * at + i] = vector.scalar(source + at * 16, Uint32)[0]
            if const_expr(self.rotary):
                for j, table in enumerate((queries.cos, queries.sin)):
                    source = self.where(item, table, token * (half * 4)) + place * 4
                    for at in range_constexpr(half // 8):
                        pair = vector.load(source + at * 32, Float32, 2, 8)
                        for k in range_constexpr(2):
                            turns[8 * at + 4 * i + 2 * j + k] = pair[k]

    def where(self, item: Any, base: Any, offset: Any) -> Any:
        """In place of what an item that is not there would read, the first."""
        return base + vector.select(item.tiles > 0, offset, Int64(0))

    def rotate(self, left: Any, turns: Any) -> None:
        """NeoX pairs, which stand half a head apart: both are in this lane."""
        half = self.tiling.head_dim // 16
        for place in range(half):
            for i in range(2):
                first, second = (self.widened(left[2 * (place + part) + i]) for part in (0, half))
                cos, sin = ([turns[8 * place + 4 * i + 2 * j + k] for k in range(2)] for j in range(2))
                both = list(zip(first, second, cos, sin, strict=True))
                left[2 * place + i] = ptx.to_bf16x2(*(a * c - b * s for a, b, c, s in both))
                left[2 * (place + half) + i] = ptx.to_bf16x2(*(b * c + a * s for a, b, c, s in both))

    def widened(self, pair: Any) -> Any:
        """Two bf16 as fp32."""
        return ptx.from_bits(pair << Uint32(16)), ptx.from_bits(pair & Uint32(0xFFFF0000))
