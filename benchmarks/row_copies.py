"""The floor of a row kernel of few rows: a kernel that moves its bytes in its grid and computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.graphs import Call
from rose_dist.kernels import jit, launch, ptx, vector
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Stream, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.row_tiling import ROW_SHAPES, RowTiling, tile

VECTOR = 16
"""Bytes."""
KINDS = {"a copy in its grid": True, "one that waits first": False}
"""And whether they let the next launch begin before they wait."""


@dataclass(frozen=True)
class RowCopy(jit.Kernel):
    """Copies rows of 16-byte vectors; with `residual` those of another input into another output too."""

    tiling: RowTiling
    kept_bytes: int
    """Of each vector: 16, or 8 as where bf16 becomes FP8."""
    residual: bool
    early: bool
    """The next launch may begin before this one's wait."""

    @cute.jit
    def __call__(
        self, x: Int64, out: Int64, residual: Int64, total: Int64, rows: Int32, stream: Stream
    ) -> None:  # fmt: skip
        blocks = (rows + (self.tiling.rows_per_block - 1)) // self.tiling.rows_per_block
        self.kernel(x, out, residual, total, rows).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: Int64, out: Int64, residual: Int64, total: Int64, rows: Int32) -> None:
        lane, row = vector.row_of_thread(self.tiling)
        ptx.exit_if(row >= rows)
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if const_expr(not self.early):
            cute.arch.griddepcontrol_launch_dependents()
        first = Int64(row) * self.tiling.row_vectors
        places = [first + vector.place(self.tiling, lane, i) for i in range(self.tiling.vectors)]
        values = [vector.load(x + place * VECTOR, Uint32, 4, VECTOR) for place in places]
        others = []
        if const_expr(self.residual):
            others = [vector.load(residual + place * VECTOR, Uint32, 4, VECTOR) for place in places]
        for i in range_constexpr(self.tiling.vectors):
            valid = Boolean(vector.in_row(self.tiling, lane, i))
            words = [values[i][k] for k in range(self.kept_bytes // 4)]
            self.store(valid, out + places[i] * self.kept_bytes, words)
            if const_expr(self.residual):
                self.store(valid, total + places[i] * VECTOR, [others[i][k] for k in range(4)])

    @cute.jit
    def store(self, valid: Boolean, address: Int64, words: list[Any]) -> None:
        if valid:
            vector.store_words(address, words, Uint32, 4 * len(words))


def copies(x: torch.Tensor, kept_bytes: int, residual: torch.Tensor | None) -> Iterator[tuple[str, Call]]:
    """The bytes of a norm of `x`, over as many blocks as the norm has."""
    arch = launch.device(x).arch
    rows, vectors = x.shape[0], x.shape[1] * x.element_size() // VECTOR
    for name, early in KINDS.items():
        kernel = RowCopy(arch, tile(vectors, VECTOR, ROW_SHAPES.select(0)), kept_bytes, residual is not None, early)
        yield name, partial(_copy, kernel, x, residual, rows * vectors * kept_bytes)


def _copy(kernel: RowCopy, x: torch.Tensor, residual: torch.Tensor | None, size: int) -> Any:
    out = torch.empty(size, dtype=torch.uint8, device=x.device)
    total = None if residual is None else torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    launch.run(jit.load(kernel), x, x, out, residual, total, x.shape[0])
    return out, total
