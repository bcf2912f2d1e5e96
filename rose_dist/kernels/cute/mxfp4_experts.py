"""Expert layers of few rows: MXFP4 weights are streamed past the rows once, decoded in registers, and multiplied by
tensor cores.

A block takes a run of items, each 32 rows of an expert's matrix times up to `rows` rows of x. One warp feeds the others
through a ring in shared memory by bulk copies, across the borders of items. The others share an item's columns, always
in the same way, so that no result depends on which rows came along; their sums meet in shared memory.

Both layers can go in one launch of one block an SM. Protocol: the warps that compute write the first layer's results
and arrive at the mbarrier `written`; the feeding warp, which has waited there, adds to the counter of `phase_barrier`
(release, GPU scope) and waits until all blocks have (acquire); a proxy fence then lets it fetch those results as the
second layer's rows. Weights of the second layer, which depend on nothing, fill the ring meanwhile: memory does not rest
between the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.expert_segments import count_segments, list_segments, load_experts, load_factors
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.mxfp4_feed import Feeder
from rose_dist.kernels.cute.mxfp4_operands import barrier, decode, load_shared, next_stage, wait
from rose_dist.kernels.cute.mxfp4_sums import Sums
from rose_dist.kernels.dsl import (
    Float32,
    Int32,
    Int64,
    Stream,
    Uint8,
    Uint32,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, TILE_BYTES
from rose_dist.kernels.stream_tiling import StreamTiling
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import load_matrices, multiply_add

SEGMENTS = 64
"""Most (expert, rows of x) pairs that one block may meet."""


@cache
def launcher(arch: Arch, experts: int, tiles: tuple[int, ...], tiling: StreamTiling, gated: bool) -> jit.Launcher:
    return jit.load(ExpertLinear(arch, experts, tiles, tiling, gated))


@dataclass(frozen=True)
class ExpertLinear(jit.Kernel):
    """y[r] = weight[e] · x[r] + bias[e] over rows packed by expert; or of each pair of these the clamped SwiGLU; or the
    one after the other.

    experts: matrices of a layer.
    tiles: tile rows of a matrix, of each layer.
    gated: even outputs of the first layer are gates, odd ones linear.

    Where rows come from and results go is in methods of its own, from `begin` to `finish`: `handed_experts` has others.
    """

    experts: int
    tiles: tuple[int, ...]
    tiling: StreamTiling
    gated: bool

    @cute.jit
    def __call__(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, out: Int64,
        second_weights: Int64, second_rescale: Int64, second_bias: Int64, second_out: Int64, counter: Int64,
        report: Int64, limit_ns: Int64, ahead: Int64, ahead_bytes: Int64, alpha: Float32, limit: Float32, blocks: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: weights u8 [experts, tiles, columns / 32, 544], rescale fp32 [experts], bias bf16 [experts,
        32 · tiles] or 0, x bf16 [rows, columns], counts int32 [experts], offsets int64 [experts + 1], out bf16 [rows,
        32 · tiles] or half of that if gated; of the second layer the same, if there is one. counter, report, limit_ns:
        as `phase_barrier` says. ahead, ahead_bytes: what a later launch reads, 0 bytes for nothing.
        """
        self.kernel(
            weights, rescale, bias, x, counts, offsets, out, second_weights, second_rescale, second_bias, second_out,
            counter, report, limit_ns, ahead, ahead_bytes, alpha, limit,
        ).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], smem=self.tiling.shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=1, preferred_smem_carveout=100, max_number_threads=self.most_threads,
        )  # fmt: skip

    @property
    def most_threads(self) -> list[int]:
        """For how many the compiler must leave registers; zeros: those there are."""
        return [0, 0, 0]

    @cute.kernel
    def kernel(
        self, weights: Int64, rescale: Int64, bias: Int64, x: Int64, counts: Int64, offsets: Int64, out: Int64,
        second_weights: Int64, second_rescale: Int64, second_bias: Int64, second_out: Int64, counter: Int64,
        report: Int64, limit_ns: Int64, ahead: Int64, ahead_bytes: Int64, alpha: Float32, limit: Float32,
    ) -> None:  # fmt: skip
        tiling, both = self.tiling, len(self.tiles) > 1
        thread = cute.arch.thread_idx()[0]
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        segments = [shared_integers(SEGMENTS) for _ in range(3 + len(self.tiles))]
        starts = shared_integers(self.experts + 1)
        self.set_up(shared)
        # Far from any cache by now, and no one's result.
        factors = load_factors([rescale, second_rescale][: len(self.tiles)], self.experts, tiling.threads)
        shares, handed = self.begin(x, counts, offsets, factors, starts, segments, limit_ns, report)
        items, tile, ends = ([share[i] for share in shares] for i in range(3))
        if cute.arch.make_warp_uniform(thread // WARP) == tiling.warps:
            self.feeder.run(
                shared, [weights, second_weights], [x, out], segments, items, tile, ends,
                [counter, report, limit_ns], [ahead, ahead_bytes],
            )  # fmt: skip
        else:
            state = [Int32(0), Int32(0), Int32(1), Int32(tiling.buffers - 1), Int32(1)]
            given = self.take_row(shared, handed, starts)
            state = self.compute(shared, bias, out, alpha, limit, segments, items[0], tile[0], state, given, 0)
            if const_expr(both):
                cute.arch.sync_warp()
                if thread % WARP == 0:
                    cute.arch.mbarrier_arrive(barrier(shared, tiling.written))
                self.compute(
                    shared, second_bias, second_out, alpha, limit, segments, items[1], tile[1], state, given, 1
                )  # fmt: skip

    @property
    def feeder(self) -> Feeder:
        return Feeder(self.tiles, self.tiling)

    def begin(
        self, x: Any, counts: Any, offsets: Any, factors: Any, starts: Any, segments: Any, limit_ns: Any, report: Any
    ) -> tuple[Any, list[Any]]:
        """List the segments, when the launch before is done; returns each layer's `share`, and what is `handed` over to
        the computing warps: nothing.
        """
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        tiling = self.tiling
        mine = load_experts(counts, offsets, factors, self.experts, tiling.threads)
        count_segments(mine, starts, tiling.rows, self.experts, tiling.threads)
        shares = [self.share(starts[self.experts], tiles) for tiles in self.tiles]
        base, end = met(shares)
        list_segments(mine, starts, segments, base, base + end, tiling.rows, self.experts)
        return shares, []

    def take_row(self, shared: Any, handed: list[Any], starts: Any) -> list[Any]:
        """By a computing warp, before the first item."""
        return handed

    def await_rows(self, shared: Any, buffer: Any, parity: Any, start: Any, handed: list[Any], layer: int) -> None:
        """By a computing warp: those of a segment, which come to a buffer."""
        wait(barrier(shared, 2 * self.tiling.stages + buffer), parity)

    def finish(
        self, meet: Sums, meeting: Any, part: Any, out: Any, start: Any, tile: Any, ending: list[Any],
        handed: list[Any], layer: int,
    ) -> None:  # fmt: skip
        """By a computing warp: add up a part of an item's sums. ending: rows, factor, biases, alpha and limit."""
        target = out + (Int64(start) * (16 * meet.tiles) + tile * 16) * meet.pair_bytes
        meet.finish(meeting, part, target, *ending)

    def share(self, segments: Any, tiles: int) -> Any:
        """Of a layer's items this block's number, the first one's tile row, and how many segments they are of; and the
        first of these, which is the same in each layer."""
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        items = Uint32(segments * tiles)
        first = Int32(items * Uint32(block) // Uint32(blocks))
        last = Int32(items * Uint32(block + 1) // Uint32(blocks))
        base = first // tiles
        end = vector.select(last > first, (last + (tiles - 1)) // tiles - base, Int32(0))
        return last - first, first - base * tiles, end, base

    @cute.jit
    def set_up(self, shared: Int32) -> None:
        """The barriers: a copy and rows of x are announced by the feeder; warps free stages, some of them sums, and all
        say that their results are written."""
        tiling, thread = self.tiling, cute.arch.thread_idx()[0]
        if thread < tiling.barriers:
            freed = (thread >= tiling.stages) & (thread < 2 * tiling.stages)
            arrivals = vector.select(freed | (thread == tiling.written), Int32(tiling.warps), Int32(1))
            arrivals = vector.select(thread == tiling.added, Int32(tiling.adders), arrivals)
            cute.arch.mbarrier_init(barrier(shared, thread), arrivals)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def compute(
        self, shared: Int32, bias: Int64, out: Int64, alpha: Float32, limit: Float32,
        segments: list[cute.Tensor], items: Int32, tile: Int32, state: list[Int32], handed: list[Any],
        layer: cutlass.Constexpr,
    ) -> list[Int32]:  # fmt: skip
        """A computing warp: its columns of each item of a layer, and its turn in adding up.

        state: the ring's stage and parity, that of the barrier of sums, the buffer of rows and its parity; returned for
        the next layer.
        """
        tiling, tiles = self.tiling, self.tiles[layer]
        meet = Sums(tiles, self.tiling, self.gated and layer == 0)
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        meeting, added = shared + tiling.meeting_offset, barrier(shared, tiling.added)
        sums = cute.make_rmem_tensor(4 * tiling.parts, Float32)
        # A fresh barrier lets a wait for the phase before its first one pass.
        stage, parity, sums_parity, buffer, row_parity = state
        segment, part = Int32(-1), Int32(warp)
        expert, count, start, factor = Int32(0), Int32(0), Int32(0), Int32(0)
        for done in range(items):
            if (tile == 0) | (done == 0):
                segment += 1
                buffer += 1
                if buffer == tiling.buffers:
                    buffer = Int32(0)
                    row_parity ^= 1
                expert, start, count, factor = [segments[i][segment] for i in (0, 1, 2, 3 + layer)]
                self.await_rows(shared, buffer, row_parity, start, handed, layer)
            biases = Uint32(0)
            if part < tiling.parts:
                biases = meet.bias(bias, expert, tile, part)
            sums.fill(0.0)
            stage, parity = self.accumulate(shared, sums, buffer, count, stage, parity, tiling.steps[layer])
            wait(added, sums_parity)
            meet.store(meeting, warp, sums)
            cute.arch.barrier(barrier_id=1, number_of_threads=tiling.warps * WARP)
            for again in range_constexpr(0, tiling.parts, tiling.warps):
                if part + again < tiling.parts:
                    if const_expr(again > 0):
                        biases = meet.bias(bias, expert, tile, part + again)
                    ending = [count, factor, biases, alpha, limit]
                    self.finish(meet, meeting, part + again, out, start, tile, ending, handed, layer)
            if part < tiling.adders:
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(added)
            sums_parity ^= 1
            part += tiling.turn
            if part >= tiling.warps:
                part -= tiling.warps
            tile += 1
            if tile == tiles:
                tile = Int32(0)
        return [stage, parity, sums_parity, buffer, row_parity]

    @cute.jit
    def accumulate(
        self, shared: Int32, sums: cute.Tensor, buffer: Int32, count: Int32, stage: Int32, parity: Int32,
        steps: cutlass.Constexpr,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """An item's products; the ring's stage and parity that come next."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        # A lane names a row of each 8, or the last one in place of any beyond, and 8 of 32 columns.
        at = shared + tiling.row_offset + buffer * (tiling.rows * tiling.row_stride) + lane // 8 * 16
        rows = [at + vector.min_of(lane % 8 + 8 * i, count - 1) * tiling.row_stride for i in range(tiling.row_tiles)]
        for step in range_constexpr(steps):
            wait(barrier(shared, stage), parity)
            self.multiply(shared, rows, stage, step, sums)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier(shared, stage + tiling.stages))
            stage, parity = next_stage(stage, parity, self.tiling.stages)
        return stage, parity

    def multiply(self, shared: Any, rows: Any, stage: Any, step: int, sums: Any) -> None:
        """Add a step's products: decoded weights · x, 16 outputs by 8 rows at a time.

        Of the columns a warp has every `warps`th, in whatever steps they come.
        """
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        ring = shared + tiling.ring_offset + stage * tiling.stage_bytes
        for block in range(tiling.step_columns):
            column = block * tiling.warps + warp
            codes = load_shared(ring + column * TILE_BYTES + lane * 16, 4)
            scales = load_shared(ring + column * TILE_BYTES + CODE_BYTES + lane // 4 * 4, 1)[0]
            behind = (column + step * tiling.step_columns * tiling.warps) * 64
            values = [load_matrices(row + behind) for row in rows]
            for half in range(2):
                first, second = (decode(codes[i], scales, i) for i in (2 * half, 2 * half + 1))
                for k in (0, 2):
                    left = (first[k], second[k], first[k + 1], second[k + 1])
                    for i, value in enumerate(values):
                        at = (2 * i + half) * 4
                        total = [sums[at + j] for j in range(4)]
                        total = multiply_add(total, left, (value[k], value[k + 1]), "bf16")
                        for j in range(4):
                            sums[at + j] = total[j]


def met(shares: Any) -> tuple[Any, Any]:
    """The first segment that a block meets, which is the same in each layer, and how many there are."""
    ends = [share[2] for share in shares]
    return shares[0][3], vector.max_of(*ends) if len(ends) > 1 else ends[0]
