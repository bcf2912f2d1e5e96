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
    block = 0 if quantized is None else quantized.fmt.block
    count = shape.lane_elements(hidden, vector_bytes, dtype.itemsize, block)
    group = 1 if quantized is None else quantized.lanes(count)
    tiling = tile(hidden // count, count * dtype.itemsize, shape, group=group)
    return RMSNorm(
        arch, dtype, weight_dtype, tiling, count, vector_bytes, weight_bias, residual, quantized, shape.streams,
        shape.apart,
    )  # fmt: skip


@dataclass(frozen=True)
class RMSNorm(jit.Kernel):
    """One row a group of threads; the row stays in registers between the sum of squares and the scaling.

    A row that is split takes the blocks of one cluster, which has no rows but that one; or, `apart`, blocks that each
    read all of it and write their share, which must not be what another still reads.
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
    streams: bool
    """Rows are asked for before the weights, which otherwise come while the kernel before still runs."""
    apart: bool

    @property
    def meets(self) -> bool:
        """Whether a row's blocks add up in a cluster."""
        return self.tiling.splits > 1 and not self.apart

    @property
    def cluster(self) -> list[int] | None:
        """None where a row has one block: a cluster of one is launched as a cluster, too."""
        return [self.tiling.splits, 1, 1] if self.meets else None

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
            cluster=self.cluster, stream=stream, use_pdl=True,
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
        if const_expr(self.meets):
            vector.join_cluster()
        places = [vector.place(tiling, lane, i) for i in range(tiling.vectors)]
        weights = self.await_rows(weight, places)
        tensor_scale = block_scale.read_global_scale(self.quantized, global_scale)
        x += Int64(row) * x_stride * width
        residual += Int64(row) * residual_stride * width
        values = self.load_sums(x, residual, places)
        others = [self.load_sums(x, residual, part) for part in self.places_of_others(lane)]
        if const_expr(self.streams):
            weights = self.load_weights(weight, places)
        if const_expr(self.residual):
            for i in range_constexpr(tiling.vectors):
                vector.store_if(
                    Boolean(vector.in_row(tiling, lane, i)),
                    total + (Int64(row) * (tiling.row_vectors * count) + places[i] * count) * width,
                    values[i], TYPES[self.dtype], count, self.vector_bytes,
                )  # fmt: skip
        squares = self.square_sum(values, lane)
        for shift, part in enumerate(others, 1):
            squares = squares + self.square_sum(part, self.shifted(lane, shift))
        if const_expr(self.meets):
            squares = vector.cluster_sum(squares, tiling)
        else:
            squares = vector.row_sum(squares, tiling.threads_per_row, tiling.rows_per_block)
        inverse = cute.math.rsqrt(squares * Float32(1.0 / (tiling.row_vectors * count)) + eps)
        for i in range_constexpr(tiling.vectors):
            index = places[i]
            valid = Boolean(vector.in_row(tiling, lane, i))
            w = weights[i].to(Float32)
            if const_expr(self.weight_bias != 0.0):
                w = w + Float32(self.weight_bias)
            scaled = values[i].to(Float32) * inverse * w
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

    def await_rows(self, weight: Any, places: list[Any]) -> list[Any]:
        """Wait for the kernel before, whose work all but the weights may be. Few rows' weights come meanwhile, and are
        returned; the next launch's may, too.
        """
        if self.streams:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            return []
        cute.arch.griddepcontrol_launch_dependents()
        weights = self.load_weights(weight, places)
        cute.arch.griddepcontrol_wait()
        return weights

    def load_weights(self, weight: Any, places: list[Any]) -> list[Any]:
        size = self.count * self.weight_dtype.itemsize
        return [
            vector.load(weight + place * size, TYPES[self.weight_dtype], self.count, self.vector_bytes)
            for place in places
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

    def places_of_others(self, lane: Any) -> list[list[Any]]:
        """The vectors that this thread reads for their squares alone: those of its counterpart in each other block."""
        shifts = range(1, self.tiling.splits if self.apart else 1)
        return [
            [vector.place(self.tiling, self.shifted(lane, shift), i) for i in range(self.tiling.vectors)]
            for shift in shifts
        ]

    def shifted(self, lane: Any, shift: int) -> Any:
        """The lane's counterpart, so many blocks further round the row."""
        return (lane + shift * self.tiling.threads_per_row) % self.tiling.lanes
