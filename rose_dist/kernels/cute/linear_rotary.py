"""Queries, keys and values of a decode step; what it computes: `rose_dist.kernels.linear_rotary`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.mxfp4_operands import load_shared
from rose_dist.kernels.cute.resident_weights import ResidentWeights, halves, rows_of_lane
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint8, Uint16, Uint32, cute, range_constexpr
from rose_dist.kernels.linear_shapes import LINEAR_OUTPUTS, resident
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import await_copies, commit_copies, copy_async

PAIRS = LINEAR_OUTPUTS // 2
"""Of outputs that rotate together, a block."""
BIAS, TURNS, SLOTS, ADDED = 0, 2, 6, 10
"""Where a lane of the writing warp has its words in shared memory: two of the bias; cosine and sine of each of two
rows; two slots of 8 bytes; and how many there are."""


@cache
def launcher(arch: Arch, inputs: int, head_dim: int) -> jit.Launcher:
    return jit.load(LinearRotary(arch, ResidentWeights(inputs, resident(inputs)), head_dim))


@dataclass(frozen=True)
class LinearRotary(jit.Kernel):
    """A block has 8 outputs of the first half of a head and those that rotate with them. It lets the next launch start
    at once, as `LinearAdd` does.
    """

    weights: ResidentWeights
    head_dim: int

    @property
    def shared_bytes(self) -> int:
        return self.weights.shared_bytes + ADDED * WARP * 4

    @property
    def blocks(self) -> int:
        """A head."""
        return self.head_dim // LINEAR_OUTPUTS

    @cute.jit
    def __call__(
        self, x: Int64, x_stride: Int64, weight: Int64, bias: Int64, cos: Int64, sin: Int64, slots: Int64, keys: Int64,
        values: Int64, cache_slot: Int64, cache_head: Int64, out: Int64, rows: Int32, query_heads: Int32,
        key_heads: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses, strides in elements: x bf16 [rows, inputs]; weight bf16 [heads · head_dim, inputs] and bias of all
        query, key and value heads; cos and sin fp32 [rows, head_dim / 2]; slots int64 [rows]; keys and values bf16
        [slots, key heads, head_dim]; out bf16 [rows, query heads, head_dim].
        """
        heads = query_heads + 2 * key_heads
        self.kernel(
            x, x_stride, weight, bias, cos, sin, slots, keys, values, cache_slot, cache_head, out, rows, query_heads,
            key_heads,
        ).launch(
            grid=[heads * self.blocks, 1, 1], block=[self.weights.threads, 1, 1],
            smem=self.shared_bytes, stream=stream, use_pdl=True,
            min_blocks_per_mp=self.weights.shape.per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int64, weight: Int64, bias: Int64, cos: Int64, sin: Int64, slots: Int64, keys: Int64,
        values: Int64, cache_slot: Int64, cache_head: Int64, out: Int64, rows: Int32, query_heads: Int32,
        key_heads: Int32,
    ) -> None:  # fmt: skip
        product = self.weights
        cute.arch.griddepcontrol_launch_dependents()
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        self.copy_added(shared, bias, cos, sin, slots, rows)
        held = self.fetch(shared, weight)
        cute.arch.griddepcontrol_wait()
        sums = product.multiply(held, shared, product.load_rows(x, x_stride, rows))
        await_copies(0)
        product.meet(shared, sums)
        if is_first_warp():
            self.write(shared, keys, values, cache_slot, cache_head, out, rows, query_heads, key_heads)

    def fetch(self, shared: Any, weight: Any) -> list[Any]:
        """Start all loads of weights; what `ResidentWeights.fetch` returns."""
        product, (head, place) = self.weights, self.of_lane(cute.arch.thread_idx()[0] % WARP)
        first = weight + Int64(head * self.head_dim + place) * (product.inputs * 2)
        return product.fetch(first, first + self.head_dim * product.inputs, shared)

    @cute.jit
    def copy_added(self, shared: Int32, bias: Int64, cos: Int64, sin: Int64, slots: Int64, rows: Int32) -> None:
        """Start copying what the writing warp needs at the end: far from any cache by now, it comes before the weights,
        or it would come last.
        """
        if is_first_warp():
            head, place = self.of_lane(cute.arch.thread_idx()[0] % WARP)
            for half in range_constexpr(2):
                # The word that this output's bias is in.
                source = bias + Int64(head * self.head_dim + place + half * (self.head_dim // 2)) // 2 * 4
                copy_async(self.word(shared, BIAS + half), source, 4, 4)
            self.copy_turns(shared, cos, sin, slots, place, rows)
        commit_copies()

    def of_lane(self, lane: Any) -> tuple[Any, Any]:
        """The head, and the place in its first half, of a lane's outputs."""
        block = cute.arch.block_idx()[0]
        return block // self.blocks, block % self.blocks * PAIRS + lane // 4

    def word(self, shared: Any, word: int) -> Any:
        """Where a lane of the writing warp keeps a word, or a pair of them from an even one on."""
        lane = cute.arch.thread_idx()[0] % WARP
        size = 8 if word >= SLOTS else 4
        return Int32(shared) + (self.weights.shared_bytes + word * WARP * 4) + lane * size

    def copy_turns(self, shared: Any, cos: Any, sin: Any, slots: Any, place: Any, rows: Any) -> None:
        for i, row in enumerate(rows_of_lane(cute.arch.thread_idx()[0] % WARP)):
            for j, table in enumerate((cos, sin)):
                source = table + (Int64(row) * (self.head_dim // 2) + place) * 4
                copy_async(self.word(shared, TURNS + 2 * i + j), source, Uint32(Boolean(row < rows)) * 4, 4)
            copy_async(self.word(shared, SLOTS + 2 * i), slots + Int64(row) * 8, Uint32(Boolean(row < rows)) * 8, 8)

    @cute.jit
    def write(
        self, shared: Int32, keys: Int64, values: Int64, cache_slot: Int64, cache_head: Int64, out: Int64, rows: Int32,
        query_heads: Int32, key_heads: Int32,
    ) -> None:  # fmt: skip
        """Rounded as a projection, rotated, and rounded again; values are only rounded."""
        # Not from the thread's number, or registers keep what was computed from it before.
        lane = cute.arch.lane_idx()
        head, place = self.of_lane(lane)
        is_query, is_value = head < query_heads, head >= query_heads + key_heads
        key_head = head - vector.select(is_value, query_heads + key_heads, query_heads)
        cache = vector.select(is_value, values, keys) + Int64(key_head) * cache_head * 2
        sums = self.weights.total(shared)
        bias = [self.bias(shared, half, place) for half in range(2)]
        for i, row in enumerate(rows_of_lane(lane)):
            rounded = ptx.to_bf16x2(sums[i] + bias[0], sums[2 + i] + bias[1])
            a, b = halves(rounded)
            c, s = [ptx.from_bits(load_shared(self.word(shared, TURNS + 2 * i + j), 1)[0]) for j in range(2)]
            turned = ptx.to_bf16x2(a * c - b * s, b * c + a * s)
            low, high = load_shared(self.word(shared, SLOTS + 2 * i), 2)
            slot = Int64(low) | (Int64(Int32(high)) << Int64(32))
            query = out + (Int64(row) * query_heads + head) * (self.head_dim * 2)
            target = vector.select(is_query, query, cache + slot * cache_slot * 2) + place * 2
            result = vector.select(is_value, rounded, turned)
            store_pair((row < rows) & (is_query | (slot >= 0)), target, target + self.head_dim, result)

    def bias(self, shared: Any, half: int, place: Any) -> Any:
        """Of this lane's output in a half of the head."""
        low, high = halves(load_shared(self.word(shared, BIAS + half), 1)[0])
        return vector.select(place % 2 == 0, low, high)


def is_first_warp() -> Any:
    """That is the one that writes."""
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP) == 0


@cute.jit
def store_pair(wanted: Boolean, first: Int64, second: Int64, word: Uint32) -> None:
    """The halves of a word to two addresses, where `wanted`."""
    if wanted:
        vector.scalar(first, Uint16)[0] = Uint16(word & Uint32(0xFFFF))
        vector.scalar(second, Uint16)[0] = Uint16(word >> Uint32(16))
