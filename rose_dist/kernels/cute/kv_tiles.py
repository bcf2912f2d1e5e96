"""A warp's tiles of keys and values on their way from a paged cache to the tensor cores.

Each lane copies into shared memory what it will itself need as fragments, and nothing else, so it waits for its own
copies only. That works because a head's dimensions may stand in any order, both as the summed index of q · k and as
the columns of p · v: a lane's share of a key, or of a value, is contiguous in the cache. Of every head, lane 4g + j has

    of keys g and g + 8           the j-th 16 bytes of every 64
    of values 2j, 2j + 1, 2j + 8,
    2j + 9                        the g-th 8 dimensions of every 64

Tokens may stand in any order too: key g of these is token `key_token(g)` of the tile. The order is one in which tokens
that lie as in memory are read without bank conflicts (`whole_token_tiles`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import ptx_numbers, vector, warp_matrix
from rose_dist.kernels.attention_tiling import TILE
from rose_dist.kernels.dsl import Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.variants import WARP

LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632
"""Selectors of `permute`: the lower or upper 16 bits of two words side by side, those of the first word below."""
LOW_BYTES, HIGH_BYTES = 0x5140, 0x7362
"""The lower or upper two bytes of two words, each beside its counterpart, those of the first word below."""


AHEAD = 256
"""Bytes that the L2 fetches together: of neighbouring heads, or tokens, which another warp reads at about the same time
if not this one."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of one cache, 16 keys of `heads` neighbouring heads: bf16, or e4m3 that becomes fp16, which holds all of
    its values.
    """

    head_dim: int
    heads: int
    dtype: torch.dtype

    @property
    def fp8(self) -> bool:
        return self.dtype is torch.float8_e4m3fn

    @property
    def key_pieces(self) -> int:
        """16-byte pieces of one head's key, a lane."""
        return self.head_dim * self.dtype.itemsize // 64

    @property
    def value_pieces(self) -> int:
        """Pieces of 8 dimensions of one head's value, a lane."""
        return self.head_dim // 64

    @property
    def value_bytes(self) -> int:
        """Bytes of such a piece."""
        return 8 * self.dtype.itemsize

    @property
    def head_bytes(self) -> int:
        """Shared memory of one head's keys, and of its values."""
        return TILE * self.head_dim * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Shared memory of a tile: for each head its keys, then its values."""
        return 2 * self.heads * self.head_bytes

    @cute.jit
    def copy(
        self, stage: Uint32, keys: Int64, values: Int64, slot_stride: Int64, slot: Int64, tile: Int32, low: Int32,
        high: Int32,
    ) -> None:  # fmt: skip
        """Start this lane's copies of a tile, whose first key has slot `slot`; heads lie side by side. Keys below `low`
        and from `high` on are not read; zeros stand for them.
        """
        lane = cute.arch.thread_idx()[0] % WARP
        g, j = lane // 4, lane % 4
        row, head = slot_stride * self.dtype.itemsize, self.head_dim * self.dtype.itemsize
        offset, first = slot * row, tile * TILE
        keys += offset + j * 16
        for n in range_constexpr(2):
            token = key_token(g, n)
            near = keys + Int64(token) * row
            count = _bytes(first + token, low, high, 16)
            for h in range_constexpr(self.heads):
                for piece in range_constexpr(self.key_pieces):
                    i = n * self.key_pieces + piece
                    place = stage + Uint32(2 * h * self.head_bytes + i * (WARP * 16)) + Uint32(lane * 16)
                    warp_matrix.copy_async(place, near + (h * head + piece * 64), count, 16, AHEAD)
        size = self.value_bytes
        values += offset + g * size
        for t in range_constexpr(4):
            token = value_token(j, t)
            near = values + Int64(token) * row
            count = _bytes(first + token, low, high, size)
            for h in range_constexpr(self.heads):
                for piece in range_constexpr(self.value_pieces):
                    i = t * self.value_pieces + piece
                    place = stage + Uint32((2 * h + 1) * self.head_bytes + i * (WARP * size)) + Uint32(lane * size)
                    source = near + (h * head + piece * (8 * size))
                    warp_matrix.copy_async(place, source, count, size, AHEAD)

    def key_places(self, stage: Any) -> list[Any]:
        """Where this lane's pieces of both keys begin in a stage."""
        lane = cute.arch.thread_idx()[0] % WARP
        return [stage + Uint32(n * self.key_pieces * (WARP * 16)) + Uint32(lane * 16) for n in range(2)]

    def key_offset(self, head: int, piece: int) -> int:
        """From there on."""
        return 2 * head * self.head_bytes + piece * (WARP * 16)

    def value_places(self, stage: Any) -> list[Any]:
        """Where this lane's pieces of its four values begin."""
        lane, size = cute.arch.thread_idx()[0] % WARP, self.value_bytes
        return [stage + Uint32(t * self.value_pieces * (WARP * size)) + Uint32(lane * size) for t in range(4)]

    def value_offset(self, head: int, piece: int) -> int:
        return (2 * head + 1) * self.head_bytes + piece * (WARP * self.value_bytes)

    def keys(self, places: list[Any], head: int) -> list[Any]:
        """a of every product step for a head's 16 keys, from `key_places`."""
        fragments = []
        for i in range(self.key_pieces):
            above, below = (
                self.split(warp_matrix.load_shared_16b(place + Uint32(self.key_offset(head, i)))) for place in places
            )
            fragments += [[a[0], b[0], a[1], b[1]] for a, b in zip(above, below, strict=True)]
        return fragments

    def split(self, words: list[Any]) -> list[Any]:
        """Four words of keys as pairs of words that are multiplied, one a product step."""
        return [warp_matrix.widen_e4m3x4(word) for word in words] if self.fp8 else [words[:2], words[2:]]

    def queries(self, q: Any, row: Any, group: Any) -> list[Any]:
        """b of every product step in the order of `keys`, for query head `row` of this lane: two words each; zeros from
        row `group` on.
        """
        j = cute.arch.thread_idx()[0] % 4
        piece_bytes = 32 if self.fp8 else 16
        address = q + Int64(vector.min_of(row, group - 1)) * (self.head_dim * 2) + j * piece_bytes
        words = []
        for i in range(self.key_pieces):
            for k in range(0, piece_bytes, 16):
                loaded = vector.load(address + (i * 4 * piece_bytes + k), Uint32, 4, 16)
                words += [vector.select(row < group, loaded[w], Uint32(0)) for w in range(4)]
        return [self.pair(*_widen_bf16x2(word)) for word in words] if self.fp8 else words

    def values(self, places: list[Any], head: int, piece: int) -> list[Any]:
        """a of the four products for a head's dimensions 64 · piece …, the columns being keys: rows g and g + 8 of
        product n are dimensions 8g + 2n and the next of them. From `value_places`.
        """
        load = warp_matrix.load_shared_8b if self.fp8 else warp_matrix.load_shared_16b
        a, b, c, d = (load(place + Uint32(self.value_offset(head, piece))) for place in places)
        fragments = []
        for w in range(len(a)):
            if self.fp8:
                for selector in (LOW_BYTES, HIGH_BYTES):
                    left = warp_matrix.widen_e4m3x4(warp_matrix.permute(a[w], b[w], selector))
                    right = warp_matrix.widen_e4m3x4(warp_matrix.permute(c[w], d[w], selector))
                    fragments.append([*left, *right])
            else:
                fragments.append(
                    [
                        warp_matrix.permute(one, other, selector)
                        for one, other in ((a[w], b[w]), (c[w], d[w]))
                        for selector in (LOW_HALVES, HIGH_HALVES)
                    ]
                )
        return fragments

    def pair(self, low: Any, high: Any) -> Any:
        """Two fp32 as a word of what is multiplied."""
        return warp_matrix.to_f16x2(low, high) if self.fp8 else ptx_numbers.to_bf16x2(low, high)

    def multiply_add(self, c: Any, a: Any, b: Any) -> Any:
        return warp_matrix.multiply_add(c, a, b, "f16" if self.fp8 else "bf16")


def key_token(g: Any, n: int) -> Any:
    """The token of a tile that is key g + 8n of a lane."""
    return (g // 2 + g % 2 * 2) % 4 * 4 + (g % 2 * 2 + n)


def value_token(j: Any, t: int) -> Any:
    """The token whose value is a lane's number t: 2j, 2j + 1, 2j + 8 or 2j + 9 of the keys."""
    return (j + t % 2 * 2) % 4 * 4 + (t % 2 * 2 + t // 2)


def seen(position: Any, low: Any, high: Any) -> Any:
    """Whether a key is one of `low` … `high` − 1."""
    return (position >= low) & (position < high)


def _bytes(position: Any, low: Any, high: Any, size: int) -> Any:
    """Of a key's piece that are to be read: all or nothing."""
    return vector.select(seen(position, low, high), Uint32(size), Uint32(0))


def _widen_bf16x2(word: Any) -> tuple[Any, Any]:
    return ptx_numbers.from_bits(word << Uint32(16)), ptx_numbers.from_bits(word & Uint32(0xFFFF0000))
