"""Kernels that measure and show the primitives themselves: grid barriers, and every `ptx` wrapper once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import jit, ptx, sync, vector
from rose_dist.kernels.cute.row_mover import RowMover, dynamic_shared
from rose_dist.kernels.dsl import Float32, Int32, Int64, Stream, Uint16, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_tiling import MoverTiling
from rose_dist.kernels.variants import WARP

BARRIER_STAGE = 1
UNROLL = 4
PEER_WAYS = ("stores", "loads", "bulk stores", "bulk loads")
"""Of `PeerCopies`."""
PEER_THREADS = 512
MOVES = MoverTiling(3584)


@dataclass(frozen=True)
class GridBarriers(jit.Kernel):
    """`repeats` grid barriers on `blocks` blocks; with `work`, each block adds its number to another slot before each.

    A slot so ends at the sum of what all wrote to it only if every barrier ordered all writes.
    """

    repeats: int
    threads: int = 128
    work: bool = True

    @cute.jit
    def __call__(
        self, counters: Int64, base: Uint32, slots: Int64, report: Int64, limit_ns: Int64, blocks: Int32, stream: Stream
    ) -> None:  # fmt: skip
        self.kernel(counters, base, slots, report, limit_ns).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, cooperative=True
        )

    @cute.kernel
    def kernel(self, counters: Int64, base: Uint32, slots: Int64, report: Int64, limit_ns: Int64) -> None:
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for i in range(self.repeats):
            if const_expr(self.work):
                if cute.arch.thread_idx()[0] == 0:
                    slot = slots + Int64((block + i) % blocks) * 4
                    before = ptx.load_relaxed(slot, "gpu")
                    ptx.store_relaxed(slot, before + Uint32(block + 1), "gpu")
            wanted = base + Uint32(blocks) * Uint32(i + 1)
            sync.grid_barrier(counters, wanted, limit_ns, report, Int32(0), BARRIER_STAGE)


@dataclass(frozen=True)
class Primitives(jit.Kernel):
    """Every wrapper of `ptx` once, to be read as PTX. `multicast` adds NVLink multicast; never launch it so here."""

    multicast: bool = False

    @cute.jit
    def __call__(self, flags: Int64, source: Int64, target: Int64, report: Int64, stream: Stream) -> None:
        self.kernel(flags, source, target, report).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, flags: Int64, source: Int64, target: Int64, report: Int64) -> None:
        offset = Int64(cute.arch.thread_idx()[0]) * 16
        ptx.store_16b(target + offset, ptx.load_once_16b(source + offset))
        ptx.store_16b(target + offset + 2048, ptx.load_16b(source + offset))
        sync.signal(flags, Uint32(1), "sys")
        sync.wait(flags, Uint32(1), "sys", Int64(sync.DEFAULT_LIMIT_NS), report, Int32(0), Int32(0), BARRIER_STAGE)
        for scope in range_constexpr(2):
            self.order(flags + 64 * (scope + 1), ("gpu", "sys")[scope])
        a, b = ptx.from_e4m3x2(ptx.to_e4m3x2(Float32(1.0), vector.scalar(source, Float32)[0]))
        vector.scalar(target, Float32)[0] = ptx.reciprocal(a + b)
        if const_expr(self.arch.blackwell):
            a, b = ptx.from_e2m1x2(ptx.to_e2m1x2(Float32(1.0), vector.scalar(source, Float32)[0]))
            vector.scalar(target + 4, Float32)[0] = a + b
        if const_expr(self.multicast):
            ptx.multimem_store_16b(target + offset, ptx.multimem_load_add_bf16x8(source + offset))
            ptx.multimem_add_release(flags + 256, Uint32(1))

    def order(self, flags: Any, scope: Any) -> Any:
        """All ordered accesses of one scope."""
        ptx.store_release(flags, ptx.load_acquire(flags, scope), scope)
        ptx.store_release_u64(flags + 8, ptx.load_acquire_u64(flags + 8, scope), scope)
        ptx.store_relaxed(flags + 16, ptx.load_relaxed(flags + 16, scope), scope)
        ptx.add_release(flags + 20, Uint32(1), scope)
        ptx.add_relaxed(flags + 24, Uint32(1), scope)
        ptx.fence(scope)
        before = ptx.fetch_add(flags + 28, Uint32(1), scope)
        ptx.compare_and_swap(flags + 32, before, Uint32(Uint16(3)), scope)


@dataclass(frozen=True)
class PeerCopies(jit.Kernel):
    """Copies rows of `MOVES.row_bytes` to or from another GPU, one of `PEER_WAYS`: by threads' own 16-byte accesses, or
    by bulk copies through shared memory; what is not said to be of the other GPU is of this one.
    """

    way: str

    @cute.jit
    def __call__(self, source: Int64, target: Int64, rows: Int32, blocks: Int32, stream: Stream) -> None:
        """Addresses: source and target u8 [rows, MOVES.row_bytes]."""
        self.kernel(source, target, rows).launch(
            grid=[blocks, 1, 1], block=[PEER_THREADS, 1, 1], smem=MOVES.shared_bytes, stream=stream, use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, source: Int64, target: Int64, rows: Int32) -> None:
        block, blocks, thread = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.way.startswith("bulk")):
            mover, shared = RowMover(MOVES), dynamic_shared()
            mover.set_up(shared)
            if thread // WARP < MOVES.warps:
                ring = mover.ring()
                for row in range(block * MOVES.warps + thread // WARP, rows, blocks * MOVES.warps):
                    at = Int64(row) * MOVES.row_bytes
                    mine = Int64(vector.select(thread % WARP == 0, target + at, Int64(0)))
                    mover.move(shared, ring, source + at, mine)
                mover.complete(shared, ring, ring[0][0])
        else:
            vectors = rows * (MOVES.row_bytes // 16)
            for first in range(block * PEER_THREADS * UNROLL + thread, vectors, blocks * PEER_THREADS * UNROLL):
                numbers = [vector.min_of(first + i * PEER_THREADS, vectors - 1) for i in range(UNROLL)]
                values = [ptx.load_16b(source + Int64(number) * 16) for number in numbers]
                for i in range_constexpr(UNROLL):
                    ptx.store_16b(target + Int64(numbers[i]) * 16, values[i])
