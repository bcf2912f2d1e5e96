"""Expert layers of many rows on Hopper in FP8: weights, decoded to e4m3 in registers, times rows in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.e4m3_operands import decode_e4m3, magnitudes, origins, row_factor, write_magnitudes
from rose_dist.kernels.cute.grouped_expert_gemm import GroupedExpertGemm
from rose_dist.kernels.cute.mxfp4_operands import barrier, load_shared, wait
from rose_dist.kernels.cute.swiglu import clamped_swiglu_value
from rose_dist.kernels.dsl import (
    Float32,
    Int32,
    Int64,
    Uint32,
    const_expr,
    cute,
    cutlass,
)  # fmt: skip
from rose_dist.kernels.e4m3_tiling import E4m3Tiling
from rose_dist.kernels.mxfp4_e4m3 import ACTIVATION_EXPONENT
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_matrix import (
    commit_products,
    fence_products,
    further,
    multiply_add_e4m3_async,
)
from rose_dist.kernels.warpgroup_tiling import CELL_BYTES, ROW_GROUP


@cache
def launcher(arch: Arch, experts: int, tiles: int, tiling: E4m3Tiling, gated: bool) -> jit.Launcher:
    return jit.load(E4m3ExpertGemm(arch, experts, tiles, tiling, gated))


@dataclass(frozen=True)
class E4m3ExpertGemm(GroupedExpertGemm):
    """What `mxfp4_e4m3` says, of one layer.

    A warp has half of its 32 matrix rows under way, one product a scale block, while it decodes the other half.
    """

    tiling: E4m3Tiling

    @cute.jit
    def prepare(self, shared: Int32) -> None:
        write_magnitudes(shared + self.tiling.magnitudes_offset, cute.arch.thread_idx()[0], self.tiling.threads)

    @cute.jit
    def finish(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, rows: list[Int32], tile: Int32,
        stage: Int32, parity: Int32, number: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """An item's products and results."""
        lane, width = cute.arch.thread_idx()[0] % WARP, self.tiling.widths[number]
        shift, start, count, rescale = rows
        sums = cute.make_rmem_tensor(width, Float32)
        sums.fill(0.0)
        place = vector.min_of(tile, Int32(self.tiles - 1)) % self.tiling.warps
        wait(barrier(shared, stage), parity)
        tops = self.load_beside(shared, stage, self.tiling.tops_offset + place * 32 + lane // 4 * 4)
        firsts = origins(tops, shared + self.tiling.magnitudes_offset)
        last = self.accumulate(shared, sums, firsts, place, stage, parity, width)
        exponent = 0 if self.gated else -ACTIVATION_EXPONENT
        factors = [row_factor(tops, row, exponent) * ptx.from_bits(Uint32(rescale)) for row in range(4)]
        words = [Uint32(0), Uint32(0)]
        if bias != 0:
            words = self.load_biases(shared, last, place)
        biases = [(ptx.from_bits(w << Uint32(16)), ptx.from_bits(w & Uint32(0xFFFF0000))) for w in words]
        row = lane % 4 * 2
        if tile < self.tiles:
            if const_expr(self.gated):
                group = Int64(start // ROW_GROUP) * self.tiles + tile
                target = out + group * (ROW_GROUP * CELL_BYTES) + (row * CELL_BYTES + lane // 4 * 2)
                scales = shared + self.tiling.ring_offset + last * self.tiling.stage_bytes + self.tiling.scale_offset
                self.write_codes(sums, factors, biases, scales + row * 4, target, count - row, alpha, limit, width)
            else:
                target = out + (Int64(start + shift + row) * (16 * self.tiles) + (tile * 16 + lane // 4)) * 4
                self.write_rows(sums, factors, biases, target, count - row, width)
        self.release(shared, last)

    @property
    def words(self) -> int:
        return 8

    def decode(self, codes: Any, part: int, firsts: list[Any], left: Any) -> None:
        """A tile's part as left operands: of 16 rows four words, for a product."""
        halves = self.halves(part)
        tables = [magnitudes(codes[4], row, firsts[row]) for half, _ in halves for row in (2 * half, 2 * half + 1)]
        for half, at in halves:
            for i in range(2):
                row = 2 * half + i
                left[4 * at + i], left[4 * at + 2 + i] = decode_e4m3(codes[row], *tables[2 * at + i])

    def multiply(self, right: Any, number: int, left: Any, sums: Any, width: int) -> None:
        """Start the products of a stage's part `number`; `right` begins at the stage's rows of x."""
        block, part = divmod(number, self.tiling.parts)
        fence_products()
        for half, at in self.halves(part):
            own = [half * (width // 2) + i for i in range(width // 2)]
            total = multiply_add_e4m3_async(
                [sums[i] for i in own], [left[4 * at + i] for i in range(4)],
                further(right, block * (2 * ROW_GROUP)), self.tiling.cells,
            )  # fmt: skip
            for i, value in zip(own, total, strict=True):
                sums[i] = value
        commit_products()

    def write_codes(
        self, sums: Any, factors: Any, biases: Any, scales: Any, target: Any, left: Any, alpha: Any, limit: Any,
        width: int,
    ) -> None:  # fmt: skip
        """Two results of each row of x, which are neighbours in a cell. `target` is where this lane's first row has
        them, `scales` where its scale is, `left` rows follow.
        """
        for tile in range(width // 8):
            both = [ptx.from_bits(word) for word in load_shared(scales + tile * 32, 2)]
            for i, scale in enumerate(both):
                codes = []
                for half in range(2):
                    at = half * (width // 2) + tile * 4 + i
                    gate = sums[at] * factors[2 * half] * scale + biases[half][0]
                    linear = sums[at + 2] * factors[2 * half + 1] * scale + biases[half][1]
                    codes.append(clamped_swiglu_value(gate, linear, alpha, limit) * Float32(2.0**ACTIVATION_EXPONENT))
                row = tile * 8 + i
                place = target + (tile * self.tiles * (ROW_GROUP * CELL_BYTES) + i * CELL_BYTES)
                ptx.store_where(row < left, place, ptx.to_e4m3x2(*codes))

    def write_rows(self, sums: Any, factors: Any, biases: Any, target: Any, left: Any, width: int) -> None:
        """A pair of results of each row of x for each half of the tile, in bf16. Arguments as in `write_codes`."""
        for tile in range(width // 8):
            for i in range(2):
                row = tile * 8 + i
                for half in range(2):
                    at = half * (width // 2) + tile * 4 + i
                    even, odd = sums[at] * factors[2 * half], sums[at + 2] * factors[2 * half + 1]
                    value = ptx.to_bf16x2(even + biases[half][0], odd + biases[half][1])
                    ptx.store_where(row < left, target + (row * (64 * self.tiles) + half * 32), value)
