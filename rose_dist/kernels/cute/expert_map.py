"""From experts to the slots that hold them, and the experts' load."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint64, const_expr, cute

THREADS = 256


@cache
def launcher(arch: Arch, experts: int, top_k: int, table_width: int) -> jit.Launcher:
    return jit.load(MapExperts(arch, experts, top_k, table_width))


@dataclass(frozen=True)
class MapExperts(jit.Kernel):
    """A thread a pair of token and place. table_width: columns of the table, 0 for none."""

    experts: int
    top_k: int
    table_width: int

    @cute.jit
    def __call__(
        self, ids: Int64, table: Int64, slots: Int64, load: Int64, live_rows: Int64, turn: Int32, tokens: Int32,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Addresses: ids and slots int32 [tokens, top_k], which may be the same; table int32 [experts, table_width];
        load u64 [experts], only ever added to; live_rows int32 [1] or 0.
        """
        pairs = Int64(tokens) * self.top_k
        self.kernel(ids, table, slots, load, live_rows, turn, tokens).launch(
            grid=[Int32((pairs + (THREADS - 1)) // THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, ids: Int64, table: Int64, slots: Int64, load: Int64, live_rows: Int64, turn: Int32, tokens: Int32
    ) -> None:
        pair = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        token = Int32(pair // self.top_k)
        ptx.exit_if(token >= tokens)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        expert = vector.scalar(ids + pair * 4, Int32)[0]
        valid = Boolean(expert >= 0) & (expert < self.experts) & (token < vector.live_rows(live_rows, tokens))
        slot = self.slot(vector.select(valid, expert, Int32(0)), table, turn + token)
        vector.scalar(slots + pair * 4, Int32)[0] = vector.select(valid, slot, Int32(-1))
        if valid:
            ptx.add_relaxed_u64(load + Int64(expert) * 8, Uint64(1), "gpu")

    @cute.jit
    def slot(self, expert: Int32, table: Int64, number: Int32) -> Int32:
        """The slot of `expert` whose turn it is."""
        slot = expert
        if const_expr(self.table_width > 0):
            row = table + Int64(expert) * (4 * self.table_width)
            count = vector.scalar(row, Int32)[0]
            slot = vector.scalar(row + Int64(1 + number % count) * 4, Int32)[0]
        return slot
