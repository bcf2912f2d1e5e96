"""Embedding rows, copied, and rows of the rotary tables beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import TYPES, Boolean, Float32, Int32, Int64, Stream, cute, range_constexpr
from rose_dist.kernels.row_tiling import RowShape, RowTiling, tile

ANGLE_VECTOR = 16
"""Bytes of the rotary tables that a thread copies at a time."""


@cache
def launcher(
    arch: Arch, dtype: torch.dtype, hidden: int, shape: RowShape, vector_bytes: int, angle_bytes: int
) -> jit.Launcher:
    tiling = tile(hidden * dtype.itemsize // vector_bytes, vector_bytes, shape)
    return jit.load(Embed(arch, dtype, tiling, vector_bytes, angle_bytes))


@dataclass(frozen=True)
class Embed(jit.Kernel):
    """Copies rows; a row that is not held is written as zeros.

    angle_bytes: of a row of either rotary table.
    """

    dtype: torch.dtype
    tiling: RowTiling
    vector_bytes: int
    angle_bytes: int

    @cute.jit
    def __call__(
        self, ids: Int64, table: Int64, stride: Int64, out: Int64, first_id: Int64, held_ids: Int64, sampled: Int64,
        positions: Int64, cos: Int64, sin: Int64, cos_out: Int64, sin_out: Int64, tokens: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses, 0 for `sampled` if there are none. `stride` of the table, in elements. See `embed_with_angles`."""
        blocks = (tokens + (self.tiling.rows_per_block - 1)) // self.tiling.rows_per_block
        self.kernel(
            ids, table, stride, out, first_id, held_ids, sampled, positions, cos, sin, cos_out, sin_out, tokens
        ).launch(grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self, ids: Int64, table: Int64, stride: Int64, out: Int64, first_id: Int64, held_ids: Int64, sampled: Int64,
        positions: Int64, cos: Int64, sin: Int64, cos_out: Int64, sin_out: Int64, tokens: Int32,
    ) -> None:  # fmt: skip
        tiling, dtype = self.tiling, TYPES[self.dtype]
        count = self.vector_bytes // self.dtype.itemsize
        lane, token = vector.row_of_thread(tiling)
        ptx.exit_if(token >= tokens)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        given = Int64(vector.scalar(ids + Int64(token) * 8, Int64)[0])
        row = Int64(vector.scalar(positions + Int64(token) * 8, Int64)[0])
        self.copy_angles(lane, row, token, cos, cos_out)
        self.copy_angles(lane, row, token, sin, sin_out)
        row = self.known(given, sampled) - first_id
        held = Boolean(row >= 0) & (row < held_ids)
        source = table + vector.select(held, row, Int64(0)) * stride * self.dtype.itemsize
        values = []
        for i in range_constexpr(tiling.vectors):
            index = vector.place(tiling, lane, i)
            values.append(vector.load(source + index * self.vector_bytes, dtype, count, self.vector_bytes))
        for i in range_constexpr(tiling.vectors):
            index = vector.place(tiling, lane, i)
            valid = Boolean(vector.in_row(tiling, lane, i))
            target = out + (Int64(token) * tiling.row_vectors + index) * self.vector_bytes
            self.copy(valid, held, target, values[i])

    @cute.jit
    def known(self, given: Int64, sampled: Int64) -> Int64:
        """The id, which the step before may have sampled."""
        if given < 0:
            if sampled != 0:
                given = Int64(vector.scalar(sampled + (-1 - given) * 8, Int64)[0])
        return given

    @cute.jit
    def copy_angles(self, lane: Int32, row: Int64, token: Int32, table: Int64, out: Int64) -> None:
        for step in range_constexpr(-(-self.angle_bytes // (ANGLE_VECTOR * self.tiling.threads_per_row))):
            place = (lane + step * self.tiling.threads_per_row) * ANGLE_VECTOR
            if place < self.angle_bytes:
                values = vector.load(table + row * self.angle_bytes + place, Float32, 4, ANGLE_VECTOR)
                vector.store(out + Int64(token) * self.angle_bytes + place, values, Float32, 4, ANGLE_VECTOR)

    @cute.jit
    def copy(self, valid: Boolean, held: Boolean, target: Int64, values: cute.TensorSSA) -> None:
        """Store a vector, or zeros if its row is not held, where `valid`."""
        count = self.vector_bytes // self.dtype.itemsize
        if valid:
            if held:
                vector.store(target, values, TYPES[self.dtype], count, self.vector_bytes)
            else:
                zeros = cute.make_rmem_tensor(count, TYPES[self.dtype])
                zeros.fill(0)
                vector.store(target, zeros.load(), TYPES[self.dtype], count, self.vector_bytes)
