"""Tokens drawn from logits on a GPU: greedy, by temperature, min-p, top-k and top-p, each row by its own rule.

A row's token is that at which its cumulative distribution passes a number that the caller gives: in the vocabulary's
order, or the likeliest first where top-k or top-p cut it. Weights are 2^−h in units of 2^−31, h from fp32 (relative
error about 2^−22), and all sums are of integers: a token follows from its row alone, whatever else is drawn beside it
and however the row is spread over blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.variants import WARP

WEIGHT_BITS = 31
RULE_WORDS = 4
"""int64 a row: see `DrawRule`."""
MOST_CANDIDATES = 2048
"""So many tokens of a row are sorted; a cut that leaves more is found by bisection, which takes longer."""
MOST_BLOCKS = 8
WARPS = 16
SHORT_COLUMNS = 16_384
"""Up to here fewer warps share a row."""
COLUMN_MULTIPLE = 4
SPILLING_STEPS, FREE_STEPS = (10, 11), 12
"""Loops of these lengths take the assembler more registers than two blocks an SM leave, and a longer one does not."""
MOST_COLUMNS = 400_000
"""What the shared memory of `MOST_BLOCKS` blocks holds."""


@dataclass(frozen=True)
class RowSplit:
    """How a row is spread over a cluster.

    blocks: that share it. steps: vectors of 4 elements a lane.
    """

    blocks: int
    warps: int
    steps: int

    @staticmethod
    def of(columns: int) -> RowSplit:
        vectors = -(-columns // COLUMN_MULTIPLE)
        blocks, warps = (4, 4) if columns <= SHORT_COLUMNS else (MOST_BLOCKS, WARPS)
        steps = -(-vectors // (blocks * warps * WARP))
        return RowSplit(blocks, warps, FREE_STEPS if steps in SPILLING_STEPS else steps)

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def elements(self) -> int:
        """A block's."""
        return self.threads * self.steps * COLUMN_MULTIPLE

    @property
    def candidates(self) -> int:
        """Most tokens that are sorted, a power of two: their keys lie where a block's elements were."""
        return min(MOST_CANDIDATES, 1 << (self.elements // 2).bit_length() - 1)


@dataclass(frozen=True)
class DrawRule:
    """How one row is drawn.

    temperature: ≥ 0; 0 takes the largest logit, of equal ones the first. top_k: 0 keeps all. top_p: in (0, 1].
    min_p: in [0, 1].
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def words(self) -> tuple[int, int, int]:
        """Three of the row's four words. Low to high: log2 e / temperature in two fp32, the second what the first
        lacks; top_k and min_p's least weight, i32 and u32; top_p times 2^64, 0 for all. The fourth is the number.
        """
        scale = min(math.log2(math.e) / self.temperature, 1e30) if self.temperature > 0 else 0.0
        high = np.float32(scale)
        pair = np.array([high, np.float32(scale - float(high))], np.float32).view(np.int64)
        least = math.ceil(self.min_p * (1 << WEIGHT_BITS))
        top_p = max(int(self.top_p * 2.0**64), 1) if self.top_p < 1 else 0
        top_k = min(self.top_k, (1 << 31) - 1)
        return int(pair[0]), _signed(top_k | least << 32), _signed(top_p)


NO_DRAW = np.array([[0], [0xFFFFFFFF], [0], [0]])
"""In place of a row's words: it is left alone."""


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def rule_words(rules: list[DrawRule]) -> npt.NDArray[np.int64]:
    """int64 [3, rows], rows dense."""
    return np.ascontiguousarray(np.array([rule.words() for rule in rules], np.int64).reshape(len(rules), 3).T)


def fits(logits: Tensor) -> bool:
    """Whether `draw` takes them."""
    return logits.is_cuda and fits_columns(logits.shape[1])


def fits_columns(columns: int) -> bool:
    """Whether `draw` takes a vocabulary of so many tokens."""
    return columns % COLUMN_MULTIPLE == 0 and 0 < columns <= MOST_COLUMNS


def workspace(rows: int, columns: int, device: torch.device) -> Tensor:
    """int64, for `draw` of up to so many rows: what it gathers for sorting."""
    split = RowSplit.of(columns)
    return torch.empty(rows, split.blocks, split.candidates, dtype=torch.int64, device=device)


def draw(logits: Tensor, rules: Tensor, out: Tensor, space: Tensor) -> None:
    """One token for each row.

    Args:
        logits: fp32 [rows, columns], dense rows; columns a multiple of 4, at most 400,000. A NaN counts as −inf.
        rules: int64 [4, rows], rows dense: `rule_words`, and the number that decides, a u64
            of which 2^64 would be 1; or `NO_DRAW`.
        out: int64 [rows], written but for the rows without a rule.
        space: a `workspace` for as many rows or more, of as many columns.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit.
    """
    _check(logits, rules, out, space)
    rows, columns = logits.shape
    if rows == 0:
        return
    from rose_dist.kernels.cute import draw as cute  # noqa: PLC0415 - it loads the compiler

    launcher = cute.launcher(launch.device(logits).arch, RowSplit.of(columns))
    launch.run(launcher, logits, logits, logits.stride(0), rules, rules.stride(0), out, space, rows, columns)


@checks.once
def _check(logits: Tensor, rules: Tensor, out: Tensor, space: Tensor) -> None:
    checks.shape("logits", logits, None, None)
    rows, columns = logits.shape
    checks.dtype("logits", logits, torch.float32)
    checks.rows("logits", logits)
    if not logits.is_cuda:
        raise checks.fail("logits", "are not on a GPU")
    checks.multiple("logits' columns", columns, COLUMN_MULTIPLE, "rows are copied 16 bytes at a time")
    if columns > MOST_COLUMNS:
        raise checks.fail("logits", f"have {columns} columns; at most {MOST_COLUMNS} fit the shared memory")
    checks.shape("rules", rules, RULE_WORDS, rows)
    checks.dtype("rules", rules, torch.int64)
    checks.rows("rules", rules, 8)
    checks.shape("out", out, rows)
    checks.dtype("out", out, torch.int64)
    checks.dense("out", out, 8)
    split = RowSplit.of(columns)
    checks.shape("space", space, None, split.blocks, split.candidates)
    checks.dtype("space", space, torch.int64)
    checks.dense("space", space)
    if space.shape[0] < rows:
        raise checks.fail("space", f"is for {space.shape[0]} rows; there are {rows}")
    for name, tensor in (("rules", rules), ("out", out), ("space", space)):
        checks.same_device(name, tensor, logits.device)
