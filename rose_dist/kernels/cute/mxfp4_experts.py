"""Expert layers of few rows: MXFP4 weights are streamed past the rows once, decoded in registers, and multiplied by
tensor cores.

A block takes a run of (expert, rows of x, tile row of the weights) items. Its warps share an item's columns, always in the
same way, and each streams its part through its own ring in shared memory by bulk copies, `depth` items ahead. So no warp
waits for another but once an item, when their sums meet, and no result depends on which rows came along.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.expert_slots import scan_starts, shared_integers
from rose_dist.kernels.cute.swiglu import clamped_swiglu_value
from rose_dist.kernels.dsl import (
    BFloat16,
    Float32,
    Int32,
    Int64,
    Stream,
    Uint8,
    Uint32,
    const_expr,
    cute,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, TILE_BYTES, TILE_ROWS
from rose_dist.kernels.variants import WARP, StreamTiling

SEGMENTS = 64
"""Most (expert, rows of x) pairs that one block may meet."""
_PART_BYTES = WARP * 16
_CODE_MASK = 0x81C081C0


@cache
def launcher(arch: Arch, experts: int, tiles: int, tiling: StreamTiling, gated: bool, early: bool) -> jit.Launcher:
    return jit.load(ExpertLinear(arch, experts, tiles, tiling, gated, early))


@dataclass(frozen=True)
class ExpertLinear(jit.Kernel):
    """y[r] = weight[e] · x[r] + bias[e] over rows packed by expert; or of each pair of these the clamped SwiGLU.

    experts, tiles: matrices, and tile rows of each.
    gated: even outputs are gates, odd ones linear.
    early: `counts` and `offsets` come from before the launch that comes before, so that weights may be fetched while
        that one still runs.
    """

    experts: int
    tiles: int
    tiling: StreamTiling
    gated: bool
    early: bool

    @cute.jit
    def __call__(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, out: Int64,
        alpha: Float32, limit: Float32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: weights u8 [experts, tiles, columns / 32, 544], rescale fp32 [experts], bias bf16 [experts,
        32 · tiles] or 0, x bf16 [rows, columns], counts int32 [experts], offsets int64 [experts + 1], out bf16 [rows,
        32 · tiles] or half of that if gated.
        """
        self.kernel(weights, rescale, bias, x, counts, offsets, out, alpha, limit).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], smem=self.tiling.shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, out: Int64,
        alpha: Float32, limit: Float32,
    ) -> None:  # fmt: skip
        tiling, tiles = self.tiling, self.tiles
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        segments = [shared_integers(SEGMENTS) for _ in range(4)]
        starts = shared_integers(self.experts + 1)
        if thread < tiling.barriers:
            cute.arch.mbarrier_init(_barrier(shared, thread), 1)
        cute.arch.mbarrier_init_fence()
        if const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        self.count_segments(counts, starts)
        items, block, blocks = starts[self.experts] * tiles, cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        first = Int32(Int64(items) * block // blocks)
        last = Int32(Int64(items) * (block + 1) // blocks)
        base = first // tiles
        self.list_segments(counts, offsets, rescale, starts, segments, base, (last + (tiles - 1)) // tiles)
        for ahead in range_constexpr(tiling.depth):
            if first + ahead < last:
                source = self.source(weights, segments[0], first + ahead, base)
                for step in range_constexpr(tiling.steps):
                    self.fetch(shared, source, Int32(ahead), step)
        if const_expr(self.early):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        end = (last + (tiles - 1)) // tiles - base
        if const_expr(tiling.buffers > 1):
            self.fetch_rows(shared, x, segments, Int32(0), end)
        for item in range(first, last):
            done = item - first
            segment, tile = item // tiles - base, item % tiles
            if (tile == 0) | (done == 0):
                self.fetch_rows(shared, x, segments, segment + (tiling.buffers - 1), end)
            slot, phase = done % tiling.depth, done // tiling.depth % 2
            part = (warp + done * tiling.parts) % tiling.warps
            half = vector.min_of(part // tiling.row_tiles, Int32(1))
            biases = _bias_pair(bias, (segments[0][segment] * tiles + tile) * 16 + half * 8 + lane // 4)
            buffer = segment % tiling.buffers
            _wait(_barrier(shared, Int32(tiling.ring_barriers) + buffer), segment // tiling.buffers % 2)
            rows = self.row_addresses(shared, buffer, segments[2][segment])
            sums = [[Float32(0.0)] * 4 for _ in range(2 * tiling.row_tiles)]
            next_item = item + tiling.depth
            source = Int64(0)
            if next_item < last:
                source = self.source(weights, segments[0], next_item, base)
            for step in range_constexpr(tiling.steps):
                _wait(_barrier(shared, self.ring_index(slot, step)), phase)
                sums = self.multiply(shared, rows, slot, step, sums)
                cute.arch.sync_warp()
                if next_item < last:
                    self.fetch(shared, source, slot, step)
            meeting = shared + (tiling.meeting_offset + done % 2 * (tiling.warps * tiling.parts * _PART_BYTES))
            for index in range_constexpr(tiling.parts):
                _store_shared(meeting + ((warp * tiling.parts + index) * WARP + lane) * 16, sums[index])
            cute.arch.sync_threads()
            for again in range_constexpr(0, tiling.parts, tiling.warps):
                if part + again < tiling.parts:
                    self.finish(meeting, part + again, tile, segment, segments, biases, bias, out, alpha, limit)

    @cute.jit
    def count_segments(self, counts: Int64, starts: cute.Tensor) -> None:
        """Where each expert's segments start, counted over all experts; the last is their number."""
        threads, rows = self.tiling.threads, self.tiling.rows
        needed, totals = shared_integers(self.experts), shared_integers(self.tiling.warps)
        for expert in range(cute.arch.thread_idx()[0], self.experts, threads):
            needed[expert] = (vector.scalar(counts + Int64(expert) * 4, Int32)[0] + (rows - 1)) // rows
        cute.arch.sync_threads()
        scan_starts(needed, starts, totals, PackedLayout(), self.experts, threads)

    @cute.jit
    def list_segments(
        self, counts: Int64, offsets: Int64, rescale: Int64, starts: cute.Tensor, segments: list[cute.Tensor],
        base: Int32, end: Int32,
    ) -> None:  # fmt: skip
        """Of segments `base` to `end`: the expert, its first row, its rows, and the bits of the rescaling."""
        rows = self.tiling.rows
        for expert in range(cute.arch.thread_idx()[0], self.experts, self.tiling.threads):
            for segment in range(vector.max_of(starts[expert], base), vector.min_of(starts[expert + 1], end)):
                chunk = segment - starts[expert]
                count = vector.scalar(counts + Int64(expert) * 4, Int32)[0] - chunk * rows
                segments[0][segment - base] = Int32(expert)
                segments[1][segment - base] = (
                    Int32(vector.scalar(offsets + Int64(expert) * 8, Int64)[0]) + chunk * rows
                )
                segments[2][segment - base] = vector.min_of(count, Int32(rows))
                segments[3][segment - base] = vector.scalar(rescale + Int64(expert) * 4, Int32)[0]
        cute.arch.sync_threads()

    def source(self, weights: Any, experts: Any, item: Any, base: Any) -> Any:
        """Where this warp's part of an item's tile row starts."""
        tiling, warp = self.tiling, cute.arch.thread_idx()[0] // WARP
        expert, tile = experts[item // self.tiles - base], item % self.tiles
        row = Int64(expert) * self.tiles + tile
        return weights + (row * tiling.columns + warp * tiling.share) * TILE_BYTES

    def ring_index(self, slot: Any, step: int) -> Any:
        """Number of a step's barrier, and of its place in the ring."""
        return (slot * self.tiling.warps + cute.arch.thread_idx()[0] // WARP) * self.tiling.steps + step

    @cute.jit
    def fetch(self, shared: Int32, source: Int64, slot: Int32, step: int) -> None:
        """Start a step's copy into the ring."""
        size = self.tiling.step_bytes
        index = self.ring_index(slot, step)
        if cute.arch.thread_idx()[0] % WARP == 0:
            barrier = _barrier(shared, index)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            ptx.copy_to_shared(
                shared + self.tiling.ring_offset + index * size, source + step * size, size, barrier.toint()
            )

    @cute.jit
    def fetch_rows(self, shared: Int32, x: Int64, segments: list[cute.Tensor], segment: Int32, end: Int32) -> None:
        """Start the copies of a segment's rows, if there is such a segment; by the first warp, a lane a row."""
        tiling, thread = self.tiling, cute.arch.thread_idx()[0]
        if (segment < end) & (thread < WARP):
            buffer = segment % tiling.buffers
            barrier = _barrier(shared, Int32(tiling.ring_barriers) + buffer)
            count, size = segments[2][segment], tiling.columns * 64
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * size)
            cute.arch.sync_warp()
            if thread < count:
                target = shared + tiling.row_offset + (buffer * tiling.rows + thread) * tiling.row_stride
                row = Int64(segments[1][segment] + thread)
                ptx.copy_to_shared(target, x + row * size, size, barrier.toint())

    def row_addresses(self, shared: Any, buffer: Any, count: Any) -> Any:
        """Where this lane reads x of each 8 rows: its own row's, or the last one's in place of any beyond."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        at = shared + tiling.row_offset + buffer * (tiling.rows * tiling.row_stride) + lane % 4 * 16
        return [
            at + vector.min_of(lane // 4 + 8 * i, count - 1) * tiling.row_stride for i in range(tiling.row_tiles)
        ]

    def multiply(self, shared: Any, rows: Any, slot: Any, step: int, sums: Any) -> Any:
        """Add a step's products: decoded weights · x, 32 outputs by 8 rows at a time."""
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        warp, lane = thread // WARP, thread % WARP
        ring = shared + tiling.ring_offset + self.ring_index(slot, step) * tiling.step_bytes
        sums = [list(part) for part in sums]
        for block in range(tiling.step_columns):
            codes = _load_shared(ring + block * TILE_BYTES + lane * 16, 4)
            scales = _load_shared(ring + block * TILE_BYTES + CODE_BYTES + lane // 4 * 4, 1)[0]
            column = warp * tiling.share + step * tiling.step_columns + block
            values = [_load_shared(row + column * 64, 4) for row in rows]
            for half in range(2):
                first, second = (_decode(codes[i], scales, i) for i in (2 * half, 2 * half + 1))
                for k in (0, 2):
                    left = (first[k], second[k], first[k + 1], second[k + 1])
                    for i, value in enumerate(values):
                        at = half * tiling.row_tiles + i
                        sums[at] = ptx.mma_bf16(left, (value[k], value[k + 1]), sums[at])
        return sums

    @cute.jit
    def finish(
        self, meeting: Int32, part: Int32, tile: Int32, segment: Int32, segments: list[cute.Tensor], biases: Uint32,
        bias: Int64, out: Int64, alpha: Float32, limit: Float32,
    ) -> None:  # fmt: skip
        """Add the warps' sums of one part, 16 outputs by 8 rows, in the order of the columns, and write results."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        sums = _load_shared_floats(meeting + (part * WARP + lane) * 16)
        for warp in range_constexpr(1, tiling.warps):
            more = _load_shared_floats(meeting + ((warp * tiling.parts + part) * WARP + lane) * 16)
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        half, row = part // tiling.row_tiles, part % tiling.row_tiles * 8 + lane % 4 * 2
        pair = tile * 16 + half * 8 + lane // 4
        if const_expr(tiling.parts > tiling.warps):
            biases = _bias_pair(bias, segments[0][segment] * (self.tiles * 16) + pair)
        factor = ptx.from_bits(Uint32(segments[3][segment]))
        low, high = ptx.from_bits(biases << Uint32(16)), ptx.from_bits(biases & Uint32(0xFFFF0000))
        count, first = segments[2][segment], segments[1][segment]
        for i in range_constexpr(2):
            even, odd = sums[i] * factor + low, sums[2 + i] * factor + high
            target = out + (Int64(first + row + i) * (self.tiles * 16) + pair) * (2 if self.gated else 4)
            if row + i < count:
                if const_expr(self.gated):
                    vector.scalar(target, BFloat16)[0] = BFloat16(clamped_swiglu_value(even, odd, alpha, limit))
                else:
                    vector.scalar(target, Uint32)[0] = ptx.to_bf16x2(even, odd)


@cute.jit
def _bias_pair(bias: Int64, pair: Int32) -> Uint32:
    words = Uint32(0)
    if bias != 0:
        words = Uint32(vector.scalar(bias + Int64(pair) * 4, Uint32)[0])
    return words


def _decode(word: Any, scales: Any, which: int) -> Any:
    """A word's eight codes as four pairs of bfloat16, times the scale in byte `which` of `scales`."""
    word = Uint32(word)
    mask = Uint32(_CODE_MASK)
    pairs = (
        (word << Uint32(6)) & mask,
        (word << Uint32(2)) & mask,
        ptx.rotate_left(word, 28) & mask,
        (word & Uint32(0x81808180)) | ((word >> Uint32(8)) & Uint32(0x00400040)),
    )
    scale = ptx.spread_byte(scales, which) << Uint32(7)
    return [ptx.multiply_bf16x2(pair, scale) for pair in pairs]


def _barrier(shared: Any, index: Any) -> Any:
    return cute.make_ptr(Int64, shared + index * 8, cute.AddressSpace.smem, assumed_align=8)


def _wait(barrier: Any, phase: Any) -> None:
    """By whole warps, which tensor cores need together again afterwards."""
    cute.arch.mbarrier_wait(barrier, phase)
    cute.arch.sync_warp()


def _shared(address: Any, dtype: Any, count: int) -> Any:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


def _load_shared(address: Any, words: int) -> Any:
    values = _shared(address, Uint32, words).load()
    return [values[i] for i in range(words)]


def _load_shared_floats(address: Any) -> Any:
    values = _shared(address, Float32, 4).load()
    return [values[i] for i in range(4)]


def _store_shared(address: Any, values: Any) -> None:
    registers = cute.make_rmem_tensor(4, Float32)
    for i, value in enumerate(values):
        registers[i] = value
    _shared(address, Float32, 4).store(registers.load())
