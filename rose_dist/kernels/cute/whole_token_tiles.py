"""Tiles of whole tokens, all key heads of 16, copied by one warp for all of a block.

A tile's keys and its values lie together in the cache, and in shared memory as there, but for 32 bytes after every four
tokens: with the order of tokens that `kv_tiles` has, the lanes that read at once are then on different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector, warp_matrix
from rose_dist.kernels.attention_tiling import TILE
from rose_dist.kernels.cute.kv_tiles import Tiles, key_token, seen, value_token
from rose_dist.kernels.cute.mxfp4_operands import barrier
from rose_dist.kernels.dsl import Float32, Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.variants import WARP

CHUNK, GAP = 4, 32
"""Tokens side by side, and bytes after them."""
CHUNKS = TILE // CHUNK


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
        return CHUNKS * (CHUNK * self.token_bytes + GAP)

    @property
    def bytes(self) -> int:
        return 2 * self.half_bytes

    @cute.jit
    def fetch(
        self, full: Int32, stage: Uint32, keys: Int64, values: Int64, slot: Int64, tile: Int32, low: Int32, high: Int32
    ) -> None:  # fmt: skip
        """Start copying what is seen of a tile whose first key has slot `slot`: keys `low` … `high` − 1. The barrier at
        `full` counts the bytes. By one warp: a lane a chunk of keys, or of values.
        """
        lane, size = cute.arch.thread_idx()[0] % WARP, self.token_bytes
        begin = vector.max_of(low - tile * TILE, Int32(0))
        end = vector.min_of(high - tile * TILE, Int32(TILE))
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier(full, 0), 2 * size * (end - begin))
        cute.arch.sync_warp()
        chunk, of_values = lane % CHUNKS, lane >= CHUNKS
        first = vector.max_of(begin, chunk * CHUNK)
        count = vector.min_of(end, chunk * CHUNK + CHUNK) - first
        if (lane < 2 * CHUNKS) & (count > 0):
            source = vector.select(of_values, values, keys) + (slot + first) * size
            half = vector.select(of_values, Int32(self.half_bytes), Int32(0))
            ptx.copy_to_shared(stage + Uint32(half + first * size + chunk * GAP), source, count * size, full)

    def place(self, token: Any) -> Any:
        """Of a token in a tile's keys, or values."""
        return token * self.token_bytes + token // CHUNK * GAP

    def key_places(self, stage: Any) -> list[Any]:
        lane = cute.arch.thread_idx()[0] % WARP
        first = stage + Uint32(self.place(key_token(lane // 4, 0)) + lane % 4 * 16)
        # Its other key is the next token's, in the same chunk.
        return [first, first + Uint32(self.token_bytes)]

    def key_offset(self, head: int, piece: int) -> int:
        return head * self.head_dim * self.dtype.itemsize + piece * 64

    def value_places(self, stage: Any) -> list[Any]:
        lane = cute.arch.thread_idx()[0] % WARP
        first = stage + Uint32(self.half_bytes + lane // 4 * self.value_bytes)
        places = [first + Uint32(self.place(value_token(lane % 4, t))) for t in range(2)]
        return places + [place + Uint32(self.token_bytes) for place in places]

    def value_offset(self, head: int, piece: int) -> int:
        return head * self.head_dim * self.dtype.itemsize + piece * (8 * self.value_bytes)

    @cute.jit
    def clear_unseen(self, stage: Uint32, tile: Int32, low: Int32, high: Int32) -> None:
        """Zeros where this lane's values are that are not seen, and so have not been copied."""
        if (tile * TILE < low) | (tile * TILE + TILE > high):
            lane = cute.arch.thread_idx()[0] % WARP
            for t, place in enumerate(self.value_places(stage)):
                if not seen(tile * TILE + value_token(lane % 4, t), low, high):
                    for head in range_constexpr(self.heads):
                        for piece in range_constexpr(self.value_pieces):
                            self.clear(place + Uint32(self.value_offset(head, piece)))
            # Before a later copy into the stage.
            cute.arch.fence_proxy("async.shared", space="cta")

    def clear(self, place: Any) -> None:
        words = [Float32(0.0)] * (self.value_bytes // 4)
        (warp_matrix.store_shared_8b if self.fp8 else warp_matrix.store_shared_16b)(place, words)
