"""The kernels that an all-reduce of given sizes runs, so that they can be compiled before it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose_dist.kernels import jit
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.linear_add import MAX_ROWS

if TYPE_CHECKING:
    from rose_dist.kernels.all_reduce import Sizes
    from rose_dist.kernels.cute.all_reduce_norm import CombineReduceNorm
    from rose_dist.kernels.cute.all_reduce_one_shot import OneShot
    from rose_dist.kernels.cute.all_reduce_two_shot import TwoShot
    from rose_dist.kernels.cute.gather_columns import GatherColumns
    from rose_dist.kernels.cute.linear_reduce import LinearReduce


def one_shot(arch: Arch, sizes: Sizes, parts: int = 1, *, accumulate: bool = False) -> OneShot:
    """For few rows."""
    from rose_dist.kernels.cute.all_reduce_one_shot import OneShot  # noqa: PLC0415 - it loads the compiler

    return OneShot(arch, sizes.ranks, sizes.hidden, sizes.dtype, None, accumulate, parts)


def combined(
    arch: Arch, sizes: Sizes, dtype: torch.dtype, top_k: int, out_dtype: torch.dtype, parts: int = 1, *,
    accumulate: bool = False, bias: torch.dtype | None = None,
) -> OneShot:  # fmt: skip
    """For few rows that a combine of rows of `dtype` makes."""
    from rose_dist.kernels.cute.all_reduce_one_shot import OneShot  # noqa: PLC0415 - it loads the compiler
    from rose_dist.kernels.cute.moe_combine import VECTOR_BYTES, Combine  # noqa: PLC0415

    source = Combine(arch, top_k, sizes.hidden, dtype, out_dtype, bias, False, VECTOR_BYTES)
    return OneShot(arch, sizes.ranks, sizes.hidden, out_dtype, source, accumulate, parts)


def combine_norm(
    arch: Arch, sizes: Sizes, dtype: torch.dtype, top_k: int, tokens: int
) -> CombineReduceNorm | None:  # fmt: skip
    """For few tokens that a combine of rows of `dtype` makes, and the norm behind; None: too many, or too long."""
    from rose_dist.kernels.cute.all_reduce_norm import CombineReduceNorm  # noqa: PLC0415 - it loads the compiler

    parts = sizes.parts(tokens, torch.float32)
    shot = combined(arch, sizes, dtype, top_k, sizes.dtype, parts, accumulate=True)
    fits = tokens <= sizes.combine_rows and tokens * parts <= sizes.sms and shot.turns == 1
    return CombineReduceNorm(arch, shot) if fits else None


def two_shot(arch: Arch, sizes: Sizes, dtype: torch.dtype) -> TwoShot:
    """For many rows, of `dtype`."""
    from rose_dist.kernels.cute.all_reduce_two_shot import TwoShot  # noqa: PLC0415 - it loads the compiler

    return TwoShot.of(arch, sizes.ranks, dtype)


def gather_columns(arch: Arch, sizes: Sizes) -> GatherColumns:
    """For logits."""
    from rose_dist.kernels.cute.gather_columns import GatherColumns  # noqa: PLC0415 - it loads the compiler

    return GatherColumns(arch, sizes.ranks)


def linear_reduce(arch: Arch, sizes: Sizes, inputs: int) -> LinearReduce:
    """For few rows that a linear layer of so many inputs makes."""
    from rose_dist.kernels.cute.linear_reduce import LinearReduce  # noqa: PLC0415 - it loads the compiler

    return LinearReduce.of(arch, sizes.ranks, inputs)


def usual_kernels(arch: Arch, sizes: Sizes) -> list[jit.Kernel]:
    """All that an `AllReduce` needs without a combine, each once."""
    plain, few = range(1, sizes.one_shot_rows + 1), range(1, min(MAX_ROWS, sizes.one_shot_rows) + 1)
    kernels: list[jit.Kernel] = [one_shot(arch, sizes, sizes.parts(rows, sizes.dtype)) for rows in plain]
    kernels += [one_shot(arch, sizes, sizes.parts(rows, sizes.dtype), accumulate=True) for rows in few]
    kernels += [two_shot(arch, sizes, dtype) for dtype in (sizes.dtype, torch.float32)]
    kernels.append(gather_columns(arch, sizes))
    return list(dict.fromkeys(kernels))


def combine_kernels(
    arch: Arch, sizes: Sizes, dtype: torch.dtype, top_k: int, out_dtype: torch.dtype, *, bias: bool = False
) -> list[jit.Kernel]:
    """All that its combines of rows of `dtype` need, also with a bias of that dtype if `bias`, each once."""
    parts = {sizes.parts(tokens, torch.float32) for tokens in range(1, sizes.combine_rows + 1)}
    kernels: list[jit.Kernel] = [
        combined(arch, sizes, dtype, top_k, out_dtype, part, accumulate=accumulate, bias=bias_dtype)
        for part in sorted(parts)
        for accumulate in (False, True)
        for bias_dtype in ((None, dtype) if bias else (None,))
    ]
    if not bias and dtype is out_dtype is sizes.dtype:
        ends = (combine_norm(arch, sizes, dtype, top_k, tokens) for tokens in range(1, sizes.combine_rows + 1))
        kernels += dict.fromkeys(kernel for kernel in ends if kernel is not None)
    return kernels
