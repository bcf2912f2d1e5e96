"""A warp's tiles of keys and values on their way from a paged cache to the tensor cores.

Each lane copies into shared memory what it will itself need as fragments, and nothing else, so it waits for its own
copies only. That works because the head's dimensions may stand in any order, both as the summed index of q · k and as
the columns of p · v: a lane's share of a key, or of a value, is contiguous in the cache. Lane 4g + j has

    of keys g and g + 8           the j-th 16 bytes of every 64
    of values 2j, 2j + 1, 2j + 8,
    2j + 9                        the g-th 8 dimensions of every 64
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.earlier_attention.paged_attention import TILE
from rose_dist.kernels import ptx_numbers, vector, warp_matrix
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, cute, dsl_user_op, range_constexpr
from rose_dist.kernels.inline_asm import asm as _asm
from rose_dist.kernels.variants import WARP

LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632
"""Selectors of `permute`: the lower or upper 16 bits of two words side by side, those of the first word below."""
LOW_BYTES, HIGH_BYTES = 0x5140, 0x7362
"""The lower or upper two bytes of two words, each beside its counterpart, those of the first word below."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of one cache: bf16, or e4m3 that becomes fp16, which holds all of its values."""

    head_dim: int
    dtype: torch.dtype

    @property
    def fp8(self) -> bool:
        return self.dtype is torch.float8_e4m3fn

    @property
    def key_pieces(self) -> int:
        """16-byte pieces of one key, a lane."""
        return self.head_dim * self.dtype.itemsize // 64

    @property
    def value_pieces(self) -> int:
        """Pieces of 8 dimensions of one value, a lane."""
        return self.head_dim // 64

    @property
    def value_bytes(self) -> int:
        """Bytes of such a piece."""
        return 8 * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Shared memory of a tile: its keys, then its values."""
        return 2 * TILE * self.head_dim * self.dtype.itemsize

    @cute.jit
    def copy(
        self, stage: Uint32, keys: Int64, values: Int64, slot_stride: Int64, base: Int64, tile: Int32, low: Int32,
        high: Int32, end: Int32,
    ) -> None:  # fmt: skip
        """Start this lane's copies of a tile, whose first key has slot `base`: a group of them, empty from tile `end`
        on. Keys below `low` and from `high` on are not read; zeros stand for them.
        """
        if tile < end:
            lane = cute.arch.thread_idx()[0] % WARP
            g, j = lane // 4, lane % 4
            row = slot_stride * self.dtype.itemsize
            for i in range_constexpr(2 * self.key_pieces):
                token, piece = g + 8 * (i // self.key_pieces), i % self.key_pieces
                source = keys + (base + token) * row + (piece * 64 + j * 16)
                place = stage + Uint32(i * (WARP * 16)) + Uint32(lane * 16)
                _copy(place, source, seen(tile, token, low, high), 16)
            first = self.bytes // 2
            for i in range_constexpr(4 * self.value_pieces):
                token, piece = 2 * j + (0, 1, 8, 9)[i // self.value_pieces], i % self.value_pieces
                source = values + (base + token) * row + (piece * 8 + g) * self.value_bytes
                place = stage + Uint32(first + i * (WARP * self.value_bytes)) + Uint32(lane * self.value_bytes)
                _copy(place, source, seen(tile, token, low, high), self.value_bytes)
        warp_matrix.commit_copies()

    def keys(self, stage: Any, n: int) -> list[Any]:
        """b of every product step for keys 8n … 8n + 7: two words each."""
        lane = cute.arch.thread_idx()[0] % WARP
        fragments = []
        for i in range(self.key_pieces):
            place = stage + Uint32((n * self.key_pieces + i) * (WARP * 16)) + Uint32(lane * 16)
            words = warp_matrix.load_shared_16b(place)
            if self.fp8:
                fragments += [warp_matrix.widen_e4m3x4(word) for word in words]
            else:
                fragments += [words[:2], words[2:]]
        return fragments

    def queries(self, q: Any, row: Any, group: Any) -> list[Any]:
        """A query head's words in the order of `keys`, two a product step; zeros from row `group` on."""
        j = cute.arch.thread_idx()[0] % 4
        piece_bytes = 32 if self.fp8 else 16
        address = q + Int64(vector.min_of(row, group - 1)) * (self.head_dim * 2) + j * piece_bytes
        words = []
        for i in range(self.key_pieces):
            for k in range(0, piece_bytes, 16):
                loaded = vector.load(address + (i * 4 * piece_bytes + k), Uint32, 4, 16)
                words += [vector.select(row < group, loaded[w], Uint32(0)) for w in range(4)]
        return [self.pair(*_widen_bf16x2(word)) for word in words] if self.fp8 else words

    def values(self, stage: Any, piece: int) -> list[Any]:
        """b of the eight products for dimensions 64 · piece …: column g of product n is dimension 8g + n of them."""
        lane = cute.arch.thread_idx()[0] % WARP
        size = self.value_bytes
        first = stage + Uint32(self.bytes // 2) + Uint32(lane * size)
        load = warp_matrix.load_shared_8b if self.fp8 else warp_matrix.load_shared_16b
        a, b, c, d = (load(first + Uint32((t * self.value_pieces + piece) * (WARP * size))) for t in range(4))
        fragments = []
        for w in range(len(a)):
            if self.fp8:
                for selector in (LOW_BYTES, HIGH_BYTES):
                    above = warp_matrix.widen_e4m3x4(warp_matrix.permute(a[w], b[w], selector))
                    below = warp_matrix.widen_e4m3x4(warp_matrix.permute(c[w], d[w], selector))
                    fragments += [[above[k], below[k]] for k in range(2)]
            else:
                for selector in (LOW_HALVES, HIGH_HALVES):
                    fragments.append(
                        [warp_matrix.permute(a[w], b[w], selector), warp_matrix.permute(c[w], d[w], selector)]
                    )
        return fragments

    def pair(self, low: Any, high: Any) -> Any:
        """Two fp32 as a word of what is multiplied."""
        return warp_matrix.to_f16x2(low, high) if self.fp8 else ptx_numbers.to_bf16x2(low, high)

    def multiply_add(self, c: Any, a: Any, b: Any) -> Any:
        return warp_matrix.multiply_add(c, a, b, "f16" if self.fp8 else "bf16")


def seen(tile: Any, token: Any, low: Any, high: Any) -> Any:
    """Whether a tile's key is one of `low` … `high` − 1."""
    position = tile * TILE + token
    return (position >= low) & (position < high)


def _widen_bf16x2(word: Any) -> tuple[Any, Any]:
    return ptx_numbers.from_bits(word << Uint32(16)), ptx_numbers.from_bits(word & Uint32(0xFFFF0000))


@dsl_user_op
def _copy(shared: Any, source: Any, valid: Any, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying 8 or 16 bytes; zeros, and nothing is read, where `valid` does not hold."""
    level = "cg" if size == 16 else "ca"
    text = (
        f"{{ .reg .pred wanted; .reg .b32 bytes; setp.ne.u32 wanted, $2, 0; selp.b32 bytes, {size}, 0, wanted; "
        f"cp.async.{level}.shared.global [$0], [$1], {size}, bytes; }}"
    )
    _asm(text, "r,l,r", None, Uint32(shared), Int64(source), Uint32(Boolean(valid)), loc=loc, ip=ip)
