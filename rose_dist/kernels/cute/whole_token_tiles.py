"""Tiles of whole tokens, all key heads of 16, copied by one thread for a block's warps.

A tile's keys and its values lie together in the cache, and in shared memory as there, but for 32 bytes after every four
tokens: with the order of tokens that `kv_tiles` has, the lanes that read at once are then on different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.attention_tiling import TILE
from rose_dist.kernels.cute.kv_tiles import Tiles, key_token, seen, value_token
from rose_dist.kernels.cute.mxfp4_operands import barrier
from rose_dist.kernels.dsl import Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.variants import WARP

CHUNK, GAP = 4, 32
"""Tokens side by side, and bytes after them."""


@dataclass(frozen=True)
class WholeTokenTiles(Tiles):
    """`heads` are those of a warp."""

    token_heads: int

    @property
    def token_bytes(self) -> int:
        """Of a key, and of a value, of all heads."""
        return self.token_heads * self.head_dim * self.dtype.itemsize

    @property
    def half_bytes(self) -> int:
        """Shared memory of a tile's keys, and of its values, which come after them."""
        return TILE // CHUNK * (CHUNK * self.token_bytes + GAP)

    @property
    def bytes(self) -> int:
        return 2 * self.half_bytes

    @property
    def blank_bytes(self) -> int:
        """Zeros that stand for a value that is not seen, of a warp's heads."""
        return self.heads * self.head_dim * self.dtype.itemsize

    @cute.jit
    def fetch(
        self, barriers: Int32, number: Int32, stage: Uint32, keys: Int64, values: Int64, slot: Int64, tile: Int32,
        low: Int32, high: Int32,
    ) -> None:  # fmt: skip
        """Start copying what is seen of a tile whose first key has slot `slot`: keys `low` ... `high` - 1. Barrier
        `number` counts the bytes. By one thread.
        """
        size = self.token_bytes
        begin = vector.max_of(low - tile * TILE, Int32(0))
        end = vector.min_of(high - tile * TILE, Int32(TILE))
        full = barrier(barriers, number)
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * size * (end - begin))
        for chunk in range_constexpr(TILE // CHUNK):
            first = vector.max_of(begin, Int32(CHUNK * chunk))
            count = vector.min_of(end, Int32(CHUNK * chunk + CHUNK)) - first
            if count > 0:
                target = stage + Uint32(first * size + GAP * chunk)
                offset = (slot + first) * size
                ptx.copy_to_shared(target, keys + offset, count * size, full.toint())
                ptx.copy_to_shared(target + Uint32(self.half_bytes), values + offset, count * size, full.toint())

    def place(self, token: Any) -> Any:
        """Of a token in a tile's keys, or values."""
        return Uint32(token * self.token_bytes + token // CHUNK * GAP)

    def key_places(self, stage: Any) -> list[Any]:
        lane = cute.arch.thread_idx()[0] % WARP
        g, j = lane // 4, lane % 4
        return [stage + self.place(key_token(g, n)) + Uint32(j * 16) for n in range(2)]

    def key_offset(self, head: int, piece: int) -> int:
        return head * self.head_dim * self.dtype.itemsize + piece * 64

    def value_places(self, stage: Any, blank: Any, tile: Any, low: Any, high: Any) -> list[Any]:
        lane = cute.arch.thread_idx()[0] % WARP
        g, j = lane // 4, lane % 4
        places = []
        for t in range(4):
            token = value_token(j, t)
            shown = stage + Uint32(self.half_bytes) + self.place(token)
            place = Uint32(vector.select(seen(tile * TILE + token, low, high), shown, blank))
            places.append(place + Uint32(g * self.value_bytes))
        return places

    def value_offset(self, head: int, piece: int) -> int:
        return head * self.head_dim * self.dtype.itemsize + piece * (8 * self.value_bytes)
