"""MoE combine, residual and the next layer's norm in one launch; what it computes: `rose_dist.kernels.combine_norm`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.moe_combine import VECTOR_BYTES, Combine
from rose_dist.kernels.dsl import TYPES, Float32, Int32, Int64, Stream, const_expr, cute
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_tiling import REGISTERS

THREAD_REGISTERS, PER_SM = 40, 4
"""Registers that a thread makes do with, so that a block fits beside one of the experts' (in most of their shapes); and
the most blocks for which the compiler is told to leave room."""


@cache
def launcher(arch: Arch, top_k: int, hidden: int, dtype: torch.dtype, bounded: bool) -> jit.Launcher:
    return jit.load(CombineNorm(arch, Combine(arch, top_k, hidden, dtype, dtype, None, False, VECTOR_BYTES), bounded))


@dataclass(frozen=True)
class CombineNorm(jit.Kernel):
    """A block a token, a thread a vector of it. It lets the next launch start at once: its own rows then come
    5 us later, but that one's weights 7 us earlier (H200). Nothing but rows is read behind the wait.
    """

    source: Combine
    bounded: bool
    """Whether a number of live rows is given. When the kernel looked for itself, a single token's took 4.8 us of a
    layer instead of 3.5 (H200, profiles)."""

    @property
    def threads(self) -> int:
        return -(-self.source.vectors // WARP) * WARP

    @property
    def per_sm(self) -> int:
        return min(PER_SM, REGISTERS // (THREAD_REGISTERS * self.threads))

    @cute.jit
    def __call__(
        self, rows: Int64, row_stride: Int64, slots: Int64, weights: Int64, residual: Int64,
        total: Int64, scale: Int64, out: Int64, live_rows: Int64, eps: Float32, tokens: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: rows, row_stride, slots, weights and live_rows as for `Combine`; residual, total (which may be the
        same) and out [tokens, hidden], scale [hidden], all of the rows' dtype.
        """
        self.kernel(rows, row_stride, slots, weights, residual, total, scale, out, live_rows, eps, tokens).launch(
            grid=[tokens, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=self.per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, rows: Int64, row_stride: Int64, slots: Int64, weights: Int64, residual: Int64,
        total: Int64, scale: Int64, out: Int64, live_rows: Int64, eps: Float32, tokens: Int32,
    ) -> None:  # fmt: skip
        source, width = self.source, self.source.dtype.itemsize
        thread, token = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        column = vector.min_of(thread, Int32(source.vectors - 1)) * source.count
        place = (Int64(token) * source.hidden + column) * width
        cute.arch.griddepcontrol_launch_dependents()
        scales = source.load(scale + Int64(column) * width, source.dtype)
        # Threads beyond the row must not read what another one may have written already.
        valid = thread < source.vectors
        before = source.load(vector.select(valid, residual + place, scale), source.dtype)
        places = Int64(token) * (source.top_k * 4)
        pairs = [source.pair(slots + places, weights + places, j) for j in range(source.top_k)]
        cute.arch.griddepcontrol_wait()
        if const_expr(self.bounded):
            ptx.exit_if(token >= vector.live_rows(live_rows, tokens))
        summed = source.sum_pairs(rows, row_stride, pairs, column)
        new = [self.rounded(self.rounded(a) + b) for a, b in zip(summed, before, strict=True)]
        squares = Float32(0.0)
        for value in new:
            squares = squares + value * value
        squares = vector.row_sum(vector.select(valid, squares, Float32(0.0)), self.threads, 1)
        inverse = cute.math.rsqrt(squares * Float32(1.0 / source.hidden) + eps)
        normed = [value * inverse * factor for value, factor in zip(new, scales, strict=True)]
        kind = TYPES[source.dtype]
        vector.store_scalars_if(valid, total + place, new, kind, VECTOR_BYTES)
        vector.store_scalars_if(valid, out + place, normed, kind, VECTOR_BYTES)

    def rounded(self, value: Any) -> Any:
        return Float32(Float32(value).to(TYPES[self.source.dtype]))
