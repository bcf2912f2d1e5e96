"""One token from the experts' results to its queries, keys and values; what it computes: `kernels.combine_rotary`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.linear_rotary import LinearRotary
from rose_dist.kernels.cute.look_ahead import look_ahead
from rose_dist.kernels.cute.moe_combine import VECTOR_BYTES, Combine
from rose_dist.kernels.cute.mxfp4_operands import load_shared, store_shared
from rose_dist.kernels.cute.resident_weights import ResidentWeights
from rose_dist.kernels.cute.shared_rows import widened
from rose_dist.kernels.dsl import (
    BFloat16,
    Boolean,
    Float32,
    Int32,
    Int64,
    Stream,
    Uint8,
    Uint32,
    cute,
    cutlass,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.linear_shapes import resident_combining
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import await_copies, commit_copies, copy_async


@cache
def launcher(arch: Arch, hidden: int, head_dim: int, top_k: int) -> jit.Launcher:
    return jit.load(CombineRotary.of(arch, hidden, head_dim, top_k))


@dataclass(frozen=True)
class CombineRotary(jit.Kernel):
    """As `CombineNorm` and `LinearRotary`, to the bit. Every block adds up the experts' rows and normalises for itself,
    which is 30 KB from L2 and no launch between; so this is for one token.

    The launch before must have waited for those before it: then only the experts' rows are not there yet when this one
    begins, and nothing else is read behind the wait.
    """

    projection: LinearRotary
    source: Combine

    @classmethod
    def of(cls, arch: Arch, hidden: int, head_dim: int, top_k: int) -> CombineRotary:
        weights = ResidentWeights(hidden, resident_combining(hidden))
        source = Combine(arch, top_k, hidden, torch.bfloat16, torch.bfloat16, None, False, VECTOR_BYTES)
        return cls(arch, LinearRotary(arch, weights, head_dim), source)

    @property
    def weights(self) -> ResidentWeights:
        return self.projection.weights

    @property
    def steps(self) -> int:
        """Vectors of the row a thread."""
        return -(-self.source.vectors // self.weights.threads)

    @property
    def groups(self) -> int:
        """Of 32 vectors, each with a sum of squares."""
        return -(-self.source.vectors // WARP)

    @property
    def row_offset(self) -> int:
        """In shared memory: the residual, and in its place the new one and the normalised row."""
        return self.projection.shared_bytes

    @property
    def staged_offset(self) -> int:
        """The experts' vectors for which a thread has no registers: of all steps but the first."""
        return self.row_offset + self.source.hidden * 2

    @property
    def squares_offset(self) -> int:
        left = max(self.source.vectors - self.weights.threads, 0)
        return self.staged_offset + left * self.source.top_k * VECTOR_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.squares_offset + self.groups * 4

    @cute.jit
    def __call__(
        self, expert_rows: Int64, row_stride: Int64, places: Int64, shares: Int64, residual: Int64, total: Int64,
        scale: Int64, weight: Int64, bias: Int64, cos: Int64, sin: Int64, slots: Int64, keys: Int64, values: Int64,
        cache_slot: Int64, cache_head: Int64, out: Int64, ahead: Int64, ahead_bytes: Int64, query_heads: Int32,
        key_heads: Int32, eps: Float32, stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: expert_rows, row_stride, places and shares as a `Combine`'s rows, slots and weights of one token;
        residual, total, which must be another place, and scale bf16 [hidden]; the others as for `LinearRotary`.
        """
        heads = query_heads + 2 * key_heads
        self.kernel(
            expert_rows, row_stride, places, shares, residual, total, scale, weight, bias, cos, sin, slots, keys,
            values, cache_slot, cache_head, out, ahead, ahead_bytes, query_heads, key_heads, eps,
        ).launch(
            grid=[heads * self.projection.blocks, 1, 1], block=[self.weights.threads, 1, 1], smem=self.shared_bytes,
            stream=stream, use_pdl=True, min_blocks_per_mp=self.weights.shape.per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, expert_rows: Int64, row_stride: Int64, places: Int64, shares: Int64, residual: Int64, total: Int64,
        scale: Int64, weight: Int64, bias: Int64, cos: Int64, sin: Int64, slots: Int64, keys: Int64, values: Int64,
        cache_slot: Int64, cache_head: Int64, out: Int64, ahead: Int64, ahead_bytes: Int64, query_heads: Int32,
        key_heads: Int32, eps: Float32,
    ) -> None:  # fmt: skip
        projection, product, source = self.projection, self.weights, self.source
        cute.arch.griddepcontrol_launch_dependents()
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        writes = warp == 0
        if writes:
            projection.copy_words(shared, bias, cos, sin, slots, Int32(1))
        for step in range_constexpr(self.steps):
            self.fetch(shared, step, residual)
        commit_copies()
        held = product.fetch(*projection.weight_rows(weight), shared)
        pairs = [source.pair(places, shares, j) for j in range(source.top_k)]
        scales = [ptx.load_early_16b(scale + Int64(self.place_of(step))) for step in range(self.steps)]
        cute.arch.griddepcontrol_wait()
        loaded = [self.source.load_row(expert_rows, row_stride, slot, self.column(0)) for slot, _ in pairs]
        for step in range_constexpr(1, self.steps):
            self.stage(shared, step, expert_rows, row_stride, pairs)
        commit_copies()
        await_copies(0)
        for step in range_constexpr(self.steps):
            self.renew(shared, step, pairs, loaded)
        cute.arch.sync_threads()
        inverse = cute.math.rsqrt(self.square_sum(shared) * Float32(1.0 / source.hidden) + eps)
        for step in range_constexpr(self.steps):
            self.normalise(shared, step, inverse, scales[step], total)
        if warp == product.shape.warps - 1:
            # Not before: what comes from memory would come before the experts' rows, which are in L2.
            look_ahead(ahead, ahead_bytes)
        cute.arch.sync_threads()
        at = shared + self.row_offset + Int32(product.inside())
        sums = product.multiply(held, shared, (load_shared(at + i * 64, 4) for i in range(product.runs)))
        product.meet(shared, sums)
        if writes:
            projection.write(shared, keys, values, cache_slot, cache_head, out, Int32(1), query_heads, key_heads)

    def place_of(self, step: int) -> Any:
        """Bytes from the start of a row to the vector that this thread takes in a step; to the last one in place of any
        beyond.
        """
        number = cute.arch.thread_idx()[0] + step * self.weights.threads
        return vector.min_of(number, Int32(self.source.vectors - 1)) * VECTOR_BYTES

    def column(self, step: int) -> Any:
        return self.place_of(step) // self.source.dtype.itemsize

    def there(self, step: int) -> Any:
        """Whether there is such a vector."""
        return Boolean(cute.arch.thread_idx()[0] + step * self.weights.threads < self.source.vectors)

    def own(self, shared: Any, step: int) -> Any:
        """Where this thread's vector of the row is in shared memory."""
        return shared + self.row_offset + self.place_of(step)

    def staged(self, shared: Any, step: int, j: int) -> Any:
        """Where this thread's vector of the j-th expert is, of a step behind the first."""
        number = cute.arch.thread_idx()[0] + (step - 1) * self.weights.threads
        return shared + self.staged_offset + (number * self.source.top_k + j) * VECTOR_BYTES

    @cute.jit
    def fetch(self, shared: Int32, step: cutlass.Constexpr, residual: Int64) -> None:
        """Start copying this thread's vector of the residual."""
        if self.there(step):
            place = residual + Int64(self.place_of(step))
            copy_async(self.own(shared, step), place, Uint32(VECTOR_BYTES), VECTOR_BYTES)

    @cute.jit
    def stage(
        self, shared: Int32, step: cutlass.Constexpr, rows: Int64, row_stride: Int64, pairs: list[list[Any]]
    ) -> None:  # fmt: skip
        """Start copying this thread's vectors of the experts' rows."""
        if self.there(step):
            for j in range_constexpr(self.source.top_k):
                place = self.source.place_of_row(rows, row_stride, pairs[j][0], self.column(step))
                copy_async(self.staged(shared, step, j), place, Uint32(VECTOR_BYTES), VECTOR_BYTES)

    @cute.jit
    def renew(
        self, shared: Int32, step: cutlass.Constexpr, pairs: list[list[Any]], loaded: list[list[Float32]]
    ) -> None:  # fmt: skip
        """Put this thread's vector of the new residual in the place of the old one's, and its group's sum of squares,
        added up as `CombineNorm` does it.
        """
        squares = Float32(0.0)
        if self.there(step):
            new = self.new_vector(shared, step, pairs, loaded)
            store_shared(self.own(shared, step), packed(new))
            for value in new:
                squares = squares + value * value
        squares, sums = vector.group_sum(squares, WARP), self.squares(shared)
        group = cute.arch.thread_idx()[0] // WARP + step * self.weights.shape.warps
        if (cute.arch.thread_idx()[0] % WARP == 0) & (group < self.groups):
            sums[group] = squares

    def new_vector(self, shared: Any, step: int, pairs: Any, loaded: Any) -> list[Any]:
        if step > 0:
            count = self.source.top_k
            loaded = [widened(load_shared(self.staged(shared, step, j), 4)) for j in range(count)]
        summed = self.source.add([Float32(0.0)] * self.source.count, pairs, loaded)
        before = widened(load_shared(self.own(shared, step), 4))
        return [rounded(rounded(a) + b) for a, b in zip(summed, before, strict=True)]

    @cute.jit
    def square_sum(self, shared: Int32) -> Float32:
        """Of the new row, the same in all threads."""
        lane, squares = cute.arch.thread_idx()[0] % WARP, Float32(0.0)
        if lane < self.groups:
            squares = self.squares(shared)[lane]
        return vector.group_sum(squares, WARP)

    def squares(self, shared: Any) -> Any:
        pointer = cute.make_ptr(Float32, shared + self.squares_offset, cute.AddressSpace.smem, assumed_align=4)
        return cute.make_tensor(pointer, cute.make_layout(self.groups))

    @cute.jit
    def normalise(
        self, shared: Int32, step: cutlass.Constexpr, inverse: Float32, scales: list[Uint32], total: Int64
    ) -> None:  # fmt: skip
        """Of the row in shared memory, this thread's vector; one block writes what it was."""
        if self.there(step):
            words = load_shared(self.own(shared, step), 4)
            if cute.arch.block_idx()[0] == 0:
                vector.store_words(total + Int64(self.place_of(step)), words, Uint32, VECTOR_BYTES)
            pairs = zip(widened(words), widened(scales), strict=True)
            store_shared(self.own(shared, step), packed([value * inverse * factor for value, factor in pairs]))


def rounded(value: Any) -> Any:
    return Float32(Float32(value).to(BFloat16))


def packed(values: list[Any]) -> list[Any]:
    """Eight fp32 as four words of bf16, which are stored as fp32."""
    return [ptx.from_bits(ptx.to_bf16x2(*values[j : j + 2])) for j in range(0, len(values), 2)]
