"""MoE combine on one GPU, in registers; what it computes: `rose_dist.kernels.moe_combine`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import TYPES, Float32, Int32, Int64, Stream, const_expr, cute

THREADS = 128
VECTOR_BYTES = 16
"""Of a thread's share of a row: wider ones would leave too few threads at decode."""
AT_ONCE = 8
"""Rows that a thread has in flight."""


@cache
def launcher(
    arch: Arch, top_k: int, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype, bias: torch.dtype | None,
    accumulate: bool,
) -> jit.Launcher:  # fmt: skip
    return jit.load(Combine(arch, top_k, hidden, dtype, out_dtype, bias, accumulate, VECTOR_BYTES))


@dataclass(frozen=True)
class Combine(jit.Kernel):
    """A thread for every vector of the output, whatever the shape.

    dtype: of the experts' rows. bias: dtype of the bias, None for none. `vector_bytes` is the width of a load of the
    experts' rows.
    """

    top_k: int
    hidden: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: torch.dtype | None
    accumulate: bool
    vector_bytes: int

    @property
    def count(self) -> int:
        """Elements a thread sums."""
        return self.vector_bytes // self.dtype.itemsize

    @property
    def vectors(self) -> int:
        """Threads a token."""
        return self.hidden // self.count

    @cute.jit
    def __call__(
        self, rows: Int64, row_stride: Int64, slots: Int64, weights: Int64, ids: Int64, bias: Int64,
        first_expert: Int32, live_rows: Int64, out: Int64, tokens: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses, `row_stride` in elements: rows, slots int32 and weights fp32 [tokens, top_k], live_rows int32 [1]
        or 0, out [tokens, hidden]; with a bias ids int32 [tokens, top_k] and bias [experts, hidden].
        """
        threads = Int64(tokens) * self.vectors
        self.kernel(rows, row_stride, slots, weights, ids, bias, first_expert, live_rows, out, tokens).launch(
            grid=[Int32((threads + (THREADS - 1)) // THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,  # or the compiler saves registers where loads should be in flight
        )

    @cute.kernel
    def kernel(
        self, rows: Int64, row_stride: Int64, slots: Int64, weights: Int64, ids: Int64, bias: Int64,
        first_expert: Int32, live_rows: Int64, out: Int64, tokens: Int32,
    ) -> None:  # fmt: skip
        number = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        token, column = Int32(number // self.vectors), Int32(number % self.vectors) * self.count
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        ptx.exit_if(token >= vector.live_rows(live_rows, tokens))
        places = Int64(token) * (self.top_k * 4)
        total = self.sum(rows, row_stride, slots + places, weights + places, ids + places, bias, first_expert, column)
        target = out + (Int64(token) * self.hidden + column) * self.out_dtype.itemsize
        if const_expr(self.accumulate):
            before = self.load(target, self.out_dtype)
            total = [before[i] + total[i] for i in range(self.count)]
        kind = TYPES[self.out_dtype]
        vector.store_words(target, [value.to(kind) for value in total], kind, self.arch.vector_bytes)

    def load(self, address: Any, dtype: Any) -> Any:
        """A vector of elements as fp32 scalars."""
        values = vector.load(address, TYPES[dtype], self.count, self.arch.vector_bytes).to(Float32)
        return [values[i] for i in range(self.count)]

    def sum(
        self, rows: Any, row_stride: Any, slots: Any, weights: Any, ids: Any, bias: Any, first_expert: Any, column: Any
    ) -> Any:
        """This thread's sums, fp32 scalars."""
        total = [Float32(0.0)] * self.count
        for first in range(0, self.top_k, AT_ONCE):
            chosen = range(first, min(first + AT_ONCE, self.top_k))
            pairs = [self.pair(slots, weights, j) for j in chosen]
            loaded = [self.load_row(rows, row_stride, slot, column) for slot, _ in pairs]
            if self.bias is not None:
                for i, j in enumerate(chosen):
                    expert = vector.scalar(ids + 4 * j, Int32)[0] - first_expert
                    expert = Int64(vector.select(pairs[i][0] >= 0, expert, Int32(0)))
                    added = self.load(bias + (expert * self.hidden + column) * self.bias.itemsize, self.bias)
                    loaded[i] = [a + b for a, b in zip(loaded[i], added, strict=True)]
            total = self.add(total, pairs, loaded)
        return total

    def sum_pairs(self, rows: Any, row_stride: Any, pairs: Any, column: Any) -> Any:
        """`sum` of slots and weights that are read already."""
        total = [Float32(0.0)] * self.count
        for first in range(0, len(pairs), AT_ONCE):
            some = pairs[first : first + AT_ONCE]
            total = self.add(total, some, [self.load_row(rows, row_stride, slot, column) for slot, _ in some])
        return total

    def pair(self, slots: Any, weights: Any, j: int) -> tuple[Any, Any]:
        """The slot and the weight of a token's j-th expert."""
        return vector.scalar(slots + 4 * j, Int32)[0], vector.scalar(weights + 4 * j, Float32)[0]

    def add(self, total: Any, pairs: Any, loaded: Any) -> Any:
        """`total` plus the weighted vectors of rows, one after another; nothing for those without a slot."""
        for (slot, weight), values in zip(pairs, loaded, strict=True):
            summed = [a + ptx.product(weight, b) for a, b in zip(total, values, strict=True)]
            total = [Float32(vector.select(slot >= 0, a, b)) for a, b in zip(summed, total, strict=True)]
        return total

    def load_row(self, rows: Any, row_stride: Any, slot: Any, column: Any) -> Any:
        """A vector of the row in `slot`, of row 0 if there is none."""
        return self.load(self.place_of_row(rows, row_stride, slot, column), self.dtype)

    def place_of_row(self, rows: Any, row_stride: Any, slot: Any, column: Any) -> Any:
        row = Int64(vector.select(slot >= 0, slot, Int32(0)))
        return rows + (row * row_stride + column) * self.dtype.itemsize
