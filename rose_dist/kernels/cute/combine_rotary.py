"""MoE combine, residual and norm of one token, its queries, keys and values, in one launch; what it computes:
`rose_dist.kernels.combine_rotary`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.cute.linear_rotary import LinearRotary, is_first_warp
from rose_dist.kernels.cute.moe_combine import Combine
from rose_dist.kernels.cute.mxfp4_operands import load_shared
from rose_dist.kernels.cute.resident_weights import ResidentWeights, halves
from rose_dist.kernels.cute.shared_rows import widened
from rose_dist.kernels.dsl import Float32, Int32, Int64, Stream, Uint8, Uint32, cute, range_constexpr
from rose_dist.kernels.linear_shapes import resident_combining
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import await_copies, copy_async

WORD_BYTES, WORD = 4, 2
"""What a lane has of a row at a time: elements of so many bytes."""
RUN_WORDS = 16
"""Of 32 inputs."""


@cache
def launcher(arch: Arch, inputs: int, head_dim: int, top_k: int) -> jit.Launcher:
    return jit.load(CombineRotary.of(arch, inputs, head_dim, top_k))


@dataclass(frozen=True)
class CombineRotary(LinearRotary):
    """Every block sums and normalises the row for itself: a warp those of its columns that it multiplies. The row's sum
    of squares is added up in the order of `CombineNorm`, so that a row has the same bits in any batch.

    It lets the next launch start at once, as `LinearRotary` does; nothing but the experts' rows is read behind the
    wait. The first block writes the residual, elsewhere than it is read: others may still read it.
    """

    source: Combine

    @classmethod
    def of(cls, arch: Arch, inputs: int, head_dim: int, top_k: int) -> CombineRotary:
        bf16 = torch.bfloat16
        source = Combine(arch, top_k, inputs, bf16, bf16, None, False, WORD_BYTES)
        return cls(arch, ResidentWeights(inputs, resident_combining(inputs)), head_dim, source)

    @property
    def row_offset(self) -> int:
        return LinearRotary.shared_bytes.fget(self)  # type: ignore[attr-defined, no-any-return]

    @property
    def groups(self) -> int:
        """Of 32 vectors of 16 bytes, whose squares are added up together."""
        return -(-self.weights.inputs // 8 // WARP)

    @property
    def pair_offset(self) -> int:
        return self.row_offset + self.weights.inputs * 2 + -(-self.groups // 4) * 16

    @property
    def shared_bytes(self) -> int:
        return self.pair_offset + self.weights.shape.warps * self.source.top_k * 8

    @property
    def steps(self) -> int:
        """Words a lane."""
        return -(-self.weights.runs * RUN_WORDS // WARP)

    @cute.jit
    def __call__(
        self, results: Int64, result_stride: Int64, places: Int64, shares: Int64, residual: Int64, total: Int64,
        scale: Int64, weight: Int64, bias: Int64, cos: Int64, sin: Int64, slots: Int64, keys: Int64, values: Int64,
        cache_slot: Int64, cache_head: Int64, out: Int64, eps: Float32, query_heads: Int32, key_heads: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: results bf16 [.., inputs] with a stride in elements, of whose rows the token's are in places int32
        [top_k], −1 for none, with shares fp32 [top_k]; residual bf16 [inputs], and total, that with their sum, which is
        another; scale, of the norm, bf16 [inputs]. All else as for `LinearRotary`, of one row.
        """
        self.kernel(
            results, result_stride, places, shares, residual, total, scale, weight, bias, cos, sin, slots, keys,
            values, cache_slot, cache_head, out, eps, query_heads, key_heads,
        ).launch(
            grid=[(query_heads + 2 * key_heads) * self.blocks, 1, 1], block=[self.weights.threads, 1, 1],
            smem=self.shared_bytes, stream=stream, use_pdl=True,
            min_blocks_per_mp=self.weights.shape.per_sm, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, results: Int64, result_stride: Int64, places: Int64, shares: Int64, residual: Int64, total: Int64,
        scale: Int64, weight: Int64, bias: Int64, cos: Int64, sin: Int64, slots: Int64, keys: Int64, values: Int64,
        cache_slot: Int64, cache_head: Int64, out: Int64, eps: Float32, query_heads: Int32, key_heads: Int32,
    ) -> None:  # fmt: skip
        product, source = self.weights, self.source
        cute.arch.griddepcontrol_launch_dependents()
        shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=128).toint())
        self.copy_pairs(shared, places, shares)
        self.copy_added(shared, bias, cos, sin, slots, Int32(1))
        scales, before = self.load(scale + self.first_byte()), self.load(residual + self.first_byte())
        held = self.fetch(shared, weight)
        cute.arch.griddepcontrol_wait()
        pairs = self.pairs(shared)
        loaded = [
            self.load(source.place_of_row(results, result_stride, place, 0) + self.first_byte()) for place, _ in pairs
        ]
        new = []
        for i, old in enumerate(before):
            low, high = source.add([Float32(0.0)] * WORD, pairs, [halves(rows[i]) for rows in loaded])
            a, b = halves(ptx.to_bf16x2(low, high))
            c, d = halves(old)
            new.append(ptx.to_bf16x2(a + c, b + d))
        row = shared + self.row_offset
        self.put(row, new)
        if cute.arch.block_idx()[0] == 0:
            self.store(total, new)
        cute.arch.sync_threads()
        inverse = cute.math.rsqrt(self.squares(row) * Float32(1.0 / product.inputs) + eps)
        normed = []
        for value, factor in zip(new, scales, strict=True):
            (a, b), (c, d) = halves(value), halves(factor)
            normed.append(ptx.to_bf16x2(a * inverse * c, b * inverse * d))
        self.put(row, normed)
        cute.arch.sync_warp()
        at = row + Int32(product.inside())
        operands = (load_shared(at + i * 64, 4) for i in range(product.runs))
        sums = product.multiply(held, shared, operands)
        await_copies(0)
        product.meet(shared, sums)
        if is_first_warp():
            self.write(shared, keys, values, cache_slot, cache_head, out, Int32(1), query_heads, key_heads)

    def pair_place(self, shared: Any, j: Any) -> Any:
        """Where this warp keeps the place and, a word later, the share of the token's j-th expert. Loaded into
        registers, addresses would be computed from them before the loads of weights that are still to be issued.
        """
        warp = cute.arch.thread_idx()[0] // WARP
        return shared + self.pair_offset + (warp * self.source.top_k + j) * 8

    @cute.jit
    def copy_pairs(self, shared: Int32, places: Int64, shares: Int64) -> None:
        """Start copying them; they join the next group of copies."""
        lane = cute.arch.thread_idx()[0] % WARP
        if lane < self.source.top_k:
            at = self.pair_place(shared, lane)
            copy_async(at, places + Int64(lane) * 4, Uint32(4), 4)
            copy_async(at + 4, shares + Int64(lane) * 4, Uint32(4), 4)

    def pairs(self, shared: Any) -> list[Any]:
        """The place and the share of each of the token's experts."""
        await_copies(self.weights.runs - self.weights.held)
        cute.arch.sync_warp()
        words = [load_shared(self.pair_place(shared, j), 2) for j in range(self.source.top_k)]
        return [(Int32(place), ptx.from_bits(share)) for place, share in words]

    def first_byte(self) -> Any:
        """Where the first word of this lane's stands in a row."""
        thread = cute.arch.thread_idx()[0]
        return Int64(thread // WARP * (self.weights.runs * RUN_WORDS) + thread % WARP) * WORD_BYTES

    def behind(self, step: int) -> Any:
        """How many bytes further a word is; the last of this warp's columns in place of any beyond."""
        words, lane = self.weights.runs * RUN_WORDS, cute.arch.thread_idx()[0] % WARP
        if (step + 1) * WARP <= words:
            return step * WARP * WORD_BYTES
        return (vector.min_of(lane + step * WARP, Int32(words - 1)) - lane) * WORD_BYTES

    def load(self, first: Any) -> list[Any]:
        """This lane's words of a row in global memory."""
        return [vector.scalar(first + Int64(self.behind(i)), Uint32)[0] for i in range(self.steps)]

    def put(self, row: Any, words: list[Any]) -> None:
        """This lane's words into shared memory."""
        for i, word in enumerate(words):
            place = row + Int32(self.first_byte()) + self.behind(i)
            pointer = cute.make_ptr(Uint32, place, cute.AddressSpace.smem, assumed_align=4)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = word

    @cute.jit
    def store(self, row: Int64, words: list[Any]) -> None:
        for i in range_constexpr(self.steps):
            vector.scalar(row + self.first_byte() + Int64(self.behind(i)), Uint32)[0] = words[i]

    @cute.jit
    def squares(self, row: Int32) -> Float32:
        """The row's sum of squares, the same in all threads."""
        thread, vectors = cute.arch.thread_idx()[0], self.weights.inputs // 8
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        partials = row + self.weights.inputs * 2
        for first in range_constexpr(0, self.groups, self.weights.shape.warps):
            group = warp + first
            if group < self.groups:
                own = Float32(0.0)
                number = group * WARP + lane
                for value in widened(load_shared(row + vector.min_of(number, Int32(vectors - 1)) * 16, 4)):
                    own = own + value * value
                own = vector.group_sum(vector.select(number < vectors, own, Float32(0.0)), WARP)
                if lane == 0:
                    pointer = cute.make_ptr(Float32, partials + group * 4, cute.AddressSpace.smem, assumed_align=4)
                    cute.make_tensor(pointer, cute.make_layout(1))[0] = own
        cute.arch.sync_threads()
        return vector.sum_shared(partials, self.groups)
