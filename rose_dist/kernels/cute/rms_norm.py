"""RMS norm in one pass, with residual and quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
from rose_dist.kernels.formats import BlockOutput
from rose_dist.kernels.row_tiling import RowShape, RowTiling, tile


@cache
def launcher(
    arch: Arch, dtype: torch.dtype, weight_dtype: torch.dtype, hidden: int, shape: RowShape, vector_bytes: int,
    weight_bias: float, residual: bool, quantized: BlockOutput | None,
) -> jit.Launcher:  # fmt: skip
    return jit.load(
        norm_kernel(arch, dtype, weight_dtype, hidden, shape, vector_bytes, weight_bias, residual, quantized)
    )


def norm_kernel(
    arch: Arch, dtype: torch.dtype, weight_dtype: torch.dtype, hidden: int, shape: RowShape, vector_bytes: int,
    weight_bias: float, residual: bool, quantized: BlockOutput | None,
) -> RMSNorm:  # fmt: skip
    count = shape.lane_elements(hidden, vector_bytes, dtype.itemsize)
    group = 1 if quantized is None else quantized.lanes(count)
    tiling = tile(hidden // count, count * dtype.itemsize, shape, group=group)
    return RMSNorm(arch, dtype, weight_dtype, tiling, count, vector_bytes, weight_bias, residual, quantized)


@dataclass(frozen=True)
class RMSNorm(jit.Kernel):
    """One row a group of threads; the row stays in registers between the sum of squares and the scaling.

    A row that is split takes the blocks of one cluster, which has no rows but that one.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    tiling: RowTiling
    count: int
    """Elements that a lane takes at a time."""
    vector_bytes: int
    weight_bias: float
    residual: bool
    quantized: BlockOutput | None

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
            grid=[blocks * self.tiling.splits, 1, 1], block=[self.tiling.threads, 1, 1],
            cluster=[self.tiling.splits, 1, 1], stream=stream, use_pdl=True,
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
        vector.join_row(tiling)
        weights = []
        for i in range_constexpr(tiling.vectors):
            index = vector.place(tiling, lane, i)
            address = weight + index * (count * self.weight_dtype.itemsize)
            weights.append(vector.load(address, TYPES[self.weight_dtype], count, self.vector_bytes))
        # Weights are constant; everything below may be the work of the kernel before.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        tensor_scale = block_scale.read_global_scale(self.quantized, global_scale)
        values = []
        for i in range_constexpr(tiling.vectors):
            index = vector.place(tiling, lane, i)
            part = vector.load(
                x + (Int64(row) * x_stride + index * count) * width, TYPES[self.dtype], count, self.vector_bytes
            )
            if const_expr(self.residual):
                other = vector.load(
                    residual + (Int64(row) * residual_stride + index * count) * width,
                    TYPES[self.dtype], count, self.vector_bytes,
                )  # fmt: skip
                part = (part.to(Float32) + other.to(Float32)).to(TYPES[self.dtype])
            values.append(part)
        squares = Float32(0.0)
        for i in range_constexpr(tiling.vectors):
            own = vector.square_sum(values[i].to(Float32))
            squares = squares + vector.select(vector.in_row(tiling, lane, i), own, Float32(0.0))
        squares = vector.whole_row_sum(squares, tiling)
        inverse = cute.math.rsqrt(squares * Float32(1.0 / (tiling.row_vectors * count)) + eps)
        for i in range_constexpr(tiling.vectors):
            index = vector.place(tiling, lane, i)
            valid = Boolean(vector.in_row(tiling, lane, i))
            w = weights[i].to(Float32)
            if const_expr(self.weight_bias != 0.0):
                w = w + Float32(self.weight_bias)
            scaled = values[i].to(Float32) * inverse * w
            if const_expr(self.residual):
                vector.store_if(
                    valid, total + (Int64(row) * (tiling.row_vectors * count) + index * count) * width,
                    values[i], TYPES[self.dtype], count, self.vector_bytes,
                )  # fmt: skip
            if const_expr(self.quantized is not None):
                block_scale.store(
                    self.quantized, self.arch, [scaled[j] for j in range(count)], out, scales, row, index,
                    padded_rows, valid, tensor_scale,
                )  # fmt: skip
            else:
                vector.store_if(
                    valid, out + (Int64(row) * out_stride + index * count) * width,
                    scaled, TYPES[self.dtype], count, self.vector_bytes,
                )  # fmt: skip
