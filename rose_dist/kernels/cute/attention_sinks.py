"""A pass that scales every head of every query; what it computes: `rose_dist.kernels.attention_sinks`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import TYPES, Float32, Int32, Int64, Stream, cute

THREADS = 256
TOKENS = 8
"""Of a block: their log-sum-exps are one 32-byte sector of a head's row."""


@cache
def launcher(arch: Arch, dtype: torch.dtype, heads: int, head_dim: int, vector_bytes: int) -> jit.Launcher:
    return jit.load(ApplySinks(arch, dtype, heads, head_dim, vector_bytes))


@dataclass(frozen=True)
class ApplySinks(jit.Kernel):
    """A vector a thread; a block takes some heads of 8 tokens."""

    dtype: torch.dtype
    heads: int
    head_dim: int
    vector_bytes: int

    @property
    def count(self) -> int:
        """Elements of a vector."""
        return self.vector_bytes // self.dtype.itemsize

    @property
    def lanes(self) -> int:
        """Threads a head."""
        return self.head_dim // self.count

    @property
    def block_heads(self) -> int:
        return THREADS // self.lanes // TOKENS

    @property
    def head_blocks(self) -> int:
        """Blocks that share 8 tokens."""
        return -(-self.heads // self.block_heads)

    @cute.jit
    def __call__(
        self, attended: Int64, lse: Int64, lse_head: Int64, sinks: Int64, out: Int64, factor: Float32, tokens: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        blocks = (tokens + (TOKENS - 1)) // TOKENS * self.head_blocks
        self.kernel(attended, lse, lse_head, sinks, out, factor, tokens).launch(
            grid=[blocks, 1, 1], block=[self.lanes * TOKENS * self.block_heads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, attended: Int64, lse: Int64, lse_head: Int64, sinks: Int64, out: Int64, factor: Float32, tokens: Int32
    ) -> None:  # fmt: skip
        dtype, count = TYPES[self.dtype], self.count
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        group = thread // self.lanes
        token = block // self.head_blocks * TOKENS + group % TOKENS
        head = block % self.head_blocks * self.block_heads + group // TOKENS
        ptx.exit_if(token >= tokens)
        ptx.exit_if(head >= self.heads)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        place = ((Int64(token) * self.heads + head) * self.lanes + thread % self.lanes) * self.vector_bytes
        values = vector.load(attended + place, dtype, count, self.vector_bytes)
        weight = vector.scalar(lse + (Int64(head) * lse_head + token) * 4, Float32)[0]
        sink = vector.scalar(sinks + Int64(head) * 4, Float32)[0]
        # Where the sink outweighs all keys the power is infinite and the share 0.
        power = cute.math.exp2((sink - weight) * Float32(1.0 / math.log(2.0)), fastmath=True)
        share = factor * cute.arch.rcp_approx(Float32(1.0) + power)
        vector.store(out + place, values.to(Float32) * share, dtype, count, self.vector_bytes)
