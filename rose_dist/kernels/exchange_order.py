"""The numbering that a source of many tokens needs before it sends: pairs by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rose_dist.kernels import jit, launch
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.moe_dispatch import ASSIGN_WARPS, PAIRS_PER_THREAD

if TYPE_CHECKING:
    from rose_dist.kernels.cute.moe_dispatch_prefill import AssignSlots


def order_kernel(arch: Arch, layout: ExchangeLayout) -> AssignSlots:
    """All ids are counted: `layout.experts` of them."""
    from rose_dist.kernels.cute.moe_dispatch_prefill import AssignSlots  # noqa: PLC0415 - it loads the compiler

    warps = ASSIGN_WARPS if layout.experts <= 1024 else max(1, ASSIGN_WARPS // 4)
    return AssignSlots(arch, layout.experts, layout.top_k, PackedLayout(), warps)


class SourceOrder:
    """A launch and where it writes."""

    def __init__(self, layout: ExchangeLayout, device: torch.device, sms: int) -> None:
        self._barrier = torch.empty(1, dtype=torch.int32, device=device).zero_()
        self._sms, self._top_k = sms, layout.top_k
        kernel = order_kernel(launch.device(self._barrier).arch, layout)
        self._assign, self._threads = jit.load(kernel), kernel.threads
        self._histograms = torch.empty(sms, layout.experts, dtype=torch.int32, device=device)
        self._slots = torch.empty(layout.max_tokens, layout.top_k, dtype=torch.int32, device=device)
        self._counts = torch.empty(layout.experts, dtype=torch.int32, device=device)
        self._offsets = torch.empty(layout.experts + 1, dtype=torch.int64, device=device)

    def __call__(
        self, ids: Tensor, tokens: int, live_rows: Tensor | None, report: int, limit_ns: int, rank: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Number of each pair in the order of experts, then counts and starts by expert."""
        blocks = min(self._sms, max(1, -(-tokens * self._top_k // (self._threads * PAIRS_PER_THREAD))))
        launch.run(
            self._assign, self._slots, ids, live_rows, self._slots, None, self._counts, self._offsets,
            self._histograms, self._barrier, report, limit_ns, 0, tokens, blocks, rank,
        )  # fmt: skip
        return self._slots, self._counts, self._offsets
