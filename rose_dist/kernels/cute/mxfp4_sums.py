"""Where the warps' sums of an item meet in shared memory and become results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.handover import give_results
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
    gives: bool = False
    """Results are given to all blocks, by `give`."""

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

    def give(
        self, meeting: Any, part: Any, handover: Any, epoch: Any, expert: Any, tile: Any, factor: Any, biases: Any,
        alpha: Any, limit: Any,
    ) -> None:  # fmt: skip
        """`finish` of a single row whose results are handed over, to all blocks."""
        even, odd = self.total(meeting, part, factor, biases)[0]
        value = clamped_swiglu_value(even, odd, alpha, limit)
        give_results(handover, epoch, expert, tile * 2 + part, value, self.tiles * 16)

    def total(self, meeting: Any, part: Any, factor: Any, biases: Any) -> list[tuple[Any, Any]]:
        """The warps' sums of one part, added in the order of the warps, with their biases: two outputs of two rows."""
        sums = load_shared_floats(self.place(meeting, 0, part))
        for warp in range(1, self.tiling.warps):
            more = load_shared_floats(self.place(meeting, warp, part))
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        scale = ptx.from_bits(Uint32(factor))
        low, high = ptx.from_bits(biases << Uint32(16)), ptx.from_bits(biases & Uint32(0xFFFF0000))
        return [(sums[i] * scale + low, sums[2 + i] * scale + high) for i in range(2)]

    @cute.jit
    def finish(
        self, meeting: Int32, part: Int32, target: Int64, count: Int32, factor: Int32, biases: Uint32, alpha: Float32,
        limit: Float32,
    ) -> None:  # fmt: skip
        """Add the warps' sums of one part, in the order of the warps, and write results.

        target: where the segment's first row has the item's first result.
        """
        lane = cute.arch.thread_idx()[0] % WARP
        outputs = self.total(meeting, part, factor, biases)
        row = part // 2 * 8 + lane % 4 * 2
        target += (row * (16 * self.tiles) + part % 2 * 8 + lane // 4) * self.pair_bytes
        for i in range_constexpr(2):
            even, odd = outputs[i]
            if row + i < count:
                if const_expr(self.gated):
                    vector.scalar(target, BFloat16)[0] = BFloat16(clamped_swiglu_value(even, odd, alpha, limit))
                else:
                    vector.scalar(target, Uint32)[0] = ptx.to_bf16x2(even, odd)
            target += 16 * self.tiles * self.pair_bytes
