"""RMS norm in one pass, with residual and quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import block_scale, jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import (
    TYPES,
    Boolean,
    Float32,
    Int32,
    Int64,
    Stream,
    const_expr,
    cute,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.formats import BlockOutput, Element
from rose_dist.kernels.row_tiling import RowShape, RowTiling, tile

SM_THREADS = 2048
CROWDED = (Element.E4M3,)
"""Of which results kernels of short rows with residual are `RMSNorm.crowded` on Hopper. Left alone, the compiler takes
40 registers for MXFP8 and stores half of every sector of the new residual at the end; with 32, which FP8 has anyway, it
stores both halves at once. On Blackwell, where a load fills 8 registers, 32 are too few.
"""


@cache
def launcher(
    arch: Arch, dtype: torch.dtype, weight_dtype: torch.dtype, hidden: int, shape: RowShape, vector_bytes: int,
    weight_bias: float, residual: bool, quantized: BlockOutput | None, ends_chain: bool,
) -> jit.Launcher:  # fmt: skip
    return jit.load(
        norm_kernel(
            arch, dtype, weight_dtype, hidden, shape, vector_bytes, weight_bias, residual, quantized, ends_chain
        )
    )


def norm_kernel(
    arch: Arch, dtype: torch.dtype, weight_dtype: torch.dtype, hidden: int, shape: RowShape, vector_bytes: int,
    weight_bias: float, residual: bool, quantized: BlockOutput | None, ends_chain: bool = False,
) -> RMSNorm:  # fmt: skip
    block = 0 if quantized is None else quantized.fmt.block
    count = shape.lane_elements(hidden, vector_bytes, dtype.itemsize, block)
    group = 1 if quantized is None else quantized.lanes(count)
    tiling = tile(hidden // count, count * dtype.itemsize, shape, group=group)
    short = shape.clusters and tiling.vectors == 1 and weight_dtype is dtype and not arch.blackwell
    crowded = short and quantized is not None and quantized.fmt.element in CROWDED
    return RMSNorm(
        arch, dtype, weight_dtype, tiling, count, vector_bytes, weight_bias, residual, quantized, shape.streams,
        shape.clusters, crowded, ends_chain,
    )  # fmt: skip


@dataclass(frozen=True)
class RMSNorm(jit.Kernel):
    """One row a group of threads; the row stays in registers between the sum of squares and the scaling."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    tiling: RowTiling
    count: int
    """Elements that a lane takes at a time."""
    vector_bytes: int
    weight_bias: float
    residual: bool
    quantized: BlockOutput | None
    streams: bool
    """Rows are asked for before the weights, which otherwise come while the kernel before still runs."""
    clusters: bool
    """Blocks are launched as clusters of one, and so start more slowly."""
    crowded: bool
    """Registers leave room for as many threads as an SM can have."""
    ends_chain: bool
    """The next launch begins only once those before this one are complete: it reads early what they write, or would be
    in the way.
    """

    @cute.jit
    def __call__(
        self,
        x: Int64, x_stride: Int64, weight: Int64, residual: Int64, residual_stride: Int64, total: Int64,
        out: Int64, out_stride: Int64, scales: Int64, padded_rows: Int32, global_scale: Int64,
        rows: Int32, eps: Float32, stream: Stream,
    ) -> None:  # fmt: skip
        blocks = (rows + (self.tiling.rows_per_block - 1)) // self.tiling.rows_per_block
        self.kernel(
            x, x_stride, weight, residual, residual_stride, total, out, out_stride, scales, padded_rows, global_scale,
            rows, eps,
        ).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], cluster=[1, 1, 1] if self.clusters else None,
            stream=stream, use_pdl=True, min_blocks_per_mp=SM_THREADS // self.tiling.threads if self.crowded else 0,
            # Rows that are so short need no shared memory.
            preferred_smem_carveout=0 if self.crowded else None,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x: Int64, x_stride: Int64, weight: Int64, residual: Int64, residual_stride: Int64, total: Int64,
        out: Int64, out_stride: Int64, scales: Int64, padded_rows: Int32, global_scale: Int64,
        rows: Int32, eps: Float32,
    ) -> None:  # fmt: skip
        tiling, count, width = self.tiling, self.count, self.dtype.itemsize
        lane, row = vector.row_of_thread(tiling)
        ptx.exit_if(row >= rows)
        places = [vector.place(tiling, lane, i) for i in range(tiling.vectors)]
        x += Int64(row) * x_stride * width
        residual += Int64(row) * residual_stride * width
        if const_expr(not self.ends_chain):
            # What comes next reads no more than weights before it waits, and so for this launch and those before.
            cute.arch.griddepcontrol_launch_dependents()
        weights = []
        if const_expr(not self.streams):
            weights = self.load_weights(weight, places)
        # Weights are constant; everything below may be the work of the kernel before.
        cute.arch.griddepcontrol_wait()
        if const_expr(self.ends_chain):
            cute.arch.griddepcontrol_launch_dependents()
        tensor_scale = block_scale.read_global_scale(self.quantized, global_scale)
        values = self.load_sums(x, residual, places)
        if const_expr(self.streams):
            weights = self.load_weights(weight, places)
        if const_expr(self.residual):
            for i in range_constexpr(tiling.vectors):
                vector.store_if(
                    Boolean(vector.in_row(tiling, lane, i)),
                    total + (Int64(row) * (tiling.row_vectors * count) + places[i] * count) * width,
                    values[i], TYPES[self.dtype], count, self.vector_bytes,
                )  # fmt: skip
        weighted = [value.to(Float32) * self.widen(w) for value, w in zip(values, weights, strict=True)]
        largest = self.largest(weighted)
        squares = self.square_sum(values, lane)
        squares = vector.row_sum(squares, tiling.threads_per_row, tiling.rows_per_block)
        inverse = cute.math.rsqrt(squares * Float32(1.0 / (tiling.row_vectors * count)) + eps)
        for i in range_constexpr(tiling.vectors):
            index = places[i]
            valid = Boolean(vector.in_row(tiling, lane, i))
            scaled = weighted[i] * inverse
            if const_expr(self.quantized is not None):
                block_scale.store(
                    self.quantized, self.arch, [scaled[j] for j in range(count)], out, scales, row, index,
                    padded_rows, valid, tensor_scale, ptx.bits(largest[i] * inverse),
                )  # fmt: skip
            else:
                vector.store_if(
                    valid, out + (Int64(row) * out_stride + index * count) * width,
                    scaled, TYPES[self.dtype], count, self.vector_bytes,
                )  # fmt: skip

    def load_weights(self, weight: Any, places: list[Any]) -> list[Any]:
        size = self.count * self.weight_dtype.itemsize
        return [
            vector.load(weight + place * size, TYPES[self.weight_dtype], self.count, self.vector_bytes)
            for place in places
        ]

    def widen(self, weight: Any) -> Any:
        """A weight vector as it is multiplied with, in fp32."""
        wide = weight.to(Float32)
        return wide + Float32(self.weight_bias) if self.weight_bias != 0.0 else wide

    def largest(self, weighted: list[Any]) -> list[Any]:
        """The largest magnitude in each vector's quantisation block, before anything is divided by the row's mean: the
        quotient of the largest is the largest quotient, and what is still to be summed up is waited for once.
        """
        if self.quantized is None:
            return []
        count, fmt = self.count, self.quantized.fmt
        return [
            ptx.from_bits(block_scale.largest_of_block(fmt, [value[j] for j in range(count)])) for value in weighted
        ]

    def load_sums(self, x: Any, residual: Any, places: list[Any]) -> list[Any]:
        """A row's vectors, the residual's added and rounded: all are asked for before the first is used."""
        size, dtype = self.count * self.dtype.itemsize, TYPES[self.dtype]
        loaded = [vector.load(x + place * size, dtype, self.count, self.vector_bytes) for place in places]
        if not self.residual:
            return loaded
        added = [vector.load(residual + place * size, dtype, self.count, self.vector_bytes) for place in places]
        return [(a.to(Float32) + b.to(Float32)).to(dtype) for a, b in zip(loaded, added, strict=True)]

    def square_sum(self, values: list[Any], lane: Any) -> Any:
        """Of the vectors that lie in the row."""
        squares = Float32(0.0)
        for i, value in enumerate(values):
            own = vector.square_sum(value.to(Float32))
            squares = squares + vector.select(vector.in_row(self.tiling, lane, i), own, Float32(0.0))
        return squares
