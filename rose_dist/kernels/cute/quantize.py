"""Block-scaled quantisation and dequantisation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from rose_dist.kernels import block_scale, jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import TYPES, Boolean, Float32, Int32, Int64, Stream, cute, range_constexpr
from rose_dist.kernels.formats import BlockOutput
from rose_dist.kernels.row_tiling import RowShape, RowTiling, tile


@cache
def quantizer(arch: Arch, dtype: torch.dtype, shape: RowShape, vector_bytes: int, output: BlockOutput) -> jit.Launcher:
    return jit.load(quantize_kernel(arch, dtype, shape, vector_bytes, output))


def quantize_kernel(
    arch: Arch, dtype: torch.dtype, shape: RowShape, vector_bytes: int, output: BlockOutput
) -> Quantize:
    count = shape.lane_elements(output.columns, vector_bytes, dtype.itemsize, output.fmt.block)
    tiling = tile(output.columns // count, count * dtype.itemsize, shape, group=output.lanes(count))
    return Quantize(arch, dtype, tiling, count, vector_bytes, output)


@cache
def dequantizer(
    arch: Arch, dtype: torch.dtype, shape: RowShape, vector_bytes: int, source: BlockOutput
) -> jit.Launcher:
    tiling = tile(source.columns // decoded_count(arch, dtype), vector_bytes, shape)
    return jit.load(Dequantize(arch, dtype, tiling, vector_bytes, source))


@dataclass(frozen=True)
class Quantize(jit.Kernel):
    """Some neighbouring elements a lane; a block's maximum goes round its lanes by shuffles."""

    dtype: torch.dtype
    tiling: RowTiling
    count: int
    """Elements that a lane takes at a time."""
    vector_bytes: int
    output: BlockOutput

    @cute.jit
    def __call__(
        self, x: Int64, x_stride: Int64, codes: Int64, scales: Int64, padded_rows: Int32, global_scale: Int64,
        live_rows: Int64, rows: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        blocks = (rows + (self.tiling.rows_per_block - 1)) // self.tiling.rows_per_block
        self.kernel(x, x_stride, codes, scales, padded_rows, global_scale, live_rows, rows).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int64, codes: Int64, scales: Int64, padded_rows: Int32, global_scale: Int64,
        live_rows: Int64, rows: Int32,
    ) -> None:  # fmt: skip
        tiling, width, count = self.tiling, self.dtype.itemsize, self.count
        lane, row = vector.row_of_thread(tiling)
        cute.arch.griddepcontrol_launch_dependents()
        addresses = [
            x + (Int64(row) * x_stride + vector.place(tiling, lane, i) * count) * width for i in range(tiling.vectors)
        ]
        cute.arch.griddepcontrol_wait()
        ptx.exit_if(row >= vector.live_rows(live_rows, rows))
        tensor_scale = block_scale.read_global_scale(self.output, global_scale)
        values = [vector.load(address, TYPES[self.dtype], count, self.vector_bytes) for address in addresses]
        for i in range_constexpr(tiling.vectors):
            wide = values[i].to(Float32)
            block_scale.store(
                self.output, self.arch, [wide[j] for j in range(count)], codes, scales, row,
                vector.place(tiling, lane, i), padded_rows, Boolean(vector.in_row(tiling, lane, i)), tensor_scale,
            )  # fmt: skip


def decoded_count(arch: Arch, dtype: torch.dtype) -> int:
    """Values that a lane decodes at once: a full store on the way out, at least a word of codes on the way in."""
    return max(arch.vector_bytes // dtype.itemsize, 8)


@dataclass(frozen=True)
class Dequantize(jit.Kernel):
    """A vector of codes a lane."""

    dtype: torch.dtype
    tiling: RowTiling
    vector_bytes: int
    source: BlockOutput

    @cute.jit
    def __call__(
        self, codes: Int64, scales: Int64, padded_rows: Int32, global_scale: Int64, out: Int64, rows: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        blocks = (rows + (self.tiling.rows_per_block - 1)) // self.tiling.rows_per_block
        self.kernel(codes, scales, padded_rows, global_scale, out, rows).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, codes: Int64, scales: Int64, padded_rows: Int32, global_scale: Int64, out: Int64, rows: Int32
    ) -> None:  # fmt: skip
        tiling, source = self.tiling, self.source
        count = decoded_count(self.arch, self.dtype)
        lane, row = vector.row_of_thread(tiling)
        ptx.exit_if(row >= rows)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        tensor_scale = block_scale.read_global_scale(source, global_scale)
        words, wide_scales = [], []
        for i in range_constexpr(tiling.vectors):
            index = vector.place(tiling, lane, i)
            words.append(block_scale.load_codes(source, codes, row, index, count))
            wide_scales.append(block_scale.load_scale(source, scales, row, index * count, padded_rows, tensor_scale))
        for i in range_constexpr(tiling.vectors):
            index = vector.place(tiling, lane, i)
            valid = Boolean(vector.in_row(tiling, lane, i))
            values = block_scale.decode(source.fmt, self.arch, words[i], wide_scales[i])
            vector.store_scalars_if(
                valid, out + (Int64(row) * source.columns + index * count) * self.dtype.itemsize,
                values, TYPES[self.dtype], self.vector_bytes,
            )  # fmt: skip
