"""The numbering that a source of many tokens needs before it sends: pairs by expert, and records by rank."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import jit, launch
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.moe_dispatch import ASSIGN_WARPS, PAIRS_PER_THREAD


class SourceOrder:
    """Two launches and where they write. All ids are counted: `layout.experts` of them."""

    def __init__(self, layout: ExchangeLayout, device: torch.device, sms: int) -> None:
        from rose_dist.kernels.cute.exchange_rows import AssignRecords  # noqa: PLC0415 - it loads the compiler
        from rose_dist.kernels.cute.moe_dispatch_prefill import AssignSlots  # noqa: PLC0415

        self._barrier = torch.empty(1, dtype=torch.int32, device=device).zero_()
        self._sms, self._top_k = sms, layout.top_k
        arch = launch.device(self._barrier).arch
        warps = ASSIGN_WARPS if layout.experts <= 1024 else max(1, ASSIGN_WARPS // 4)
        dense = PackedLayout()
        by_expert = AssignSlots(arch, layout.experts, layout.top_k, dense, warps)
        by_rank = AssignRecords(arch, layout.ranks, layout.top_k, dense, ASSIGN_WARPS, layout)
        self._assign = [(jit.load(kernel), kernel.threads) for kernel in (by_expert, by_rank)]
        self._histograms = torch.empty(sms, max(layout.experts, layout.ranks), dtype=torch.int32, device=device)
        pairs = (layout.max_tokens, layout.top_k)
        self._written = [
            (
                torch.empty(*pairs, dtype=torch.int32, device=device),
                torch.empty(keys, dtype=torch.int32, device=device),
                torch.empty(keys + 1, dtype=torch.int64, device=device),
            )
            for keys in (layout.experts, layout.ranks)
        ]

    def __call__(
        self, ids: Tensor, tokens: int, live_rows: Tensor | None, report: int, limit_ns: int, rank: int
    ) -> tuple[Tensor, ...]:
        """Number of each pair among its expert's, counts and starts by expert, then the same of records by rank."""
        for (assign, threads), (slots, counts, offsets) in zip(self._assign, self._written, strict=True):
            blocks = min(self._sms, max(1, tokens * self._top_k // (threads * PAIRS_PER_THREAD)))
            launch.run(
                assign, slots, ids, live_rows, slots, counts, offsets, self._histograms, self._barrier, report,
                limit_ns, 0, tokens, blocks, rank,
            )  # fmt: skip
        return (*self._written[0], *self._written[1])
