"""How a layer says which parts of which checkpoint tensors it holds.

A layer's method `weights(prefix)` yields a `Weight` for each of its parameters, `prefix` being its module name and a
dot. The checkpoint loader reads just those parts and hands them to `Weight.store`. Names are the checkpoint's (Hugging
Face layout); the loader maps other layouts to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rose_dist.comm.layout import even_split


@dataclass(frozen=True)
class Piece:
    """A rectangular part of one checkpoint tensor.

    shape: the whole tensor's, for the check against the file.
    part: one slice a dimension; this rank's share.
    dtype: the file's; None is any floating-point one.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    dtype: torch.dtype | None = None

    @staticmethod
    def of(name: str, shape: tuple[int, ...], *part: slice, dtype: torch.dtype | None = None) -> Piece:
        """`part` may name the leading dimensions only; the others are taken whole."""
        rest = tuple(slice(0, n) for n in shape[len(part) :])
        return Piece(name, shape, part + rest, dtype)


@dataclass(frozen=True)
class Weight:
    """Pieces that are read together and what becomes of them.

    store: called with the pieces' tensors in order; None if the tensor is expected in the checkpoint but another rank
    holds it.
    """

    pieces: tuple[Piece, ...]
    store: Callable[..., object] | None


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised weight: it is written once, by the loader, and never trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def length(part: slice) -> int:
    return int(part.stop - part.start)


def copy_into(destination: Tensor) -> Callable[[Tensor], object]:
    return destination.copy_


def share(total: int, parts: int, index: int, unit: int = 1) -> slice:
    """The `index`-th of `parts` contiguous shares of `total`, cut at multiples of `unit`, which divides `total`.

    Shares differ by one unit at most, the larger ones first; a share may be empty.
    """
    units = even_split(total // unit, parts, index)
    return slice(units.start * unit, units.stop * unit)
