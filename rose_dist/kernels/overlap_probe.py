"""A kernel that measures how fast a Hopper SM carries out instructions, alone and beside tensor core products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import jit, vector
from rose_dist.kernels.cute.row_mover import dynamic_shared
from rose_dist.kernels.dsl import (
    Float32,
    Int32,
    Int64,
    Stream,
    T,
    Uint32,
    Uint64,
    const_expr,
    cute,
    dsl_user_op,
    range_constexpr,
)  # fmt: skip
from rose_dist.kernels.inline_asm import asm
from rose_dist.kernels.warpgroup_matrix import (
    await_products,
    commit_products,
    descriptor,
    fence_products,
    multiply_add_e4m3_async,
)

WARPGROUPS = 3
WARPGROUP_THREADS = 128
INSTRUCTIONS = 48
"""Of a warp, in a turn of its loop."""
CHAINS = 8
CELLS = 2
"""Of 8 rows of the right operand, one behind the other: 32 of e4m3 in depth."""
SHARED_BYTES = 16384
WORKS = {
    "lop3": "lop3.b32 $0, $1, $2, $3, 0xE8;",
    "prmt": "prmt.b32 $0, $1, $2, $3;",
    "shf": "shf.r.wrap.b32 $0, $1, $2, 5;",
    "max": "max.s32 $0, $1, $2;",
    "mad": "mad.lo.u32 $0, $1, $2, $3;",
    "dp4a": "dp4a.u32.u32 $0, $1, $2, $3;",
    "dp2a": "dp2a.lo.u32.u32 $0, $1, $2, $3;",
    "fma": "{ .reg .f32 a, b, c; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; fma.rn.f32 a, a, b, c; mov.b32 $0, a; }",
    "ex2": "{ .reg .f32 a; mov.b32 a, $1; ex2.approx.ftz.f32 a, a; mov.b32 $0, a; }",
    "lds64": "{ .reg .b32 b; ld.volatile.shared.v2.b32 {$0, b}, [$4]; }",
}


@dsl_user_op
def work(text: str, a: Any, b: Any, c: Any, address: Any, *, loc: Any = None, ip: Any = None) -> Any:
    operands = [Uint32(value) for value in (a, b, c, address)]
    return Uint32(asm(text, "=r,r,r,r,r", T.i32(), *operands, loc=loc, ip=ip))


@dsl_user_op
def clock(*, loc: Any = None, ip: Any = None) -> Any:
    """Of this SM, in cycles (u64)."""
    return Uint64(asm("mov.u64 $0, %clock64;", "=l", T.i64(), loc=loc, ip=ip))


@dataclass(frozen=True)
class Overlap(jit.Kernel):
    """Three warpgroups a block, of which the first `multiplying` start two products of 64 by `width` by 32 a turn, as
    an expert GEMM does for a scale block; `work` is done by the others, or by `both` kinds.
    """

    work: str
    width: int
    multiplying: int
    both: bool

    @cute.jit
    def __call__(self, ticks: Int64, turns: Int32, blocks: Int32, stream: Stream) -> None:
        """ticks: address of u64 [blocks, WARPGROUPS], cycles that each took."""
        self.kernel(ticks, turns).launch(
            grid=[blocks, 1, 1], block=[WARPGROUPS * WARPGROUP_THREADS, 1, 1], smem=SHARED_BYTES, stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, ticks: Int64, turns: Int32) -> None:
        thread, shared = cute.arch.thread_idx()[0], dynamic_shared()
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        values = cute.make_rmem_tensor(CHAINS, Uint32)
        for i in range_constexpr(CHAINS):
            values[i] = Uint32(thread * 0x01010101 + i)
        sums = cute.make_rmem_tensor(self.width, Float32)
        sums.fill(0.0)
        address = shared + thread % 32 // 4 * 8
        cute.arch.sync_threads()
        begun = clock()
        if warpgroup < self.multiplying:
            for _ in range(turns):
                self.multiply(shared, sums)
                if const_expr(self.both):
                    self.do_work(values, address)
                await_products(1)
            await_products(0)
        else:
            for _ in range(turns):
                self.do_work(values, address)
        taken = clock() - begun
        if thread % WARPGROUP_THREADS == 0:
            vector.scalar(ticks + Int64(cute.arch.block_idx()[0] * WARPGROUPS + warpgroup) * 8, Uint64)[0] = taken
        kept = Uint32(0)
        for i in range_constexpr(CHAINS):
            kept |= values[i]
        for i in range_constexpr(self.width):
            kept |= Uint32(Int32(sums[i]))
        if kept == Uint32(0x12345678):  # so that nothing is left out
            vector.scalar(ticks, Uint32)[0] = kept

    def multiply(self, shared: Any, sums: Any) -> None:
        """Start a turn's products."""
        fence_products()
        for half in range(2):
            own = [half * (self.width // 2) + i for i in range(self.width // 2)]
            left = [Uint32(0x38383838)] * 4
            total = multiply_add_e4m3_async([sums[i] for i in own], left, descriptor(shared, 8), CELLS)
            for i, value in zip(own, total, strict=True):
                sums[i] = value
        commit_products()

    def do_work(self, values: Any, address: Any) -> None:
        """A turn's instructions, each chain waiting for itself alone."""
        if not self.work:
            return
        for i in range(INSTRUCTIONS):
            at = i % CHAINS
            values[at] = work(
                WORKS[self.work], values[at], values[(at + 3) % CHAINS], values[(at + 6) % CHAINS], address
            )
