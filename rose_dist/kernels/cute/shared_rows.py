"""A few rows of a block's shared memory: copied there, and normalised in place by all its warps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import load_shared, store_shared
from rose_dist.kernels.cute.resident_weights import halves
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import commit_copies, copy_ahead

VECTOR = 8
"""Elements of 16 bytes."""


@dataclass(frozen=True)
class SharedRows:
    """Up to `most` rows of bf16, the norm's weight, and sums of squares, one after the other.

    warps: of the block. `at` is the shared address of all of it.
    """

    hidden: int
    warps: int
    most: int

    @property
    def vectors(self) -> int:
        """Of a row."""
        return self.hidden // VECTOR

    @property
    def parts(self) -> int:
        """In which a row is normalised, a warp each: few, so that several rows take turns, yet more than one."""
        return next(n for n in (3, 2, 1) if self.warps % n == 0 and self.vectors % n == 0)

    @property
    def steps(self) -> int:
        """Vectors a lane of a part."""
        return -(-self.vectors // self.parts // WARP)

    @property
    def row_stride(self) -> int:
        """Bytes: an odd multiple of 64, so that 8 lanes of 2 rows meet 32 different banks."""
        return (self.hidden // 32 | 1) * 64

    @property
    def squares_offset(self) -> int:
        return self.most * self.row_stride + self.hidden * 2

    @property
    def bytes(self) -> int:
        return self.squares_offset + self.most * self.parts * 4

    @cute.jit
    def fetch_scales(self, at: Int32, scale: Int64) -> None:
        """Start copying the norm's weight [hidden]: a group of copies, empty for most warps."""
        if cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP) < self.parts:
            for i in range_constexpr(self.steps):
                copy_ahead(self.scale_place(at, i), scale + self.vector_place(i) * 16)
        commit_copies()

    @cute.jit
    def square(self, at: Int32, x: Int64, rows: Int32) -> None:
        """Copy dense rows here, and the sums of squares of their parts."""
        warp, lane = cute.arch.thread_idx()[0] // WARP, cute.arch.thread_idx()[0] % WARP
        for row in range(warp // self.parts, rows, self.warps // self.parts):
            source = x + Int64(row) * (self.hidden * 2)
            loaded = [vector.load(source + self.vector_place(i) * 16, Uint32, 4, 16) for i in range(self.steps)]
            squares = Float32(0.0)
            for i in range_constexpr(self.steps):
                words = [loaded[i][j] for j in range(4)]
                valid, own = self.in_part(i), Float32(0.0)
                for value in widened(words):
                    own = own + value * value
                squares = squares + vector.select(valid, own, Float32(0.0))
                store_if(valid, self.row_place(at, row, i), words)
            squares = vector.group_sum(squares, WARP)
            sums = self.sums(at, row)
            if lane == 0:
                sums[warp % self.parts] = squares

    @cute.jit
    def normalise(self, at: Int32, rows: Int32, eps: Float32) -> None:
        """The rows over their root mean square, times the norm's weight; after a block barrier behind `square`."""
        warp = cute.arch.thread_idx()[0] // WARP
        for row in range(warp // self.parts, rows, self.warps // self.parts):
            sums, squares = self.sums(at, row), Float32(0.0)
            for part in range_constexpr(self.parts):
                squares = squares + sums[part]
            inverse = cute.math.rsqrt(squares * Float32(1.0 / self.hidden) + eps)
            for i in range_constexpr(self.steps):
                scale_if(self.in_part(i), self.row_place(at, row, i), self.scale_place(at, i), inverse)

    def row(self, at: Any, row: Any) -> Any:
        """A row's shared address."""
        return at + row * self.row_stride

    def sums(self, at: Any, row: Any) -> Any:
        """The parts' sums of squares of a row."""
        place = at + self.squares_offset + row * (self.parts * 4)
        pointer = cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=4)
        return cute.make_tensor(pointer, cute.make_layout(self.parts))

    def row_place(self, at: Any, row: Any, step: int) -> Any:
        return self.row(at, row) + self.vector_place(step) * 16

    def scale_place(self, at: Any, step: int) -> Any:
        return at + self.most * self.row_stride + self.vector_place(step) * 16

    def vector_place(self, step: int) -> Any:
        """Which vector of a row this lane takes in a step; the part's last one in place of any beyond."""
        size = self.vectors // self.parts
        warp, lane = cute.arch.thread_idx()[0] // WARP, cute.arch.thread_idx()[0] % WARP
        return warp % self.parts * size + vector.min_of(lane + step * WARP, Int32(size - 1))

    def in_part(self, step: int) -> Any:
        """Whether there is such a vector."""
        return Boolean(cute.arch.thread_idx()[0] % WARP + step * WARP < self.vectors // self.parts)


@cute.jit
def store_if(valid: Boolean, address: Int32, words: list[Any]) -> None:
    """Four words to shared memory, where `valid`."""
    if valid:
        store_shared(address, [ptx.from_bits(Uint32(word)) for word in words])


@cute.jit
def scale_if(valid: Boolean, address: Int32, scales: Int32, inverse: Float32) -> None:
    """Eight bf16 of shared memory, each times `inverse` and its scale, where `valid`."""
    if valid:
        values, factors = widened(load_shared(address, 4)), widened(load_shared(scales, 4))
        normed = [value * inverse * factor for value, factor in zip(values, factors, strict=True)]
        words = [ptx.to_bf16x2(*normed[j : j + 2]) for j in range(0, VECTOR, 2)]
        store_shared(address, [ptx.from_bits(word) for word in words])


def widened(words: Any) -> list[Any]:
    """The bf16 of some words."""
    return [half for word in words for half in halves(word)]
