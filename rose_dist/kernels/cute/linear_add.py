"""x Wᵀ + b + residual for a decode step; what it computes: `rose_dist.kernels.linear_add`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.mxfp4_operands import load_shared
from rose_dist.kernels.cute.resident_weights import ResidentWeights, halves, pair_of_lane, rows_of_lane
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint8, Uint32, const_expr, cute
from rose_dist.kernels.linear_add import MAX_ROWS
from rose_dist.kernels.linear_shapes import LINEAR_OUTPUTS, resident
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import await_copies, commit_copies, copy_async

ADDED = 3
"""Words of the bias and the residual that a lane of the writing warp has in shared memory."""


@cache
def launcher(arch: Arch, inputs: int, groups: bool) -> jit.Launcher:
    return jit.load(LinearAdd(arch, ResidentWeights(inputs, resident(inputs)), groups))


@dataclass(frozen=True)
class LinearAdd(jit.Kernel):
    """A block has 16 neighbouring outputs of 8 rows of x. It lets the next launch start at once: what that one reads
    before it waits is never written by this one or the one before.
    """

    weights: ResidentWeights
    groups: bool = False
    """Of 8 rows there may be several; else the compiler needs no registers for that."""

    @property
    def shared_bytes(self) -> int:
        return self.weights.shared_bytes + ADDED * WARP * 4

    @cute.jit
    def __call__(
        self, x: Int64, x_stride: Int64, weight: Int64, bias: Int64, residual: Int64, out: Int64, rows: Int32,
        outputs: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x bf16 [rows, inputs] with a stride in elements, weight bf16 [outputs, inputs], bias bf16
        [outputs] or 0, residual bf16 [rows, outputs] or 0, out bf16 [rows, outputs].
        """
        groups = (rows + (MAX_ROWS - 1)) // MAX_ROWS
        self.kernel(x, x_stride, weight, bias, residual, out, rows, outputs).launch(
            grid=[outputs // LINEAR_OUTPUTS, groups, 1], block=[self.weights.threads, 1, 1],
            smem=self.shared_bytes, stream=stream, use_pdl=True,
            min_blocks_per_mp=self.weights.shape.per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int64, weight: Int64, bias: Int64, residual: Int64, out: Int64, rows: Int32,
        outputs: Int32,
    ) -> None:  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        shared, writes = shared_memory(), writing_warp()
        held = self.fetch(shared, weight, bias, writes)
        if const_expr(self.groups):
            _, group, _ = cute.arch.block_idx()
            before = group * MAX_ROWS
            rows = vector.min_of(rows - before, Int32(MAX_ROWS))
            x += Int64(before) * x_stride * 2
            residual = vector.select(residual != 0, residual + Int64(before) * outputs * 2, Int64(0))
            out += Int64(before) * outputs * 2
        cute.arch.griddepcontrol_wait()
        self.multiply(held, shared, x, x_stride, residual, rows, outputs, writes)
        if writes:
            self.write(shared, out, rows, outputs)

    def fetch(self, shared: Any, weight: Any, bias: Any, writes: Any) -> list[Any]:
        """Start all loads of the weights, some to the registers returned, and of the bias."""
        row_bytes = self.weights.inputs * 2
        first = weight + Int64(pair_of_lane()) * (2 * row_bytes)
        self.copy_bias(shared, bias, writes)
        commit_copies()
        return self.weights.fetch(first, first + row_bytes, shared)

    def multiply(
        self, held: list[Any], shared: Any, x: Any, x_stride: Any, residual: Any, rows: Any, outputs: Any, writes: Any
    ) -> None:
        """Leave the block's sums where `weights.total` finds them, and the residual beside the bias."""
        self.copy_residual(shared, residual, rows, outputs, writes)
        commit_copies()
        inputs = self.weights.load_rows(x, x_stride, rows)
        sums = self.weights.multiply(held, shared, inputs, younger=1)
        await_copies(0)
        self.weights.meet(shared, sums)

    def place(self, shared: Any, word: int) -> Any:
        """Where a lane of the writing warp keeps its words of the bias and of the residual in two rows.

        Loaded into registers, they would spill, or the assembler would load them only when others are free.
        """
        return Int32(shared) + (self.weights.shared_bytes + word * WARP * 4) + cute.arch.thread_idx()[0] % WARP * 4

    @cute.jit
    def copy_bias(self, shared: Int32, bias: Int64, writes: Boolean) -> None:
        if writes:
            source = bias + Int64(pair_of_lane()) * 4
            copy_async(self.place(shared, 0), source, Uint32(Boolean(bias != 0)) * 4, 4)

    @cute.jit
    def copy_residual(self, shared: Int32, residual: Int64, rows: Int32, outputs: Int32, writes: Boolean) -> None:
        if writes:
            for i, row in enumerate(rows_of_lane(cute.arch.thread_idx()[0] % WARP)):
                source = residual + (Int64(row) * outputs + pair_of_lane() * 2) * 2
                there = Boolean(row < rows) & Boolean(residual != 0)
                copy_async(self.place(shared, 1 + i), source, Uint32(there) * 4, 4)

    @cute.jit
    def write(self, shared: Int32, out: Int64, rows: Int32, outputs: Int32) -> None:
        # Not from the thread's number, or registers keep what `copy_residual` has computed from it.
        lane = cute.arch.lane_idx()
        pair = cute.arch.block_idx()[0] * (LINEAR_OUTPUTS // 2) + lane // 4
        sums = self.weights.total(shared)
        bias = halves(load_shared(self.place(shared, 0), 1)[0])
        for i, row in enumerate(rows_of_lane(lane)):
            if row < rows:
                rounded = halves(ptx.to_bf16x2(sums[i] + bias[0], sums[2 + i] + bias[1]))
                other = halves(load_shared(self.place(shared, 1 + i), 1)[0])
                result = ptx.to_bf16x2(rounded[0] + other[0], rounded[1] + other[1])
                vector.scalar(out + (Int64(row) * outputs + pair * 2) * 2, Uint32)[0] = result


def shared_memory() -> Any:
    """The address of the block's."""
    return Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())


def writing_warp() -> Any:
    """Whether this thread is of the warp that adds up the others' sums and writes."""
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP) == 0
