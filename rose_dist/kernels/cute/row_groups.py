"""Rows into the groups in which Hopper's expert GEMMs read them, in bf16 or e4m3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Stream, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.formats import E4M3_MAX, MIN_AMAX
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_tiling import CELL_BYTES, ROW_GROUP

STEP_BYTES = WARP * ROW_GROUP * CELL_BYTES
"""A group's cells that a block takes at a time, 32."""
QUANTIZE_WARPS = 4
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_TOP, _TOP_MAGNITUDE = 0xFFFF0000, 0x7FFF0000


@cache
def launcher(arch: Arch, experts: int, columns: int, e4m3: bool) -> jit.Launcher:
    return jit.load(GroupRows(arch, experts, RowCells(columns, e4m3)))


@dataclass(frozen=True)
class RowCells:
    """A row that a warp holds: of its cells, each lane every 32nd."""

    columns: int
    e4m3: bool

    @property
    def vectors(self) -> int:
        """Of 16 bytes of bf16, that become a cell."""
        return 2 if self.e4m3 else 1

    @property
    def cells(self) -> int:
        return self.columns // (8 * self.vectors)

    @property
    def steps(self) -> int:
        """Cells that a lane takes."""
        return -(-self.cells // WARP)

    def load(self, row: Any, lane: Any) -> list[Any]:
        """This lane's cells, as words of bf16, the row's last one in place of any beyond."""
        words = []
        for step in range(self.steps):
            cell = vector.min_of(lane + step * WARP, Int32(self.cells - 1))
            for i in range(self.vectors):
                at = row + (Int64(cell) * self.vectors + i) * 16
                loaded = vector.load(at, Uint32, 4, 16)
                words += [loaded[j] for j in range(4)]
        return words

    def scale(self, words: list[Any]) -> Any:
        """Of the row in e4m3, as `quantize` says for FP8."""
        largest = Uint32(0)
        for word in words:
            largest = vector.max_u32(largest, word & Uint32(_TOP_MAGNITUDE))
            largest = vector.max_u32(largest, (word << Uint32(16)) & Uint32(_TOP_MAGNITUDE))
        largest = Uint32(cute.arch.warp_redux_sync(largest, "umax"))
        finite = largest < Uint32(_INFINITY)
        largest = vector.max_u32(largest, ptx.bits(Float32(MIN_AMAX)))
        return ptx.from_bits(vector.select(finite, largest, Uint32(_NAN))) * Float32(1.0 / E4M3_MAX)

    def quantised(self, words: list[Any], scale: Any) -> list[Any]:
        """The cells in e4m3, columns c and c + 8 side by side."""
        inverse, cells = ptx.reciprocal(scale), []
        for first in range(0, len(words), 8):
            own = words[first : first + 8]
            halves = [(ptx.from_bits(w << Uint32(16)), ptx.from_bits(w & Uint32(_TOP))) for w in own]
            values = [value * inverse for pair in halves for value in pair]
            pairs = [Uint32(ptx.to_e4m3x2(values[i], values[i + 8])) for i in range(8)]
            cells += [pairs[i] | (pairs[i + 1] << Uint32(16)) for i in range(0, 8, 2)]
        return cells

    @cute.jit
    def store(self, words: list[Any], groups: Int64, slot: Int32, lane: Int32) -> None:
        """To row `slot` of the groups."""
        target = groups + Int64(slot // ROW_GROUP) * (self.cells * ROW_GROUP * CELL_BYTES)
        target += slot % ROW_GROUP * CELL_BYTES + lane * (ROW_GROUP * CELL_BYTES)
        for step in range_constexpr(self.steps):
            if lane + step * WARP < self.cells:
                place = target + step * (WARP * ROW_GROUP * CELL_BYTES)
                vector.store_words(place, words[4 * step : 4 * step + 4], Uint32, 16)


@dataclass(frozen=True)
class GroupRows(jit.Kernel):
    """A warp a row that is packed by expert. Each finds out for itself whose the row is and where its group stands."""

    experts: int
    cells: RowCells

    @cute.jit
    def __call__(
        self, x: Int64, counts: Int64, offsets: Int64, groups: Int64, scales: Int64, rows: Int32, stream: Stream
    ) -> None:
        """Addresses: as in `row_groups.group_rows`; scales 0 with bf16."""
        self.kernel(x, counts, offsets, groups, scales, rows).launch(
            grid=[(rows + (ROW_GROUP - 1)) // ROW_GROUP, 1, 1], block=[ROW_GROUP * WARP, 1, 1], stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, x: Int64, counts: Int64, offsets: Int64, groups: Int64, scales: Int64, rows: Int32) -> None:
        cells, thread = self.cells, cute.arch.thread_idx()[0]
        lane, row = thread % WARP, cute.arch.block_idx()[0] * ROW_GROUP + thread // WARP
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        words = cells.load(x + Int64(vector.min_of(row, rows - 1)) * (cells.columns * 2), lane)
        before, own = self.find(counts, offsets, row, lane)
        if const_expr(cells.e4m3):
            scale = cells.scale(words)
            words = cells.quantised(words, scale)
        if (row < rows) & (own >= 0):
            slot = before + own
            if const_expr(cells.e4m3):
                if lane == 0:
                    vector.scalar(scales + Int64(slot) * 4, Float32)[0] = scale
            cells.store(words, groups, slot, lane)

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


@dataclass(frozen=True)
class QuantizeRows(jit.Kernel):
    """A warp a row of bf16, into e4m3 in the order of cells, with its scale. To be launched right after `AssignSlots`:
    it does all its work while that still runs.
    """

    cells: RowCells

    @cute.jit
    def __call__(self, x: Int64, codes: Int64, scales: Int64, tokens: Int32, stream: Stream) -> None:
        """Addresses: x, bf16 [tokens, columns]; codes, bytes of the same shape; scales, fp32 [tokens]."""
        self.kernel(x, codes, scales, tokens).launch(
            grid=[(tokens + (QUANTIZE_WARPS - 1)) // QUANTIZE_WARPS, 1, 1], block=[QUANTIZE_WARPS * WARP, 1, 1],
            stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, x: Int64, codes: Int64, scales: Int64, tokens: Int32) -> None:
        cells, thread = self.cells, cute.arch.thread_idx()[0]
        lane, token = thread % WARP, cute.arch.block_idx()[0] * QUANTIZE_WARPS + thread // WARP
        # `AssignSlots`, the launch before, lets this one start after all before it have ended, and uses none of these.
        words = cells.load(x + Int64(vector.min_of(token, tokens - 1)) * (cells.columns * 2), lane)
        scale = cells.scale(words)
        words = cells.quantised(words, scale)
        if token < tokens:
            if lane == 0:
                vector.scalar(scales + Int64(token) * 4, Float32)[0] = scale
            for step in range_constexpr(cells.steps):
                cell = lane + step * WARP
                if cell < cells.cells:
                    target = codes + Int64(token) * cells.columns + cell * CELL_BYTES
                    vector.store_words(target, words[4 * step : 4 * step + 4], Uint32, CELL_BYTES)
        cute.arch.griddepcontrol_launch_dependents()
        # No thread may leave before the wait: the launch after this one waits for this one alone.
        cute.arch.griddepcontrol_wait()


@dataclass(frozen=True)
class GatherGroups(jit.Kernel):
    """A block a group, a thread some cells of one row, from wherever that is. To be launched right after `AssignSlots`,
    or `QuantizeRows` behind it.

    A warp reads four neighbouring cells of each row, whole sectors, and writes 512 bytes side by side; all cells of a
    thread are under way together.
    """

    experts: int
    cells: RowCells

    @cute.jit
    def __call__(
        self, rows: Int64, scales: Int64, sources: Int64, offsets: Int64, groups: Int64, group_scales: Int64,
        tokens: Int32, most: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: rows [tokens, cells, 16 bytes] and, of codes, scales fp32 [tokens]; sources and offsets of
        `AssignSlots`; groups and their scales as in `GroupRows`, up to `most` groups.
        """
        self.kernel(rows, scales, sources, offsets, groups, group_scales, tokens).launch(
            grid=[most, 1, 1], block=[ROW_GROUP * WARP, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, rows: Int64, scales: Int64, sources: Int64, offsets: Int64, groups: Int64, group_scales: Int64,
        tokens: Int32,
    ) -> None:  # fmt: skip
        cells, thread, group = self.cells.cells, cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        slot, cell = group * ROW_GROUP + thread % ROW_GROUP, thread // ROW_GROUP
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        token = vector.scalar(sources + Int64(slot) * 4, Int32)[0]
        end = vector.scalar(offsets + self.experts * 8, Int64)[0]
        # A group's rows of no pair stay as they are.
        ptx.exit_if((group * ROW_GROUP >= Int32(end)) | (token < 0) | (token >= tokens))
        source = rows + Int64(token) * (cells * CELL_BYTES)
        target = groups + Int64(group) * (cells * ROW_GROUP * CELL_BYTES) + thread * CELL_BYTES
        steps = -(-cells // WARP)
        places = [vector.min_of(cell + step * WARP, Int32(cells - 1)) for step in range(steps)]
        words = [vector.load(source + Int64(at) * CELL_BYTES, Uint32, 4, CELL_BYTES) for at in places]
        if const_expr(self.cells.e4m3):
            scale = vector.scalar(scales + Int64(token) * 4, Float32)[0]
            if cell == 0:
                vector.scalar(group_scales + Int64(slot) * 4, Float32)[0] = scale
        for step in range_constexpr(steps):
            there = (step + 1) * WARP <= cells or cell + step * WARP < cells
            vector.store_if(Boolean(there), target + step * STEP_BYTES, words[step], Uint32, 4, CELL_BYTES)
