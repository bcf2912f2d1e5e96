"""Both expert layers of a single token that the router's launch hands over while it still runs (`handover`).

Blocks know their shares of the work for any number of experts before the choice is there. The token's row comes in
packets, and so do the first layer's results, from block to block: they do not meet between the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.handover import give_results, take_choice, take_epoch, take_results, take_row
from rose_dist.kernels.cute.mxfp4_experts import ExpertLinear, met
from rose_dist.kernels.cute.mxfp4_feed import Feeder
from rose_dist.kernels.cute.mxfp4_sums import Sums, ending_of, outputs
from rose_dist.kernels.cute.packets import current_epoch
from rose_dist.kernels.cute.swiglu import clamped_swiglu_value
from rose_dist.kernels.dsl import Boolean, Int32, Uint32, cute, range_constexpr
from rose_dist.kernels.handover import EPOCH_AT
from rose_dist.kernels.mxfp4 import BLOCK
from rose_dist.kernels.stream_tiling import StreamTiling
from rose_dist.kernels.variants import WARP

MOST_THREADS = 768
"""For so many the compiler must leave registers, 80 each, though there are fewer. A quarter of an SM has 16,384, and 4
of the warps then leave 6,144 to the 3 that a block of the router's has in one of the quarters.
"""


@cache
def launcher(arch: Arch, experts: int, tiles: tuple[int, int], tiling: StreamTiling) -> jit.Launcher:
    return jit.load(HandedExperts(arch, experts, tiles, tiling, gated=True))


@dataclass(frozen=True)
class HandedFeeder(Feeder):
    """Copies weights only: rows are not its business, nor is that the blocks meet."""

    def know_rows(self) -> None:
        pass

    def fetch_rows(self, *_: Any) -> None:
        pass

    def awaited(self, counter: Any) -> Any:
        return Uint32(0)

    def meet(self, *_: Any) -> None:
        pass

    def go_on(self) -> None:
        """Let the next launch begin: not earlier, as its early reads rely on the end of the router's."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()


@dataclass(frozen=True)
class HandedExperts(ExpertLinear):
    """As `ExpertLinear` with both layers, of one row an expert; its `x` is the handover.

    What is `handed` on between the methods: the handover, its epoch, limit and report of waits, and in the end whether
    this thread's part of the row came in time.
    """

    @property
    def most_threads(self) -> list[int]:
        return [MOST_THREADS, 1, 1]

    @property
    def feeder(self) -> Feeder:
        return HandedFeeder(self.tiles, self.tiling)

    def begin(
        self, x: Any, counts: Any, offsets: Any, factors: Any, starts: Any, segments: Any, limit_ns: Any, report: Any
    ) -> tuple[Any, list[Any]]:
        handed = [x, current_epoch(x + EPOCH_AT), limit_ns, report]
        kept, shares = self.keep(factors), shared_integers(4 * len(self.tiles) * WARP)
        cute.arch.sync_threads()  # also: all have read the epoch
        self.list_choice(handed, kept, starts, segments, shares)
        cute.arch.sync_threads()
        return self.shares_of(shares, starts[self.experts]), handed

    def keep(self, factors: Any) -> list[cute.Tensor]:
        """The factors in shared memory: Int32 [experts] of each layer."""
        tables = [shared_integers(self.experts) for _ in self.tiles]
        for i, own in enumerate(factors):
            expert = cute.arch.thread_idx()[0] + i * self.tiling.threads
            for table, factor in zip(tables, own, strict=True):
                put_if(expert < self.experts, table, expert, factor)
        return tables

    @cute.jit
    def list_choice(
        self, handed: list[Any], factors: list[cute.Tensor], starts: cute.Tensor, segments: list[cute.Tensor],
        shares: cute.Tensor,
    ) -> None:  # fmt: skip
        """By the feeding warp: as `count_segments` and `list_segments`, a segment for each expert of the token."""
        thread = cute.arch.thread_idx()[0]
        lane = thread % WARP
        if cute.arch.make_warp_uniform(thread // WARP) == self.tiling.warps:
            # While there is time: a lane the shares of so many segments. Their divisions would precede the first copy
            # else.
            for i, value in enumerate(value for tiles in self.tiles for value in self.share(lane, tiles)):
                shares[i * WARP + lane] = value
            cute.arch.sync_warp()
            expert, place, number = take_choice(*handed)
            starts[self.experts] = number
            if lane == 0:
                take_epoch(handed[0], cute.arch.block_idx()[0] == 0, cute.arch.grid_dim()[0])
            base, end = met(self.shares_of(shares, number))
            if (expert < self.experts) & (place >= base) & (place < base + end):
                segments[0][place - base] = expert
                segments[1][place - base] = place
                segments[2][place - base] = Int32(1)
                for layer in range_constexpr(len(factors)):
                    segments[3 + layer][place - base] = factors[layer][expert]

    def shares_of(self, shares: Any, number: Any) -> Any:
        """Those of so many segments, as `share` gives them, of each layer."""
        return [[shares[(4 * layer + i) * WARP + number] for i in range(4)] for layer in range(len(self.tiles))]

    @cute.jit
    def take_row(self, shared: Int32, handed: list[Any], starts: cute.Tensor) -> list[Any]:
        """By the computing warps: the token's row for all segments of the first layer, into every buffer."""
        tiling, alive = self.tiling, Boolean(True)
        handover, epoch, limit_ns, report = handed
        threads = tiling.warps * WARP
        buffers = [shared + tiling.row_offset + i * tiling.rows * tiling.row_stride for i in range(tiling.buffers)]
        if starts[self.experts] > 0:
            alive = take_row(handover, epoch, limit_ns, report, buffers, tiling.columns[0] * BLOCK, threads)
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        return [*handed, alive]

    def await_rows(self, shared: Any, buffer: Any, parity: Any, start: Any, handed: list[Any], layer: int) -> None:
        """The first layer's row is there; the second's, an expert's results as they come from all blocks, is taken by
        all these warps, which are done with the item before.
        """
        if layer == 1:
            tiling, (handover, epoch, limit_ns, report, alive) = self.tiling, handed
            target, threads = shared + tiling.row_offset + buffer * tiling.row_stride, tiling.warps * WARP
            columns = tiling.columns[1] * BLOCK
            take_results(handover, epoch, limit_ns, report, alive, start, target, columns, threads)
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    def finish(
        self, meet: Sums, meeting: Any, part: Any, out: Any, start: Any, tile: Any, ending: list[Any],
        handed: list[Any], layer: int,
    ) -> None:  # fmt: skip
        """The first layer's results go to all blocks, the second's to memory."""
        if layer == 1:
            super().finish(meet, meeting, part, out, start, tile, ending, handed, layer)
            return
        _, factor, biases, alpha, limit = ending
        value = clamped_swiglu_value(*outputs(meet.total(meeting, part), 0, ending_of(factor, biases)), alpha, limit)
        give_results(handed[0], handed[1], start, tile * 2 + part, value, meet.tiles * 16)


@cute.jit
def put_if(wanted: Boolean, table: cute.Tensor, place: Int32, value: Int32) -> None:
    if wanted:
        table[place] = value
