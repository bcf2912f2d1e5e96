"""Tokens drawn from logits: a cluster of blocks reads a row once and keeps it in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.cluster_row import (
    ClusterRow,
    octaves,
    pick,
    read,
    warp_scan,
    warp_sum,
    weight,
)
from rose_dist.kernels.cute.draw_sorted import SortedDraw
from rose_dist.kernels.cute.mxfp4_operands import load_shared_floats
from rose_dist.kernels.draw import RowSplit
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Stream, Uint32, Uint64, cute
from rose_dist.kernels.variants import WARP


@cache
def launcher(arch: Arch, split: RowSplit) -> jit.Launcher:
    return jit.load(DrawRows(arch, split))


@dataclass(frozen=True)
class DrawRows(jit.Kernel):
    """A cluster a row. All of its blocks find the same largest element and the same sum of weights; the block, the warp
    and the lane in whose share the number falls then find the token.
    """

    split: RowSplit

    @property
    def row(self) -> ClusterRow:
        return ClusterRow(self.split)

    @cute.jit
    def __call__(
        self, logits: Int64, stride: Int64, rules: Int64, rule_stride: Int64, out: Int64, space: Int64, rows: Int32,
        columns: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: logits fp32 with a stride in elements, rules i64 likewise, out i64, space u64. See `draw`."""
        self.kernel(logits, stride, rules, rule_stride, out, space, columns).launch(
            grid=[rows * self.split.blocks, 1, 1], block=[self.split.threads, 1, 1],
            cluster=[self.split.blocks, 1, 1], smem=self.split.elements * 4, stream=stream, use_pdl=True,
            min_blocks_per_mp=2, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, logits: Int64, stride: Int64, rules: Int64, rule_stride: Int64, out: Int64, space: Int64, columns: Int32
    ) -> None:
        places = self.row.allocate()
        sorting = SortedDraw(self.split).allocate()
        cute.arch.cluster_arrive_relaxed()
        number = cute.arch.block_idx()[0] // self.split.blocks
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        words = [Uint64(vector.scalar(rules + (Int64(number) + rule_stride * i) * 8, Uint64)[0]) for i in range(4)]
        cute.arch.cluster_wait()  # until the other blocks have started: before, their shared memory is not theirs
        if Int32(Uint32(words[1] & Uint64(0xFFFFFFFF))) >= 0:
            self.row.fetch(places[0], places[1], logits + Int64(number) * stride * 4, columns)
            self.choose(
                places[0], places[2], places[3], sorting, words, out + Int64(number) * 8,
                space + Int64(number) * (self.split.blocks * self.split.candidates * 8), columns,
            )  # fmt: skip

    @cute.jit
    def choose(
        self, row: Int32, partials: Int32, told: Int32, sorting: Int32, words: list[Uint64], out: Int64, space: Int64,
        columns: Int32,
    ) -> None:  # fmt: skip
        scale = ptx.from_bits(Uint32(words[0] & Uint64(0xFFFFFFFF)))
        rest = ptx.from_bits(Uint32(words[0] >> Uint64(32)))
        top_k, least = Int32(Uint32(words[1] & Uint64(0xFFFFFFFF))), Uint32(words[1] >> Uint64(32))
        greedy = scale == 0.0
        most, first = self.row.largest(row, partials, told, columns, Int32(greedy))
        found = Boolean(greedy)
        total, before, own = Uint64(0), Uint64(0), Uint64(0)
        in_order = (top_k == 0) & (words[2] == Uint64(0))
        if not greedy:
            bound = pick(in_order, least, Uint32(0))
            total, before, own = self.row.row_sum(
                partials, told, Int32(1), self.lane_sum(row, most, scale, rest, bound)
            )
            found = Boolean(total == Uint64(0))
        if found:
            if (self.row.rank() == 0) & (cute.arch.thread_idx()[0] == 0):
                vector.scalar(out, Int64)[0] = Int64(first)
        elif in_order:
            target = cute.arch.mul_hi(words[3], total)
            if (target >= before) & (target < before + own):
                self.locate(row, partials, most, scale, rest, least, target - before, out)
        else:
            SortedDraw(self.split).choose(
                row, partials, told, sorting, space, most, scale, rest, top_k, least, words[2], words[3], total, out,
                columns,
            )  # fmt: skip

    @cute.jit
    def lane_sum(self, row: Int32, most: Float32, scale: Float32, rest: Float32, least: Uint32) -> Uint64:
        """Of the weights from `least` on of this thread's elements."""
        total = Uint64(0)
        for step in range(self.split.steps):
            total += self.vector_sum(row, step, most, scale, rest, least)
        return total

    def vector_sum(self, row: Any, step: Any, most: Any, scale: Any, rest: Any, least: Any) -> Any:
        total = Uint64(0)
        for each in self.vector_weights(row, step, most, scale, rest, least):
            total = total + Uint64(each)
        return total

    def vector_weights(self, row: Any, step: Any, most: Any, scale: Any, rest: Any, least: Any) -> list[Any]:
        values = load_shared_floats(self.row.place(row, step))
        weights = [weight(octaves(value, most, scale, rest)) for value in values]
        return [pick(each >= least, each, Uint32(0)) for each in weights]

    @cute.jit
    def locate(
        self, row: Int32, partials: Int32, most: Float32, scale: Float32, rest: Float32, least: Uint32, target: Uint64,
        out: Int64,
    ) -> None:  # fmt: skip
        """Write the token whose share of the block's sum, in the order of the vocabulary, `target` falls in."""
        left = target - self.row.before_warp(partials)
        own = read(partials + cute.arch.thread_idx()[0] // WARP * 8, Uint64)
        step = Int32(self.split.steps)
        if left < own:  # as unsigned: not if `target` lies before this warp either
            step = Int32(0)
        while step < self.split.steps:
            mine = self.vector_sum(row, step, most, scale, rest, least)
            total = warp_sum(mine)
            if left < total:
                ends = warp_scan(mine)
                if (left < ends) & (left >= ends - mine):
                    at = left - (ends - mine)
                    index, reached = self.row.index(step) - 1, Uint64(0)
                    for each in self.vector_weights(row, step, most, scale, rest, least):
                        index += Int32(reached <= at)
                        reached += Uint64(each)
                    vector.scalar(out, Int64)[0] = Int64(index)
                step = Int32(self.split.steps)
            else:
                left -= total
                step += 1
