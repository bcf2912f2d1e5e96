"""Expert layers of many rows on Hopper: weights, decoded into registers, times rows of x in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.grouped_expert_gemm import GroupedExpertGemm
from rose_dist.kernels.cute.mxfp4_operands import decode
from rose_dist.kernels.cute.swiglu import clamped_swiglu_value
from rose_dist.kernels.dsl import (
    Float32,
    Int32,
    Int64,
    Uint16,
    Uint32,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_matrix import (
    RightOperand,
    commit_products,
    fence_products,
    further,
    multiply_add_async,
)
from rose_dist.kernels.warpgroup_tiling import CELL_BYTES, ROW_GROUP, WarpgroupTiling


@cache
def launcher(arch: Arch, experts: int, tiles: int, tiling: WarpgroupTiling, gated: bool) -> jit.Launcher:
    return jit.load(WarpgroupExpertGemm(arch, experts, tiles, tiling, gated))


@dataclass(frozen=True)
class WarpgroupExpertGemm(GroupedExpertGemm):
    """The results of `mxfp4_experts_prefill.ExpertGemm`.

    A warp has half of its 32 rows under way while it decodes the other half, and another warpgroup's products fill
    what is left.
    """

    @cute.jit
    def finish(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32, rows: list[Int32], tile: Int32,
        stage: Int32, parity: Int32, number: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        """An item's products and results."""
        lane, width = cute.arch.thread_idx()[0] % WARP, self.tiling.widths[number]
        shift, start, count, factor = rows
        sums = cute.make_rmem_tensor(width, Float32)
        sums.fill(0.0)
        place = vector.min_of(tile, Int32(self.tiles - 1)) % self.tiling.warps
        last = self.accumulate(shared, sums, [], place, stage, parity, width)
        biases = [Uint32(0), Uint32(0)]
        if bias != 0:
            biases = self.load_biases(shared, last, place)
        self.release(shared, last)
        if tile < self.tiles:
            for half in range_constexpr(2):
                pair, row = tile * 16 + half * 8 + lane // 4, lane % 4 * 2
                if const_expr(self.gated):
                    cell = Int64(start // ROW_GROUP) * (2 * self.tiles) + (tile * 2 + half)
                    target = out + cell * (ROW_GROUP * CELL_BYTES) + (row * CELL_BYTES + lane // 4 * 2)
                else:
                    target = out + (Int64(start + shift + row) * (16 * self.tiles) + pair) * 4
                self.write(sums, half, biases[half], target, count - row, factor, alpha, limit, number)

    @property
    def words(self) -> int:
        return 16

    def decode(self, codes: Any, part: int, firsts: list[Any], left: Any) -> None:
        """A tile's part as left operands: of 16 rows eight words, for two products."""
        for half, at in self.halves(part):
            first, second = (decode(codes[i], codes[4], i) for i in (2 * half, 2 * half + 1))
            for k in range(4):
                left[8 * at + 2 * k], left[8 * at + 2 * k + 1] = first[k], second[k]

    def multiply(self, right: Any, number: int, left: Any, sums: Any, width: int) -> None:
        """Start the products of a stage's part `number`; `right` begins at the stage's rows of x."""
        block, part = divmod(number, self.tiling.parts)
        fence_products()
        for half, at in self.halves(part):
            own = [half * (width // 2) + i for i in range(width // 2)]
            total = [sums[i] for i in own]
            for k in range(2):
                cells = RightOperand(
                    further(right, (2 * block + k) * (2 * ROW_GROUP)), beside=ROW_GROUP * self.tiling.cells
                )
                total = multiply_add_async(total, [left[8 * at + 4 * k + i] for i in range(4)], cells)
            for i, value in zip(own, total, strict=True):
                sums[i] = value
        commit_products()

    def write(
        self, sums: Any, half: int, words: Any, target: Any, left: Any, factor: Any, alpha: Any, limit: Any, number: int
    ) -> None:  # fmt: skip
        """Results of 16 matrix rows; `target` is where this lane's first row of x has its pair, `left` rows follow."""
        scale, width = ptx.from_bits(Uint32(factor)), self.tiling.widths[number]
        low, high = ptx.from_bits(words << Uint32(16)), ptx.from_bits(words & Uint32(0xFFFF0000))
        for tile in range(width // 8):
            at = half * (width // 2) + tile * 4
            pairs = [(sums[at + i] * scale + low, sums[at + 2 + i] * scale + high) for i in range(2)]
            if self.gated:
                both = ptx.to_bf16x2(*(clamped_swiglu_value(*pair, alpha, limit) for pair in pairs))
                values = [Uint16(both), Uint16(both >> Uint32(16))]
                places = [tile * self.tiles * (2 * ROW_GROUP * CELL_BYTES) + i * CELL_BYTES for i in range(2)]
            else:
                values = [ptx.to_bf16x2(*pair) for pair in pairs]
                places = [(tile * 8 + i) * (64 * self.tiles) for i in range(2)]
            for i in range(2):
                ptx.store_where(tile * 8 + i < left, target + places[i], values[i])
