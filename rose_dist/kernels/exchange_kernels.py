"""Which kernels an exchange launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rose_dist.kernels import jit, launch
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_tiling import PARTS
from rose_dist.kernels.expert_slots import PackedLayout


@dataclass(frozen=True)
class ExchangeKernels:
    """Of one layout. result_dtype: of the experts' output rows."""

    arch: Arch
    layout: ExchangeLayout
    packed: PackedLayout
    result_dtype: torch.dtype

    def usual(self) -> Iterator[jit.Kernel]:
        """All, for `out` of the results' dtype that is not added to."""
        for most in PARTS.variants:
            for send, receive in ((True, True), (True, False), (False, True)):
                yield self.dispatch(most, send, receive)
                yield self.combine(most, send, receive, self.result_dtype, False)
        for receive in (False, True) * self.layout.has_rows:
            yield self.push(receive)
        for by_token in (True,) * self.layout.has_returns + (False,) * self.layout.has_rows:
            for send in (False, True):
                yield self.sum(self.result_dtype, False, by_token, send)

    def dispatch(self, most: int, send: bool, receive: bool) -> jit.Kernel:
        from rose_dist.kernels.cute.exchange_dispatch import ExchangeDispatch  # noqa: PLC0415 - it loads the compiler

        return ExchangeDispatch(self.arch, self.layout, self.packed, self._width, most, send, receive)

    def combine(self, most: int, send: bool, receive: bool, out_dtype: torch.dtype, accumulate: bool) -> jit.Kernel:
        from rose_dist.kernels.cute.exchange_combine import ExchangeCombine  # noqa: PLC0415 - it loads the compiler

        add = accumulate and receive
        return ExchangeCombine(self.arch, self.layout, self.result_dtype, out_dtype, add, most, send, receive)

    def push(self, receive: bool) -> jit.Kernel:
        from rose_dist.kernels.cute.exchange_rows import DispatchRows  # noqa: PLC0415 - it loads the compiler

        return DispatchRows(self.arch, self.layout, self.packed, self._width, receive)

    def sum(self, out_dtype: torch.dtype, accumulate: bool, by_token: bool, send: bool) -> jit.Kernel:
        from rose_dist.kernels.cute.exchange_rows import CombineRows  # noqa: PLC0415 - it loads the compiler

        return CombineRows(self.arch, self.layout, self.result_dtype, out_dtype, accumulate, by_token, send)

    @property
    def _width(self) -> int:
        """Of stores into packed rows."""
        return launch.widest(self.arch, self.layout.row_bytes)
