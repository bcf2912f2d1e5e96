"""Linear layers of few rows: bf16 weights go from memory into registers and from there through tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import Float32, Int32, Int64, Stream, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.variants import WARP, LinearShape
from rose_dist.kernels.warp_matrix import multiply_add

OUTPUTS = 16
"""A block's outputs."""
COLUMNS = 32
"""Inputs that a warp multiplies at a time; 16 bytes a lane of each of its two weight rows."""


@cache
def launcher(arch: Arch, inputs: int, shape: LinearShape, row_tiles: int, wide: bool) -> jit.Launcher:
    return jit.load(
        SmallLinear(arch, inputs, shape.warps_for(inputs // COLUMNS), shape.ahead, shape.per_sm, row_tiles, wide)
    )


@dataclass(frozen=True)
class SmallLinear(jit.Kernel):
    """A block has 16 outputs; its warps share the inputs, always in the same way, and add up in shared memory.

    Lane 4g + q holds inputs 8q … 8q + 7 of a run of 32, of outputs 2g and 2g + 1 and of row g of x. Which inputs an
    operand's column stands for does not matter as long as both operands agree.

    ahead: runs of 32 inputs that a warp has in flight.
    row_tiles: groups of 8 rows of x.
    wide: fp32 results instead of bf16.
    """

    inputs: int
    warps: int
    ahead: int
    per_sm: int
    row_tiles: int
    wide: bool

    @cute.jit
    def __call__(
        self, x: Int64, x_stride: Int64, weight: Int64, bias: Int64, out: Int64, rows: Int32, outputs: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x bf16 [rows, inputs] with a stride in elements, weight bf16 [outputs, inputs], bias bf16
        [outputs] or 0, out [rows, outputs].
        """
        self.kernel(x, x_stride, weight, bias, out, rows, outputs).launch(
            grid=[outputs // OUTPUTS, 1, 1], block=[self.warps * WARP, 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=self.per_sm, preferred_smem_carveout=20,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int64, weight: Int64, bias: Int64, out: Int64, rows: Int32, outputs: Int32
    ) -> None:
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        group, quarter = lane // 4, lane % 4
        share, row_bytes = self.inputs // COLUMNS // self.warps, self.inputs * 2
        inside = Int64(warp * (share * COLUMNS * 2) + quarter * 16)
        pair = block * (OUTPUTS // 2) + group
        source = weight + Int64(pair) * (2 * row_bytes) + inside
        fetched = [_fetch(source, i, row_bytes) for i in range(min(self.ahead, share))]
        words = Uint32(0)
        if bias != 0:
            words = Uint32(vector.scalar(bias + Int64(pair) * 4, Uint32)[0])
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        sources = [
            x + Int64(vector.min_of(group + 8 * i, rows - 1)) * x_stride * 2 + inside for i in range(self.row_tiles)
        ]
        sums = [[Float32(0.0)] * 4 for _ in range(self.row_tiles)]
        for i in range_constexpr(share):
            if const_expr(self.row_tiles > 1):
                cute.arch.sync_warp()  # else the assembler gathers the loads of x in front, and spills
            if const_expr(i + self.ahead < share):
                fetched.append(_fetch(source, i + self.ahead, row_bytes))
            first, second = fetched[i]
            for tile in range_constexpr(self.row_tiles):
                values = vector.load(sources[tile] + i * (COLUMNS * 2), Uint32, 4, 16)
                for k in range_constexpr(0, 4, 2):
                    left = (first[k], second[k], first[k + 1], second[k + 1])
                    sums[tile] = multiply_add(sums[tile], left, (values[k], values[k + 1]), "bf16")
        size = self.warps * self.row_tiles * WARP * 4
        meeting = cute.make_tensor(cute.arch.alloc_smem(Float32, size, alignment=16), cute.make_layout(size))
        self.meet(meeting, sums, words, out, pair, rows, outputs)

    @cute.jit
    def meet(
        self, meeting: cute.Tensor, sums: list[list[Float32]], words: Uint32, out: Int64, pair: Int32, rows: Int32,
        outputs: Int32,
    ) -> None:  # fmt: skip
        """Add up the warps' sums in the order of the inputs, by a warp for each 8 rows, and write results."""
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        for tile in range_constexpr(self.row_tiles):
            part = _part(meeting, (warp * self.row_tiles + tile) * WARP + lane)
            for i in range_constexpr(4):
                part[i] = sums[tile][i]
        cute.arch.sync_threads()
        for tile in range_constexpr(self.row_tiles):
            if warp == tile % self.warps:
                self.write(meeting, tile, words, out, pair, rows, outputs)

    @cute.jit
    def write(
        self, meeting: cute.Tensor, tile: int, words: Uint32, out: Int64, pair: Int32, rows: Int32, outputs: Int32
    ) -> None:
        lane = cute.arch.thread_idx()[0] % WARP
        sums = _part(meeting, tile * WARP + lane).load()
        for other in range_constexpr(1, self.warps):
            sums = sums + _part(meeting, (other * self.row_tiles + tile) * WARP + lane).load()
        low, high = ptx.from_bits(words << Uint32(16)), ptx.from_bits(words & Uint32(0xFFFF0000))
        for i in range_constexpr(2):
            even, odd, row = sums[i] + low, sums[2 + i] + high, tile * 8 + lane % 4 * 2 + i
            if row < rows:
                target = out + (Int64(row) * outputs + pair * 2) * (4 if self.wide else 2)
                if const_expr(self.wide):
                    vector.store_words(target, [even, odd], Float32, 8)
                else:
                    vector.scalar(target, Uint32)[0] = ptx.to_bf16x2(even, odd)


def _fetch(source: Any, run: int, row_bytes: int) -> Any:
    """A lane's 16 bytes of its two outputs' weights."""
    return [ptx.load_early_16b(source + (run * COLUMNS * 2 + row * row_bytes)) for row in range(2)]


def _part(meeting: Any, index: Any) -> Any:
    pointer = cute.make_ptr(
        Float32, Int32(meeting.iterator.toint()) + index * 16, cute.AddressSpace.smem, assumed_align=16
    )
    return cute.make_tensor(pointer, cute.make_layout(4))
