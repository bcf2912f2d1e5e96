"""What the linear layers of a decode step share: a block's weights are all under way before the launch before is done.

A block has 16 outputs, in 8 pairs; its warps share the inputs, always in the same way, and add up in shared memory.
Lane 4g + q holds inputs 8q … 8q + 7 of a run of 32, of both outputs of pair g and of row g of x, which has up to 8.
Which inputs an operand's column stands for does not matter as long as both operands agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import load_shared_floats, store_shared
from rose_dist.kernels.dsl import Float32, Int32, Int64, Uint32, cute
from rose_dist.kernels.linear_shapes import LINEAR_COLUMNS, LINEAR_OUTPUTS, ResidentShape
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import await_copies, commit_copies, copy_ahead, load_shared_16b, multiply_add

RUN_BYTES = 2 * WARP * 16
"""Of a run's weights in shared memory: a warp's two vectors a lane."""
CHAINS = 2
"""Sums that a warp keeps for the same results, so that a product need not wait for the one before."""
MEETING_AHEAD = 8
"""Other warps' sums that are loaded at a time."""


@dataclass(frozen=True)
class ResidentWeights:
    """The first `shape.held` runs of each warp are on their way to registers, the others to shared memory."""

    inputs: int
    shape: ResidentShape

    @property
    def runs(self) -> int:
        """Of 32 inputs, a warp."""
        return self.inputs // LINEAR_COLUMNS // self.shape.warps

    @property
    def held(self) -> int:
        return min(self.shape.held, self.runs)

    @property
    def threads(self) -> int:
        return self.shape.warps * WARP

    @property
    def part_bytes(self) -> int:
        """A warp's part of shared memory: its weights, then its sums in the same place."""
        return max((self.runs - self.held) * RUN_BYTES, WARP * 16)

    @property
    def shared_bytes(self) -> int:
        return self.shape.warps * self.part_bytes

    def inside(self) -> Any:
        """Where this lane's first inputs stand in a row, in bytes."""
        thread = cute.arch.thread_idx()[0]
        return Int64(_warp() * (self.runs * LINEAR_COLUMNS * 2) + thread % 4 * 16)

    def fetch(self, first: Any, second: Any, shared: Any) -> list[Any]:
        """Start all loads of this lane's weights; `first` and `second` are the addresses of its pair's rows of them."""
        inside, at = self.inside(), self._own(shared)
        sources = (first + inside, second + inside)
        held = [[ptx.load_early_16b(s + i * LINEAR_COLUMNS * 2) for s in sources] for i in range(self.held)]
        for i in range(self.held, self.runs):
            for row, source in enumerate(sources):
                place = at + ((i - self.held) * RUN_BYTES + row * WARP * 16)
                copy_ahead(place, source + i * LINEAR_COLUMNS * 2)
            commit_copies()
        return held

    def load_rows(self, x: Any, x_stride: Any, rows: Any) -> list[Any]:
        """This lane's inputs of its row, four words a run. x: address of up to 8 rows, `x_stride` in elements."""
        row = vector.min_of(cute.arch.thread_idx()[0] % WARP // 4, rows - 1)
        source = x + Int64(row) * x_stride * 2 + self.inside()
        return [vector.load(source + i * (LINEAR_COLUMNS * 2), Uint32, 4, 16) for i in range(self.runs)]

    def multiply(self, held: list[Any], shared: Any, values: Iterable[Any], *, younger: int = 0) -> list[Any]:
        """This warp's sums: four fp32 a lane, of (the pair's first output, row 2q), (first, 2q + 1), (second, 2q),
        (second, 2q + 1). younger: groups of copies that this thread has committed since `fetch`.
        """
        chains = [[Float32(0.0)] * 4 for _ in range(CHAINS)]
        for i, b in enumerate(values):
            first, second = held[i] if i < self.held else self._staged(shared, i, younger)
            for chain, k in enumerate((0, 2)):
                a = (first[k], second[k], first[k + 1], second[k + 1])
                chains[chain] = multiply_add(chains[chain], a, (b[k], b[k + 1]), "bf16")
        return [a + b for a, b in zip(*chains, strict=True)]

    def meet(self, shared: Any, sums: list[Any]) -> None:
        """Put this warp's sums where `total` finds them, once the block has met."""
        cute.arch.sync_warp()
        store_shared(self._own(shared), sums)
        cute.arch.sync_threads()

    def total(self, shared: Any) -> Any:
        """The block's sums, added in the order of the inputs."""
        at = Int32(shared) + cute.arch.thread_idx()[0] % WARP * 16
        sums = load_shared_floats(at)
        for other in range(1, self.shape.warps):
            if other % MEETING_AHEAD == 0:
                cute.arch.sync_warp()  # else the assembler loads all of them first, and spills
            more = load_shared_floats(at + other * self.part_bytes)
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        return sums

    def _own(self, shared: Any) -> Any:
        return Int32(shared) + _warp() * self.part_bytes + cute.arch.thread_idx()[0] % WARP * 16

    def _staged(self, shared: Any, run: int, younger: int) -> Any:
        await_copies(self.runs - 1 - run + younger)
        at = self._own(shared) + (run - self.held) * RUN_BYTES
        return [load_shared_16b(at + row * WARP * 16) for row in range(2)]


def pair_of_lane() -> Any:
    """Which pair of outputs this lane's sums belong to, where a block has 8 neighbouring ones."""
    return cute.arch.block_idx()[0] * (LINEAR_OUTPUTS // 2) + cute.arch.thread_idx()[0] % WARP // 4


def rows_of_lane(lane: Any) -> list[Any]:
    """The rows of x whose results a lane has."""
    return [lane % 4 * 2, lane % 4 * 2 + 1]


def halves(word: Any) -> tuple[Any, Any]:
    """The two bf16 of a word, widened."""
    return ptx.from_bits(Uint32(word) << Uint32(16)), ptx.from_bits(Uint32(word) & Uint32(0xFFFF0000))


def _warp() -> Any:
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
