"""Weighted sums of rows that bulk copies bring into shared memory: a warp sums one part while others are on their way.

A unit is a part of a token's row. Lane j has the row of place j, starts its copy, `ahead` units later finds all of them
in shared memory, and the warp adds them up, in the order of the places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_partial import add, lowest, rounded, zeros
from rose_dist.kernels.cute.mxfp4_operands import barrier, load_shared, wait
from rose_dist.kernels.cute.row_mover import set_up_rings
from rose_dist.kernels.dsl import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_tiling import SumTiling
from rose_dist.kernels.variants import WARP


@dataclass(frozen=True)
class SumMover:
    """Part of a kernel, whose first `tiling.warps` warps sum. dtype: of rows. sink: its `store_sum(base, token, here,
    number, total)` gets a lane's vector number `number` of a token's sum, as fp32.
    """

    tiling: SumTiling
    dtype: torch.dtype
    sink: Any
    sums: bool
    """Whether ranks' sums are added; else the weighted rows' sum is what is made."""

    @property
    def count(self) -> int:
        """Elements of a vector."""
        return 16 // self.dtype.itemsize

    def set_up(self, shared: Any) -> None:
        """By all threads, after `griddepcontrol.wait`."""
        set_up_rings(shared, self.tiling.warps * self.tiling.stages)

    def ring(self) -> list[Any]:
        """A warp's units that are being loaded: number of the next; tokens, first vectors, places here and firsts, and
        those with a row; bases; lanes' weights."""
        ahead = self.tiling.ahead
        numbers, masks = cute.make_rmem_tensor(1 + 2 * ahead, Int32), cute.make_rmem_tensor(3 * ahead, Uint32)
        bases, weights = cute.make_rmem_tensor(ahead, Int64), cute.make_rmem_tensor(ahead, Float32)
        for i in range(1 + 2 * ahead):
            numbers[i] = Int32(0)
        for i in range(3 * ahead):
            masks[i] = Uint32(0)
        for i in range(ahead):
            bases[i], weights[i] = Int64(0), Float32(0.0)
        return [numbers, masks, bases, weights]

    @cute.jit
    def sum(
        self, shared: Int32, ring: list[cute.Tensor], source: Int64, weight: Float32, here: Uint32, firsts: Uint32,
        token: Int32, base: Int64,
    ) -> None:  # fmt: skip
        """All units of a token. By whole warps; the last `ahead` come out when others go in or `complete` is called.

        Of lane j, for place j of the token: source, the address of its row, 0 for none; weight. here: the places whose
        weighted rows are summed and rounded, as bits; those without a row count as zeros. firsts, with `sums`: the
        places at which ranks' sums are added, the lowest of `here` for what is made here; others have a row. base: what
        the sink makes of it.
        """
        for unit in range(self.tiling.units):
            self.step(shared, ring, source, weight, here, firsts, token, base, unit * self.tiling.piece_bytes)

    @cute.jit
    def complete(self, shared: Int32, ring: list[cute.Tensor], end: Int32) -> None:
        """Afterwards all units with numbers before `end` are stored."""
        for _ in range(ring[0][0] - end, self.tiling.ahead):
            self.step(
                shared, ring, Int64(0), Float32(0.0), Uint32(0), Uint32(0), Int32(0), Int64(0), Int32(0)
            )  # fmt: skip

    @cute.jit
    def step(
        self, shared: Int32, ring: list[cute.Tensor], source: Int64, weight: Float32, here: Uint32, firsts: Uint32,
        token: Int32, base: Int64, at: Int32,
    ) -> None:  # fmt: skip
        """Start loading a unit, whose rows' bytes begin at `at`, and sum the one that is due."""
        tiling, (numbers, masks, bases, weights) = self.tiling, ring
        warp, lane = cute.arch.thread_idx()[0] // WARP, cute.arch.thread_idx()[0] % WARP
        first, number, ahead = warp * tiling.stages, numbers[0], self.tiling.ahead
        stage = first + number % tiling.stages
        full, rows = barrier(shared, stage), Uint32(cute.arch.vote_ballot_sync(source != 0))
        size = vector.min_of(Int32(tiling.row_bytes) - at, Int32(tiling.piece_bytes))
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, Int32(cute.arch.popc(rows)) * size)
        cute.arch.sync_warp()
        if source != 0:
            target = self.place(shared, stage) + lane * tiling.piece_bytes
            ptx.copy_to_shared(target, source + at, size, full.toint())
        due = number - ahead
        if due >= 0:
            stage = first + due % tiling.stages
            wait(barrier(shared, stage), due // tiling.stages & 1)
            self.add_up(
                self.place(shared, stage), weights[0], masks[0], masks[ahead], masks[2 * ahead], numbers[1],
                numbers[1 + ahead], bases[0],
            )  # fmt: skip
            cute.arch.sync_warp()  # the next load takes the stage that all lanes are done with
        for i in range_constexpr(ahead - 1):
            for part in range_constexpr(2):
                numbers[1 + part * ahead + i] = numbers[2 + part * ahead + i]
            for part in range_constexpr(3):
                masks[part * ahead + i] = masks[part * ahead + i + 1]
            bases[i], weights[i] = bases[i + 1], weights[i + 1]
        numbers[ahead], numbers[2 * ahead] = token, at // 16
        masks[ahead - 1], masks[2 * ahead - 1], masks[3 * ahead - 1] = here, firsts, rows
        bases[ahead - 1], weights[ahead - 1] = base, weight
        numbers[0] = number + 1

    def place(self, shared: Any, stage: Any) -> Any:
        return shared + self.tiling.ring_offset + stage * self.tiling.stage_bytes

    @cute.jit
    def add_up(
        self, stage: Int32, weight: Float32, here: Uint32, firsts: Uint32, rows: Uint32, token: Int32, first: Int32,
        base: Int64,
    ) -> None:  # fmt: skip
        """A unit's sum to the sink."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        each, last = 4 // self.dtype.itemsize, Int32(tiling.row_bytes // 16 - 1) - first
        places = [vector.min_of(lane + i * WARP, last) * 16 for i in range(tiling.vectors)]
        own = zeros(tiling.vectors * self.count)
        left = here
        for _ in range(0, Int32(cute.arch.popc(here))):
            place = lowest(left)
            there, factor = rows >> Uint32(place) & Uint32(1), cute.arch.shuffle_sync(weight, place)
            for i in range_constexpr(tiling.vectors):
                words = load_shared(stage + place * tiling.piece_bytes + places[i], 4)
                words = [vector.select(there != 0, word, Uint32(0)) for word in words]
                add(own, i * 4 * each, words, factor, self.dtype)
            left = left & (left - Uint32(1))
        if const_expr(self.sums):
            total, made = zeros(tiling.vectors * self.count), rounded(own, self.dtype)
            left = firsts
            for _ in range(0, Int32(cute.arch.popc(firsts))):
                place = lowest(left)
                mine = (here != 0) & (place == lowest(here))
                for i in range_constexpr(tiling.vectors):
                    words = load_shared(stage + place * tiling.piece_bytes + places[i], 4)
                    words = [vector.select(mine, made[4 * i + n], words[n]) for n in range(4)]
                    add_words(total, i * 4 * each, words, self.dtype)
                left = left & (left - Uint32(1))
            self.store(total, here, token, first, base)
        else:
            self.store(own, here, token, first, base)

    def store(self, total: Any, here: Any, token: Any, first: Any, base: Any) -> None:
        for i in range(self.tiling.vectors):
            values = [total[i * self.count + n] for n in range(self.count)]
            number = first + cute.arch.thread_idx()[0] % WARP + i * WARP
            self.sink.store_sum(base, token, here, number, values)


def add_words(total: Any, start: int, words: list[Any], dtype: Any) -> None:
    """Add the elements of words to `total` from `start` on."""
    values = [value for word in words for value in packets.widen(Uint32(word), dtype)]
    for i, value in enumerate(values):
        total[start + i] = total[start + i] + value
