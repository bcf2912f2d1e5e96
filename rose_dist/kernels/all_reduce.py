"""All-reduce between the GPUs of one NVLink domain: one shot for little, two shots for much."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch, linear_add, moe_combine, peer_regions
from rose_dist.kernels.all_reduce_kernels import (
    combine_kernels,
    combine_norm,
    combined,
    gather_columns,
    linear_reduce,
    one_shot,
    two_shot,
    usual_kernels,
)
from rose_dist.kernels.combine_norm import check as check_combine_norm
from rose_dist.kernels.linear_shapes import LINEAR_OUTPUTS, REDUCED_PER_SM
from rose_dist.kernels.moe_dispatch import LIMIT_NS
from rose_dist.kernels.peer_regions import (
    LINE_BYTES,
    MAX_BLOCKS,
    MAX_RANKS,
    MAX_ROUNDS,
    PACKET_BYTES,
    PACKET_VALUES,
    PACKET_WORDS,
    STAGES,
)
from rose_dist.kernels.rms_norm import rms_norm
from rose_dist.kernels.variants import WARP

if TYPE_CHECKING:
    from rose_dist.kernels.cute.all_reduce_one_shot import OneShot

ONE_SHOT_BYTES = {2: 3 << 20, 3: 1 << 19, 4: 1 << 18}
"""Largest tensor that one shot serves, by ranks; more ranks: 128 KB. Two shots send less, but wait twice. On two H200s
they are even at 3 MB (15.1 against 16.7 us at 2.8 MB, 19.5 against 19.1 us at 3.5 MB); for more ranks it is a guess.
"""
MAX_STAGED = 12_000
"""Longest row that combine and all-reduce in one launch serve: it is held in shared memory, in fp32, of which 48 KB are
static."""
MOST_PARTS = 8
"""That a row is cut into when there are fewer rows than SMs, each for a block."""
PART_PACKETS = 96
"""That a part at least has: three warps. Smaller ones gain nothing."""
ROUND_BYTES = 1 << 15
"""That a block of two shots at least sends in a round."""
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Sizes:
    """What all ranks must give alike."""

    ranks: int
    hidden: int
    dtype: torch.dtype
    max_rows: int
    sms: int
    """Of the smallest GPU."""

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MAX_RANKS:
            raise checks.fail("ranks", f"is {self.ranks}; must be 2 … {MAX_RANKS}")
        if self.dtype not in DTYPES:
            raise checks.fail("dtype", f"is {self.dtype}; allowed: {', '.join(map(str, DTYPES))}")
        checks.multiple("the row size", self.hidden * self.dtype.itemsize, 16, "rows travel 16 bytes at a time")

    @property
    def one_shot_rows(self) -> int:
        """Rows up to which one shot serves."""
        most = ONE_SHOT_BYTES.get(self.ranks, 1 << 17)
        return min(self.max_rows, most // (self.hidden * self.dtype.itemsize))

    @property
    def combine_rows(self) -> int:
        """Tokens up to which combine and all-reduce are one launch: what travels is fp32, and each part of a row has a
        block, which holds it.
        """
        most = ONE_SHOT_BYTES.get(self.ranks, 1 << 17) if self.hidden <= MAX_STAGED else 0
        return min(self.max_rows, self.sms, most // (self.hidden * 4))

    def parts(self, rows: int, dtype: torch.dtype) -> int:
        """That one shot cuts each row of `dtype` into: as many as there are SMs for, and whole 16-byte vectors of the
        experts' rows.
        """
        parts, words = MOST_PARTS, self.hidden * dtype.itemsize // 4
        while parts > 1 and (
            rows * parts > self.sms or self.hidden % (8 * parts) or words // parts < PART_PACKETS * PACKET_WORDS
        ):
            parts //= 2
        return parts

    @property
    def source_bytes(self) -> int:
        """Of one sender's part of a one-shot inbox. Each part of a row begins on a line."""
        plain, summed = (
            peer_regions.packets(words) * PACKET_BYTES + MOST_PARTS * LINE_BYTES
            for words in (self.hidden * self.dtype.itemsize // 4, self.hidden)
        )
        return peer_regions.lines(max(plain * self.one_shot_rows, summed * self.combine_rows))

    @property
    def slice_bytes(self) -> int:
        """Of one rank's slice of a two-shot exchange of `max_rows` fp32 rows."""
        return peer_regions.lines(-(-self.max_rows * self.hidden * 4 // self.ranks))

    @property
    def inbox_bytes(self) -> int:
        """Where the two-shot region starts in a rank's region."""
        return peer_regions.inbox_bytes(self.ranks, self.source_bytes)

    @property
    def region_bytes(self) -> int:
        """Of symmetric memory that every rank provides, zeroed."""
        return self.inbox_bytes + peer_regions.two_shot_bytes(self.ranks, self.slice_bytes)


class AllReduce:
    """Sums over the ranks; all make the same calls in the same order, on one stream each. Fit for CUDA graphs.

    Sums are in fp32, in rank order, rounded once, so the bits are the same on every rank and in every run.
    """

    def __init__(
        self, sizes: Sizes, device: torch.device, rank: int, regions: tuple[int, ...],
        limit_ns: int = LIMIT_NS,
    ) -> None:  # fmt: skip
        """`regions`: the address, on this device, of each rank's region of `sizes.region_bytes` zeroed bytes. No rank
        may call before all have zeroed theirs.
        """
        from rose_dist.kernels import sync  # noqa: PLC0415 - it loads the compiler

        self.sizes, self.rank = sizes, rank
        self.report = sync.WaitReport(STAGES)
        self._state = torch.empty(1, dtype=torch.int64, device=device).zero_()
        self._arch = launch.device(self._state).arch
        padding = (0,) * (MAX_RANKS - sizes.ranks)
        self._inboxes = (*regions, *padding)
        self._regions = (*(region + sizes.inbox_bytes for region in regions), *padding)
        self._tail = (self._state.data_ptr(), self.report.address, limit_ns, rank)
        self._scratch = torch.empty(sizes.max_rows, sizes.hidden, dtype=torch.float32, device=device)
        self._first_slots = torch.empty(sizes.max_rows, 1, dtype=torch.int32, device=device)
        self._first_slots[:, 0] = torch.arange(sizes.max_rows, dtype=torch.int32)
        self._ones = torch.empty(sizes.max_rows, 1, dtype=torch.float32, device=device).fill_(1.0)
        for kernel in usual_kernels(self._arch, sizes):
            _load(kernel)

    def check(self) -> None:
        """Raise `WaitExpiredError` if a kernel has waited in vain; reads host memory only."""
        self.report.check()

    def __call__(self, x: Tensor, out: Tensor | None = None, *, live_rows: Tensor | None = None) -> Tensor:
        """The sum of all ranks' `x` [rows, hidden], rows up to `live_rows` (int32 [1]), in `out`, which may be `x`."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        rows = self._check(x, out)
        if rows > self.sizes.one_shot_rows:
            self._two_shot(x, out, rows, live_rows)
        elif rows:
            kernel = one_shot(self._arch, self.sizes, self.sizes.parts(rows, x.dtype))
            self._one_shot(kernel, out, x, live_rows, (0,) * 6, rows)
        return out

    def add(self, x: Tensor, residual: Tensor) -> None:
        """Add the sum of all ranks' `x` to `residual`, in place; rounded once if one shot serves. `x` is left any."""
        rows = self._check(x, residual)
        checks.shape("residual", residual, rows, self.sizes.hidden)
        checks.dtype("residual", residual, x.dtype)
        if rows > self.sizes.one_shot_rows:
            residual += self(x, x)
        elif rows:
            kernel = one_shot(self._arch, self.sizes, self.sizes.parts(rows, x.dtype), accumulate=True)
            self._one_shot(kernel, residual, x, None, (0,) * 6, rows)

    def takes_linear(self, weight: Tensor) -> bool:
        """Whether `add_linear` serves such a weight [out, in]: its blocks must all be on the GPU at once."""
        blocks = weight.shape[0] // LINEAR_OUTPUTS
        return (
            linear_add.fits(weight)
            and self.sizes.dtype is torch.bfloat16
            and blocks <= REDUCED_PER_SM * self.sizes.sms
            and blocks * WARP * PACKET_BYTES <= self.sizes.source_bytes
        )

    def add_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        """Add the sum of all ranks' x Wᵀ + b to `residual`, in place, in one launch where `takes_linear`.

        x, weight, bias: as for `linear_add`, of this rank's inputs; not all ranks need have a bias. Each rank's product
        is rounded before it is added up, as by `linear_add` and `add`.
        """
        linear_add.check(x, weight, bias)
        rows = self._check(residual, residual)
        checks.shape("residual", residual, x.shape[0], weight.shape[0])
        if rows:
            launch.run(
                _load(linear_reduce(self._arch, self.sizes, weight.shape[1])), residual, x, x.stride(0), weight, bias,
                residual, *self._inboxes, self.sizes.source_bytes, *self._tail, rows, weight.shape[0],
            )  # fmt: skip

    def gather_columns(self, part: Tensor, columns: int) -> Tensor | None:
        """fp32 [rows, columns] on the first rank, None on the others: every rank's `part`, fp32 [rows, its share of the
        columns as by `even_split`], side by side, in the precision of bf16, which is what travels.
        """
        share = columns // self.sizes.ranks + (self.rank < columns % self.sizes.ranks)
        checks.shape("part", part, None, share)
        checks.dtype("part", part, torch.float32)
        checks.dense("part", part, 4)
        rows, most = part.shape[0], self.sizes.source_bytes // PACKET_BYTES - 1
        out = None if self.rank else torch.empty(rows, columns, dtype=part.dtype, device=part.device)
        for first in range(0, -(-rows * -(-columns // self.sizes.ranks) // PACKET_VALUES), most):
            launch.run(
                _load(gather_columns(self._arch, self.sizes)), part, part, out, rows, columns, first, most,
                *self._inboxes, self.sizes.source_bytes, *self._tail, self.sizes.sms,
            )  # fmt: skip
        return out

    def combine(
        self, expert_rows: Tensor, slots: Tensor, weights: Tensor, out: Tensor, *, tokens: int,
        accumulate: bool = False, ids: Tensor | None = None, bias: Tensor | None = None, first_expert: int = 0,
        live_rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`moe_combine.combine` of every rank's experts, then the sum over ranks, both in fp32. Ranks need not all have
        a `bias`.
        """
        sizes, top_k = self.sizes, slots.shape[1]
        if tokens > sizes.combine_rows:
            scratch = self._scratch[:tokens]
            moe_combine.combine(
                expert_rows, slots, weights, scratch, tokens=tokens, ids=ids, bias=bias, first_expert=first_expert,
                live_rows=live_rows,
            )  # fmt: skip
            self._two_shot(scratch, scratch, tokens, live_rows)
            moe_combine.combine(
                scratch, self._first_slots[:tokens], self._ones[:tokens], out, tokens=tokens, accumulate=accumulate,
                live_rows=live_rows,
            )  # fmt: skip
        elif tokens:
            parts = sizes.parts(tokens, torch.float32)
            kernel = combined(
                self._arch, sizes, expert_rows.dtype, top_k, out.dtype, parts, accumulate=accumulate,
                bias=None if bias is None else bias.dtype,
            )  # fmt: skip
            source = (expert_rows.stride(0), slots, weights, ids, bias, first_expert)
            self._one_shot(kernel, out, expert_rows, live_rows, source, tokens)

    def combine_norm(
        self, expert_rows: Tensor, slots: Tensor, weights: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, *,
        live_rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Add each token's `combine` over all ranks to `residual`, in place, and normalise that; of few tokens, all of
        them live, in one launch, to which what `kernels.combine_norm.combine_norm` says of the launches before applies.
        """
        tokens, top_k = slots.shape
        kernel = None
        if tokens and live_rows is None:
            kernel = combine_norm(self._arch, self.sizes, expert_rows.dtype, top_k, tokens)
        if kernel is None:
            self.combine(
                expert_rows, slots, weights, residual, tokens=tokens, accumulate=True, live_rows=live_rows
            )  # fmt: skip
            return rms_norm(residual, norm_weight, eps)
        check_combine_norm(expert_rows, slots, weights, residual, norm_weight)
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        launch.run(
            _load(kernel), out, expert_rows, expert_rows.stride(0), slots, weights, residual, norm_weight, out,
            *self._inboxes, self.sizes.source_bytes, *self._tail, tokens, eps,
        )  # fmt: skip
        return out

    def prepare_combine(self, dtype: torch.dtype, top_k: int, out_dtype: torch.dtype, *, bias: bool = False) -> None:
        """Load kernels, so that a later `combine` may be captured; `bias`: also those for one of `dtype`."""
        for kernel in combine_kernels(self._arch, self.sizes, dtype, top_k, out_dtype, bias=bias):
            _load(kernel)

    def _check(self, x: Tensor, other: Tensor) -> int:
        checks.dtype("x", x, self.sizes.dtype)
        checks.shape("x", x, None, self.sizes.hidden)
        checks.dense("x", x)
        checks.dense("residual or out", other)
        rows = x.shape[0]
        if rows > self.sizes.max_rows:
            raise checks.fail("x", f"has {rows} rows; this all-reduce was built for {self.sizes.max_rows}")
        return rows

    def _one_shot(
        self, kernel: OneShot, out: Tensor, x: Tensor, live_rows: Tensor | None, source: tuple[object, ...], rows: int
    ) -> None:
        blocks = min(rows * kernel.parts, self.sizes.sms)
        launch.run(
            _load(kernel), out, x, live_rows, out, *source, *self._inboxes, self.sizes.source_bytes, *self._tail, rows,
            blocks,
        )  # fmt: skip

    def _two_shot(self, x: Tensor, out: Tensor, rows: int, live_rows: Tensor | None) -> None:
        kernel = two_shot(self._arch, self.sizes, x.dtype)
        row_vectors = self.sizes.hidden * x.element_size() // 16
        share = -(-rows * row_vectors // self.sizes.ranks)
        blocks = max(1, min(self.sizes.sms, MAX_BLOCKS, -(-share // kernel.threads)))
        rounds = max(1, min(MAX_ROUNDS, share * 16 // blocks // ROUND_BYTES))
        launch.run(
            _load(kernel), out, x, live_rows, out, row_vectors, *self._regions, self.sizes.slice_bytes, *self._tail,
            rows, rounds, blocks,
        )  # fmt: skip


@cache
def _load(kernel: jit.Kernel) -> jit.Launcher:
    return jit.load(kernel)
