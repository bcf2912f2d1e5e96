"""QK norm, rotary embedding and the cache write in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import (
    TYPES,
    Boolean,
    Float32,
    Int32,
    Int64,
    Stream,
    Uint16,
    const_expr,
    cute,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.qk_norm import Rotary

THREADS = 128


@cache
def launcher(
    arch: Arch, dtype: torch.dtype, table_dtype: torch.dtype, query_heads: int, key_heads: int, head_dim: int,
    vector_bytes: int, norm: bool, rotary: Rotary, rotary_dim: int, cache: torch.dtype | None,
    heads_each: int,
) -> jit.Launcher:  # fmt: skip
    heads = (query_heads, key_heads, head_dim)
    return jit.load(
        QKNormRope(arch, dtype, table_dtype, *heads, vector_bytes, norm, rotary, rotary_dim, cache, heads_each)
    )


@dataclass(frozen=True)
class QKNormRope(jit.Kernel):
    """A few lanes a head, several heads a warp. A lane owns the same place in both halves of its head, or of that part
    of it that is rotated, so that NeoX pairs meet in its registers and only the sum of squares crosses lanes. Lanes
    beyond own two neighbouring vectors."""

    dtype: torch.dtype
    table_dtype: torch.dtype
    query_heads: int
    key_heads: int
    head_dim: int
    vector_bytes: int
    norm: bool
    rotary: Rotary
    rotary_dim: int
    """Elements of a head, from the first on, that are rotated."""
    cache: torch.dtype | None
    """The cache's dtype: that of q, or e4m3; None: no cache."""
    heads_each: int
    """Neighbouring heads, all of q, of k or of v, that a group of lanes takes."""

    @property
    def count(self) -> int:
        """Elements of a vector."""
        return self.vector_bytes // self.dtype.itemsize

    @property
    def lanes(self) -> int:
        """Lanes a head."""
        return self.head_dim // (2 * self.count)

    @property
    def rotating_lanes(self) -> int:
        return self.rotary_dim // (2 * self.count)

    @property
    def cache_bytes(self) -> int:
        """Of an element of the cache."""
        return (self.cache or self.dtype).itemsize

    @cute.jit
    def __call__(
        self, q: Int64, q_token: Int64, q_head: Int64, k: Int64, k_token: Int64, k_head: Int64, v: Int64,
        v_token: Int64, v_head: Int64, q_weight: Int64, k_weight: Int64, cos: Int64, sin: Int64, table_row: Int64,
        positions: Int64, slots: Int64, keys: Int64, values: Int64, cache_block: Int64, cache_slot: Int64,
        cache_head: Int64, block_shift: Int32, key_factor: Float32, value_factor: Float32, items: Int32, eps: Float32,
        stream: Stream,
    ) -> None:  # fmt: skip
        heads_per_block = THREADS // self.lanes
        self.kernel(
            q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, q_weight, k_weight, cos, sin, table_row,
            positions, slots, keys, values, cache_block, cache_slot, cache_head, block_shift, key_factor, value_factor,
            items, eps,
        ).launch(
            grid=[(items + (heads_per_block - 1)) // heads_per_block, 1, 1], block=[THREADS, 1, 1], stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: Int64, q_token: Int64, q_head: Int64, k: Int64, k_token: Int64, k_head: Int64, v: Int64,
        v_token: Int64, v_head: Int64, q_weight: Int64, k_weight: Int64, cos: Int64, sin: Int64, table_row: Int64,
        positions: Int64, slots: Int64, keys: Int64, values: Int64, cache_block: Int64, cache_slot: Int64,
        cache_head: Int64, block_shift: Int32, key_factor: Float32, value_factor: Float32, items: Int32, eps: Float32,
    ) -> None:  # fmt: skip
        width, each = self.dtype.itemsize, self.heads_each
        groups = (self.query_heads + self.key_heads * (2 if self.cache else 1)) // each
        thread = cute.arch.thread_idx()[0]
        lane = thread % self.lanes
        item = cute.arch.block_idx()[0] * (THREADS // self.lanes) + thread // self.lanes
        ptx.exit_if(item >= items)
        token, head = item // groups, item % groups * each
        is_query = head < self.query_heads
        is_value = head >= self.query_heads + self.key_heads
        key_head = vector.select(is_value, head - self.query_heads - self.key_heads, head - self.query_heads)
        base = vector.select(is_query, q + Int64(token) * q_token * width, k + Int64(token) * k_token * width)
        stride = vector.select(is_query, q_head, k_head)
        if const_expr(self.cache is not None):
            base = vector.select(is_value, v + Int64(token) * v_token * width, base)
            stride = vector.select(is_value, v_head, stride)
        place_in_head, gap = self.places(lane)
        source = base + (Int64(vector.select(is_query, head, key_head)) * stride + place_in_head) * width
        weight = vector.select(is_query, q_weight, k_weight) + place_in_head * width
        weights = self.load_halves(weight, gap) if self.norm else None
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        # What other addresses hang on comes first.
        table, slot = Int64(token), Int64(0)
        if const_expr(self.cache is not None):
            if positions != 0:
                table = vector.scalar(positions + Int64(token) * 8, Int64)[0]
            slot = vector.scalar(slots + Int64(token) * 8, Int64)[0]
        raw = [self.load_halves(source + Int64(i) * stride * width, gap) for i in range(each)]
        turns = self.load_turns(cos, sin, table * table_row, lane) if self.rotary is not Rotary.NONE else None
        target, target_step, factor = source, stride * width, Float32(1.0)
        if const_expr(self.cache is not None):
            place = (slot >> Int64(block_shift)) * cache_block + Int64(key_head) * cache_head
            place += (slot & ((Int64(1) << Int64(block_shift)) - 1)) * cache_slot
            stored = vector.select(is_value, values, keys) + place * self.cache_bytes
            stored += place_in_head * self.cache_bytes
            target = vector.select(is_query, source, stored)
            target_step = vector.select(is_query, target_step, cache_head * self.cache_bytes)
            factor = vector.select(is_value, value_factor, key_factor)
            slot = vector.select(is_query, Int64(0), slot)
        for i in range_constexpr(each):
            self.finish(
                raw[i], weights, turns, target + Int64(i) * target_step, gap, is_query, is_value, slot >= 0, factor, eps
            )

    @cute.jit
    def finish(
        self, raw: list[Any], weights: list[Any], turns: list[Any], target: Int64, gap: Int64,
        is_query: Boolean, is_value: Boolean, wanted: Boolean, factor: Float32, eps: Float32,
    ) -> None:  # fmt: skip
        """Norm, rotate and store one head; values are neither normed nor rotated."""
        parts = [raw[0].to(Float32), raw[1].to(Float32)]
        if const_expr(self.norm):
            parts = self.normalise(parts, weights, eps)
        if const_expr(self.rotary is not Rotary.NONE):
            parts = self.rotate(parts, turns)
        if wanted:
            if const_expr(self.cache is None):
                self.write(target, gap, parts)
            elif const_expr(self.cache is self.dtype):
                if is_value:
                    self.write(target, gap, raw)
                else:
                    self.write(target, gap, parts)
            elif is_query:
                self.write(target, gap, parts)
            elif is_value:
                self.write_fp8(target, gap, [half.to(Float32) for half in raw], factor)
            else:
                self.write_fp8(target, gap, parts, factor)

    def places(self, lane: Any) -> tuple[Any, Any]:
        """Where in the head this lane's first vector stands, and how far behind it its second."""
        first, gap = Int64(lane * self.count), Int64(self.rotary_dim // 2)
        if self.rotary_dim < self.head_dim:
            beyond = lane >= self.rotating_lanes
            rest = Int64(self.rotary_dim + (lane - self.rotating_lanes) * (2 * self.count))
            first, gap = vector.select(beyond, rest, first), vector.select(beyond, Int64(self.count), gap)
        return first, gap

    def load_halves(self, address: Any, gap: Any) -> Any:
        """This lane's two vectors of a head."""
        addresses = (address, address + gap * self.dtype.itemsize)
        return [vector.load(one, TYPES[self.dtype], self.count, self.vector_bytes) for one in addresses]

    def normalise(self, parts: Any, weights: Any, eps: Any) -> Any:
        """Both halves over the head's root mean square, times the weight."""
        squares = vector.group_sum(vector.square_sum(parts[0]) + vector.square_sum(parts[1]), self.lanes)
        inverse = cute.math.rsqrt(squares * Float32(1.0 / self.head_dim) + eps)
        return [part * inverse * w.to(Float32) for part, w in zip(parts, weights, strict=True)]

    def load_turns(self, cos: Any, sin: Any, row: Any, lane: Any) -> Any:
        """(cosines, sines) for this lane's pairs: one such of whole vectors, or one of half vectors for each half."""
        if self.rotary is Rotary.NEOX:
            return [self.angles(cos, sin, row, lane, 0, self.count)]
        return [self.angles(cos, sin, row, lane, first, self.count // 2) for first in (0, self.rotary_dim // 4)]

    def angles(self, cos: Any, sin: Any, row: Any, lane: Any, first: int, count: int) -> Any:
        """`count` elements of both tables' row, fp32; no rotation for lanes beyond the part that is."""
        last = Int32(self.rotating_lanes - 1)
        offset = (row + Int64(vector.min_of(lane, last) * count + first)) * self.table_dtype.itemsize
        turns = []
        for table, neutral in ((cos, 1.0), (sin, 0.0)):
            loaded = vector.load(table + offset, TYPES[self.table_dtype], count, self.vector_bytes).to(Float32)
            if self.rotary_dim < self.head_dim:
                chosen = cute.make_rmem_tensor(count, Float32)
                for i in range(count):
                    chosen[i] = Float32(vector.select(lane <= last, loaded[i], Float32(neutral)))
                loaded = chosen.load()
            turns.append(loaded)
        return turns

    def rotate(self, parts: Any, turns: Any) -> Any:
        """Both vectors rotated."""
        if self.rotary is Rotary.NEOX:
            c, s = turns[0]
            a, b = parts
            return [a * c - b * s, b * c + a * s]
        rotated = []
        for part, (c, s) in zip(parts, turns, strict=True):
            registers = cute.make_rmem_tensor(self.count, Float32)
            for i in range(self.count // 2):
                a, b = part[2 * i], part[2 * i + 1]
                registers[2 * i] = a * c[i] - b * s[i]
                registers[2 * i + 1] = b * c[i] + a * s[i]
            rotated.append(registers.load())
        return rotated

    def write(self, address: Any, gap: Any, parts: Any) -> Any:
        """Store both vectors of a head, rounded."""
        for part, one in zip(parts, (address, address + gap * self.dtype.itemsize), strict=True):
            vector.store(one, part, TYPES[self.dtype], self.count, self.vector_bytes)

    def write_fp8(self, address: Any, gap: Any, parts: Any, factor: Any) -> Any:
        """Store both vectors of a head times `factor` as e4m3, saturated."""
        for part, one in zip(parts, (address, address + gap), strict=True):
            scaled = part * factor
            pairs = [ptx.to_e4m3x2(scaled[k], scaled[k + 1]) for k in range(0, self.count, 2)]
            vector.store_words(one, pairs, Uint16, self.count)
