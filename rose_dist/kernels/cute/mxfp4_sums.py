"""Where the warps' sums of an item meet in shared memory and become results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import load_shared_floats, store_shared
from rose_dist.kernels.cute.swiglu import clamped_swiglu_value
from rose_dist.kernels.dsl import BFloat16, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.stream_tiling import StreamTiling
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class Sums:
    """Parts of 16 outputs by 8 rows. Part 2i + h has rows 8i … 8i + 7, and of the outputs half h.

    tiles, gated: as in `mxfp4_experts.ExpertLinear`.
    """

    tiles: int
    tiling: StreamTiling
    gated: bool

    @property
    def pair_bytes(self) -> int:
        """Bytes of what two rows of a matrix give."""
        return 2 if self.gated else 4

    def place(self, meeting: Any, warp: Any, part: Any) -> Any:
        """Where this lane's sums of a warp's part meet; lanes that hold no row's have their neighbour's place."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        column = vector.min_of(lane % 4, Int32(tiling.quads - 1))
        return meeting + (warp * tiling.parts + part) * tiling.part_bytes + (lane // 4 * tiling.quads + column) * 16

    @cute.jit
    def store(self, meeting: Int32, warp: Int32, sums: cute.Tensor) -> None:
        """Store this warp's sums where `finish` finds them."""
        if cute.arch.thread_idx()[0] % 4 < self.tiling.quads:
            for part in range_constexpr(self.tiling.parts):
                store_shared(self.place(meeting, warp, part), [sums[4 * part + i] for i in range(4)])

    @cute.jit
    def bias(self, bias: Int64, expert: Int32, tile: Int32, part: Int32) -> Uint32:
        """The two biases of this lane's outputs of a part, as bf16; zeros if there are none."""
        words = Uint32(0)
        if bias != 0:
            pair = (expert * self.tiles + tile) * 16 + part % 2 * 8 + cute.arch.thread_idx()[0] % WARP // 4
            words = Uint32(vector.scalar(bias + Int64(pair) * 4, Uint32)[0])
        return words

    def total(self, meeting: Any, part: Any) -> Any:
        """The warps' sums of one part, added in the order of the warps."""
        sums = load_shared_floats(self.place(meeting, 0, part))
        for warp in range(1, self.tiling.warps):
            more = load_shared_floats(self.place(meeting, warp, part))
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        return sums

    @cute.jit
    def finish(
        self, meeting: Int32, part: Int32, target: Int64, count: Int32, factor: Int32, biases: Uint32, alpha: Float32,
        limit: Float32,
    ) -> None:  # fmt: skip
        """Add the warps' sums of one part, in the order of the warps, and write results.

        target: where the segment's first row has the item's first result.
        """
        lane, sums = cute.arch.thread_idx()[0] % WARP, self.total(meeting, part)
        row = part // 2 * 8 + lane % 4 * 2
        ending = ending_of(factor, biases)
        target += (row * (16 * self.tiles) + part % 2 * 8 + lane // 4) * self.pair_bytes
        for i in range_constexpr(2):
            even, odd = outputs(sums, i, ending)
            if row + i < count:
                if const_expr(self.gated):
                    vector.scalar(target, BFloat16)[0] = BFloat16(clamped_swiglu_value(even, odd, alpha, limit))
                else:
                    vector.scalar(target, Uint32)[0] = ptx.to_bf16x2(even, odd)
            target += 16 * self.tiles * self.pair_bytes


def ending_of(factor: Any, biases: Any) -> tuple[Any, Any, Any]:
    """Scale and biases of two outputs, from the bits of the one and the two bf16 of the others."""
    low, high = ptx.from_bits(biases << Uint32(16)), ptx.from_bits(biases & Uint32(0xFFFF0000))
    return ptx.from_bits(Uint32(factor)), low, high


def outputs(sums: Any, row: int, ending: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """Of a part's sums, of two rows, the outputs of one."""
    scale, low, high = ending
    return sums[row] * scale + low, sums[2 + row] * scale + high
