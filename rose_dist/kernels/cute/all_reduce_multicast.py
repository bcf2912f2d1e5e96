"""All-reduce through NVLink's switches (NVLink SHARP): they add on the way, so every byte crosses each link once.

Compiled, and run by the interpreter with an emulated multicast object. It has never run on a GPU: multicast must not be
used on shared hosts. The switch adds in fp32 in an order of its own and rounds once; every rank gets the same bits,
because each element is added for one rank and sent to all.

Region, in every rank's symmetric memory and in one multicast object: staging [bytes], results [bytes], then counters
u32 [2 stages, MAX_BLOCKS], which must be 0 before the first use (`peer_regions.multicast_bytes`).
Counter [stage][block]: every rank's same block adds one (release, system scope, multicast) when it has written its part
of staging, or its slice's part of the results; thread 0 of the block reads its own copy (acquire) until all have. It
publishes that part of every rank. How often block b has met is kept in `uses`; counters are never reset. Reuse is
safe for the same reasons as in `all_reduce_two_shot`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import jit, ptx, sync, vector
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, cute, cutlass, range_constexpr
from rose_dist.kernels.peer_regions import MAX_BLOCKS, MULTICAST_ADD_STAGE, MULTICAST_TAKE_STAGE

VECTOR_BYTES = 16


@dataclass(frozen=True)
class Multicast(jit.Kernel):
    """bf16. The grid must be co-resident and of one size on all ranks, at most `MAX_BLOCKS`."""

    ranks: int
    threads: int = 512

    @cute.jit
    def __call__(
        self, x: Int64, live_rows: Int64, out: Int64, row_vectors: Int32, own: Int64, multi: Int64, size: Int64,
        uses: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32, blocks: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: x and out [rows, row_vectors · 16 bytes], live_rows int32 [1] or 0, own: this rank's region,
        multi: the multicast object's, made for `size` bytes; uses: u32 [MAX_BLOCKS] in local memory, 0 at first.
        """
        self.kernel(
            x, live_rows, out, row_vectors, own, multi, size, uses, report, limit_ns, rank, rows
        ).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True)  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, live_rows: Int64, out: Int64, row_vectors: Int32, own: Int64, multi: Int64, size: Int64,
        uses: Int64, report: Int64, limit_ns: Int64, rank: Int32, rows: Int32,
    ) -> None:  # fmt: skip
        thread, block, blocks = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live = vector.live_rows(live_rows, rows)
        ptx.exit_if(live == 0)  # no exchange, so none is counted
        vectors = live * row_vectors
        share = (vectors + (self.ranks - 1)) // self.ranks
        part = (share + (blocks - 1)) // blocks
        begin = block * part + thread
        end = vector.min_of((block + 1) * part, share)
        results, counter = size, 2 * size + Int64(block) * 4
        met = uses + Int64(block) * 4
        wanted = (ptx.load_relaxed(met, "gpu") + Uint32(1)) * Uint32(self.ranks)
        self.copy(x, own, share, vectors, begin, end)
        there = self.meet(
            own + counter, multi + counter, wanted, Boolean(True), limit_ns, report, rank, MULTICAST_ADD_STAGE
        )
        first = Int64(rank) * share
        stop = vector.min_of(end, vectors - rank * share)
        for at in cutlass.range(begin, stop, self.threads, unroll=2):
            offset = (first + at) * VECTOR_BYTES
            ptx.multimem_store_16b(multi + results + offset, ptx.multimem_load_add_bf16x8(multi + offset))
        counter += MAX_BLOCKS * 4
        self.meet(own + counter, multi + counter, wanted, there, limit_ns, report, rank, MULTICAST_TAKE_STAGE)
        self.copy(own + results, out, share, vectors, begin, end)
        cute.arch.sync_threads()
        if thread == 0:
            ptx.add_relaxed(met, Uint32(1), "gpu")

    @cute.jit
    def copy(self, source: Int64, target: Int64, share: Int32, vectors: Int32, begin: Int32, end: Int32) -> None:
        """This block's part of every slice."""
        for owner in range_constexpr(self.ranks):
            stop = vector.min_of(end, vectors - owner * share)
            for at in cutlass.range(begin, stop, self.threads, unroll=4):
                offset = (Int64(owner * share) + at) * VECTOR_BYTES
                ptx.store_16b(target + offset, ptx.load_16b(source + offset))

    @cute.jit
    def meet(
        self, own: Int64, multi: Int64, wanted: Uint32, alive: Boolean, limit_ns: Int64, report: Int64, rank: Int32,
        stage: cutlass.Constexpr,
    ) -> Boolean:  # fmt: skip
        """The same block of every rank. Returns, to thread 0, whether all came in time; without `alive` it doesn't
        wait. The counter does not tell who is missing: the report names this rank as the peer.
        """
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            ptx.multimem_add_release(multi, Uint32(1))
            if alive:
                alive = sync.wait(own, wanted, "sys", limit_ns, report, rank, rank, stage)
        cute.arch.sync_threads()
        return alive
