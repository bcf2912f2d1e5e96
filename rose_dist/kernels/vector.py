"""Vectors of consecutive elements in global memory, and reductions over groups of lanes.

Plain functions that run while a kernel is traced. Addresses are `Int64`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rose_dist.kernels import ptx
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import Float32, Uint32, cute


def widest(arch: Arch, row_bytes: int, *addresses: int) -> int:
    """Bytes of the widest access (a power of two ≤ `arch.vector_bytes`) that rows and base addresses allow."""
    return math.gcd(arch.vector_bytes, row_bytes, *addresses)


def load(address: Any, dtype: Any, count: int, vector_bytes: int) -> Any:
    """`count` elements at `address` as a register vector; the address is a multiple of the access width."""
    return _tensor(address, dtype, count, vector_bytes).load()


def store(address: Any, values: Any, dtype: Any, count: int, vector_bytes: int) -> None:
    """Store a register vector of `count` values, converted to `dtype`."""
    _tensor(address, dtype, count, vector_bytes).store(values.to(dtype))


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
    return Uint32(cute.arch.inline_ptx("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]))


def square_sum(values: Any) -> Any:
    """Sum of squares of an fp32 vector."""
    return (values * values).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


def largest_magnitude(values: list[Any]) -> Any:
    """Bits of the largest |value| of fp32s as a u32, in which NaN > inf > every number."""
    largest = ptx.bits(values[0]) & Uint32(0x7FFFFFFF)
    for value in values[1:]:
        largest = max_u32(largest, ptx.bits(value) & Uint32(0x7FFFFFFF))
    return largest




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
