"""Rows of each expert to e4m3, in the groups in which the expert GEMM reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import BFloat16, Float32, Int32, Int64, Stream, Uint32, cute, range_constexpr
from rose_dist.kernels.e4m3_tiling import ROW_GROUP
from rose_dist.kernels.formats import E4M3_MAX, MIN_AMAX
from rose_dist.kernels.variants import WARP

CELL = 16
"""Columns that a lane takes at a time."""
_INFINITY, _NAN = 0x7F800000, 0x7FC00000


@cache
def launcher(arch: Arch, experts: int, columns: int) -> jit.Launcher:
    return jit.load(QuantizeRows(arch, experts, columns))


@dataclass(frozen=True)
class QuantizeRows(jit.Kernel):
    """A warp a row. Each finds out for itself whose the row is and where its group stands."""

    experts: int
    columns: int

    @cute.jit
    def __call__(
        self, x: Int64, counts: Int64, offsets: Int64, codes: Int64, scales: Int64, rows: Int32, stream: Stream
    ) -> None:
        """Addresses: x, bf16 [rows, columns]; the rest as in `mxfp4_e4m3.quantize_rows`."""
        self.kernel(x, counts, offsets, codes, scales, rows).launch(
            grid=[(rows + (ROW_GROUP - 1)) // ROW_GROUP, 1, 1], block=[ROW_GROUP * WARP, 1, 1], stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, x: Int64, counts: Int64, offsets: Int64, codes: Int64, scales: Int64, rows: Int32) -> None:
        thread = cute.arch.thread_idx()[0]
        lane, row = thread % WARP, cute.arch.block_idx()[0] * ROW_GROUP + thread // WARP
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        source = x + Int64(vector.min_of(row, rows - 1)) * (self.columns * 2)
        values = self.load(source, lane)
        before, own = self.find(counts, offsets, row, lane)
        largest = Uint32(cute.arch.warp_redux_sync(vector.largest_magnitude(values), "umax"))
        finite = largest < Uint32(_INFINITY)
        largest = vector.max_u32(largest, ptx.bits(Float32(MIN_AMAX)))
        scale = ptx.from_bits(vector.select(finite, largest, Uint32(_NAN))) * Float32(1.0 / E4M3_MAX)
        if (row < rows) & (own >= 0):
            slot = before + own
            if lane == 0:
                vector.scalar(scales + Int64(slot) * 4, Float32)[0] = scale
            place = Int64(slot // ROW_GROUP) * (self.columns * ROW_GROUP) + slot % ROW_GROUP * CELL
            self.store(values, ptx.reciprocal(scale), codes + place, lane)

    @property
    def cells(self) -> int:
        return self.columns // CELL

    @property
    def steps(self) -> int:
        """Cells that a lane takes."""
        return -(-self.cells // WARP)

    def load(self, source: Any, lane: Any) -> list[Any]:
        """This lane's cells, the row's last one in place of any beyond."""
        values = []
        for step in range(self.steps):
            cell = vector.min_of(lane + step * WARP, Int32(self.cells - 1))
            wide = vector.load(source + Int64(cell) * (CELL * 2), BFloat16, CELL, 16).to(Float32)
            values += [wide[i] for i in range(CELL)]
        return values

    @cute.jit
    def find(self, counts: Int64, offsets: Int64, row: Int32, lane: Int32) -> tuple[Int32, Int32]:
        """Rows of groups before those of the expert that `row` is of, and which of the expert's it is; -1: of none."""
        before, own = Int32(0), Int32(-1)
        for step in range_constexpr(-(-self.experts // WARP)):
            expert = lane + step * WARP
            at = Int64(vector.min_of(expert, Int32(self.experts - 1)))
            count = Int32(ptx.load_relaxed(counts + at * 4, "gpu"))
            start = Int32(ptx.load_relaxed_u64(offsets + at * 8, "gpu"))
            if expert < self.experts:
                if start + count <= row:
                    before += (count + (ROW_GROUP - 1)) // ROW_GROUP * ROW_GROUP
                elif start <= row:
                    own = row - start
        before = Int32(cute.arch.warp_redux_sync(before, "add"))
        own = Int32(cute.arch.warp_redux_sync(own, "max"))
        return before, own

    @cute.jit
    def store(self, values: list[Any], inverse: Float32, target: Int64, lane: Int32) -> None:
        """This lane's cells, columns c and c + 8 side by side."""
        for step in range_constexpr(self.steps):
            cell = lane + step * WARP
            if cell < self.cells:
                own = [value * inverse for value in values[step * CELL : (step + 1) * CELL]]
                pairs = [Uint32(ptx.to_e4m3x2(own[i], own[i + 8])) for i in range(8)]
                words = [pairs[i] | (pairs[i + 1] << Uint32(16)) for i in range(0, 8, 2)]
                vector.store_words(target + Int64(cell) * (ROW_GROUP * CELL), words, Uint32, 16)
