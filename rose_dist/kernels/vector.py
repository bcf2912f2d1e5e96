"""Vectors of consecutive elements in global memory, and reductions over groups of lanes.

Plain functions that run while a kernel is traced. Addresses are `Int64`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rose_dist.kernels import ptx
from rose_dist.kernels.dsl import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute, cutlass
from rose_dist.kernels.row_tiling import RowTiling

MOST_PARTIALS = 16
"""Warps up to which every thread adds up their sums by itself: 4 loads, where 5 shuffles take longer. With more, the
loads of all warps do."""


def load(address: Any, dtype: Any, count: int, vector_bytes: int) -> Any:
    """`count` elements at `address` as a register vector; the address is a multiple of the access width."""
    return _tensor(address, dtype, count, vector_bytes).load()


def store(address: Any, values: Any, dtype: Any, count: int, vector_bytes: int) -> None:
    """Store a register vector of `count` values, converted to `dtype`."""
    _tensor(address, dtype, count, vector_bytes).store(values.to(dtype))


@cute.jit
def store_if(
    valid: Boolean, address: Int64, values: cute.TensorSSA, dtype: cutlass.Constexpr, count: cutlass.Constexpr,
    vector_bytes: cutlass.Constexpr,
) -> None:  # fmt: skip
    """`store` where `valid`."""
    if valid:
        store(address, values, dtype, count, vector_bytes)


@cute.jit
def store_scalars_if(
    valid: Boolean, address: Int64, values: list[Any], dtype: cutlass.Constexpr, vector_bytes: cutlass.Constexpr
) -> None:
    """Store fp32 scalars side by side, converted to `dtype`, where `valid`."""
    if valid:
        store_words(address, [dtype(value) for value in values], dtype, vector_bytes)


@cute.jit
def live_rows(address: Int64, rows: Int32) -> Int32:
    """The i32 at `address`, at most `rows`; `rows` itself if the address is 0."""
    live = rows
    if address != 0:
        live = min_of(scalar(address, Int32)[0], rows)
    return live


@cute.jit
def row_sum(value: Float32, threads: cutlass.Constexpr, rows: cutlass.Constexpr) -> Float32:
    """Sum over each of `rows` groups of `threads` consecutive threads of the block, the same in all of a group.

    `threads` is a power of two ≤ 32 or a multiple of 32. All threads of the block must arrive.
    """
    value = group_sum(value, const_min(threads, 32))
    if const_expr(threads > 32):
        warps = threads // 32
        stride = (warps + 3) // 4 * 4  # so that a row's partial sums are read as vectors
        partial = cute.make_tensor(
            cute.arch.alloc_smem(Float32, stride * rows, alignment=16), cute.make_layout(stride * rows)
        )
        thread = cute.arch.thread_idx()[0]
        lane, first = thread % 32, thread // threads * stride
        if lane == 0:
            partial[first + thread % threads // 32] = value
        cute.arch.sync_threads()
        if const_expr(warps <= MOST_PARTIALS):
            value = sum_shared(partial.iterator.toint() + first * 4, warps)
        else:
            value = Float32(0.0)
            if lane < warps:
                value = partial[first + lane]
            value = group_sum(value, 32)
    return value


def sum_shared(address: Any, count: int) -> Any:
    """Sum of fp32s side by side in shared memory, at a multiple of 16."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
    loaded = cute.make_tensor(pointer, cute.make_layout(count)).load()
    sums = [loaded[i] for i in range(count)]
    while len(sums) > 1:
        sums = [sum(sums[i : i + 2][1:], sums[i]) for i in range(0, len(sums), 2)]
    return sums[0]


def const_min(a: int, b: int) -> int:
    """min of two compile-time integers, out of the tracer's sight."""
    return min(a, b)


def store_words(address: Any, words: list[Any], dtype: Any, vector_bytes: int) -> None:
    """Store scalars of `dtype` side by side with the widest accesses."""
    registers = cute.make_rmem_tensor(len(words), dtype)
    for index, word in enumerate(words):
        registers[index] = word
    _tensor(address, dtype, len(words), vector_bytes).store(registers.load())


def scalar(address: Any, dtype: Any) -> Any:
    """The one-element tensor at `address`: `scalar(a, Int32)[0]` reads, assignment writes."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))


def group_sum(value: Any, lanes: int) -> Any:
    """Sum of an fp32 over aligned groups of `lanes` (a power of two ≤ 32), the same in all of them."""
    return _butterfly(value, lanes, lambda a, b: a + b)


def group_max(value: Any, lanes: int) -> Any:
    """Largest of a u32 over aligned groups of `lanes` (a power of two ≤ 32)."""
    return _butterfly(Uint32(value), lanes, max_u32)


def max_u32(a: Any, b: Any) -> Any:
    """The larger of two u32."""
    return cutlass.cutlass_dsl.max(a, b)


def max_of(a: Any, b: Any) -> Any:
    """The larger of two integers of one type."""
    return cutlass.cutlass_dsl.max(a, b)


def min_of(a: Any, b: Any) -> Any:
    """The smaller of two integers of one type."""
    return cutlass.cutlass_dsl.min(a, b)


def select(condition: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`; no branch."""
    if isinstance(condition, bool):
        return a if condition else b
    return cutlass.cutlass_dsl.select_(condition, a, b)


def row_of_thread(tiling: RowTiling) -> tuple[Any, Any]:
    """This thread's lane in its row, and its row, possibly beyond the last."""
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    lane = thread % tiling.threads_per_row
    if tiling.splits > 1:
        lane += block % tiling.splits * tiling.threads_per_row
        block = block // tiling.splits
    return lane, block * tiling.rows_per_block + thread // tiling.threads_per_row


def in_row(tiling: RowTiling, lane: Any, step: int) -> Any:
    """Whether a lane's vector number `step` lies in its row; True where that is known at compile time."""
    whole = (step + 1) * tiling.lanes <= tiling.row_vectors
    return whole or lane + step * tiling.lanes < tiling.row_vectors


def place(tiling: RowTiling, lane: Any, step: int) -> Any:
    """A lane's vector number `step`, counted in the row; the row's last one in place of any beyond it."""
    index = lane + step * tiling.lanes
    whole = (step + 1) * tiling.lanes <= tiling.row_vectors
    return index if whole else min_of(index, Int32(tiling.row_vectors - 1))


def square_sum(values: Any) -> Any:
    """Sum of squares of an fp32 vector."""
    return (values * values).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


def largest_magnitude(values: list[Any]) -> Any:
    """Bits of the largest |value| of fp32s as a u32, in which NaN > inf > every number."""
    largest = ptx.absolute(values[0])
    for value in values[1:]:
        largest = cute.arch.fmax(largest, ptx.absolute(value), nan=True)
    return ptx.bits(largest)


def _tensor(address: Any, dtype: Any, count: int, vector_bytes: int) -> Any:
    align = math.gcd(count * dtype.width // 8, vector_bytes)
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def _butterfly(value: Any, lanes: int, combine: Callable[[Any, Any], Any]) -> Any:
    offset = lanes // 2
    while offset:
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
        offset //= 2
    return value
