"""Local MoE dispatch against the torch reference, bit by bit; the matrix follows published bugs of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rose_dist.kernels import expert_slots, moe_dispatch
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.moe_dispatch import Dispatcher, PackedRows

COMPACT, CONTIGUOUS = PackedLayout(), PackedLayout(16)


@dataclass(frozen=True, kw_only=True)
class Case:
    tokens: int = 5
    experts: int = 8
    top_k: int = 4
    row_bytes: int = 64
    scale_bytes: int = 0
    column_scales: bool = False
    routing: str = "uniform"
    layout: PackedLayout = COMPACT
    live: int | None = None
    first_expert: int = 0
    held: int = 0
    """Local experts; 0: all."""


def make_ids(case: Case) -> torch.Tensor:  # noqa: PLR0911 - one a kind
    shape = (case.tokens, case.top_k)
    match case.routing:
        case "one expert":
            return torch.zeros(shape, dtype=torch.int32)
        case "last expert":
            return torch.full(shape, case.experts - 1, dtype=torch.int32)
        case "same":
            return torch.arange(case.top_k).remainder(case.experts).int().expand(shape).contiguous()
        case "skips":
            return torch.randint(-1, min(2, case.experts), shape, dtype=torch.int32)
        case "all skipped":
            return torch.full(shape, -1, dtype=torch.int32)
        case "duplicates":
            return torch.randint(case.experts, (case.tokens, 1), dtype=torch.int32).expand(shape).contiguous()
        case "out of range":
            return torch.tensor([-(2**31), -2, case.experts, 2**31 - 1]).int().expand(shape).contiguous()
    return (
        torch.rand(case.tokens, max(case.experts, case.top_k))
        .argsort(1)[:, : case.top_k]
        .remainder(case.experts)
        .int()
        .contiguous()
    )


CASES = {
    "T-ZERO-ALL": Case(tokens=0),
    "T-ZERO-BOUND": Case(tokens=4, live=0),
    "T-ONE": Case(tokens=1),
    "T-ODD": Case(tokens=37, top_k=2),
    "T-256": Case(tokens=131),
    "T-PADROWS": Case(tokens=8, live=5),
    "R-NEG1: some skipped": Case(routing="skips"),
    "R-NEG1: all skipped": Case(routing="all skipped"),
    "R-OOR": Case(routing="out of range"),
    "R-DUP": Case(routing="duplicates"),
    "R-HOT": Case(tokens=40, routing="last expert"),
    "R-IDENT": Case(tokens=33, routing="same"),
    "R-ELOCAL1": Case(experts=1, top_k=1),
    "R-MANYEXPERTS": Case(experts=1030, tokens=20),
    "S-2880 with a part of the experts": Case(row_bytes=5760, tokens=3, first_expert=3, held=4),
    "S-16384": Case(row_bytes=32768, tokens=2, top_k=2),
    "fp8 with scales": Case(row_bytes=2880, scale_bytes=92, tokens=3),
    "fp8 with scales by columns": Case(
        row_bytes=2880, scale_bytes=92, tokens=9, layout=CONTIGUOUS, column_scales=True
    ),
    "fp8 with scales by columns, masked": Case(
        row_bytes=2880, scale_bytes=92, tokens=9, layout=PackedLayout(16, 16), column_scales=True, routing="skips",
    ),
    "one-byte scales": Case(row_bytes=48, scale_bytes=3),
    "contiguous": Case(layout=CONTIGUOUS, tokens=9),
    "contiguous, skips": Case(layout=CONTIGUOUS, tokens=9, routing="skips"),
    "masked": Case(layout=PackedLayout(16, 16), tokens=9),
    "masked, too many for one expert": Case(layout=PackedLayout(4, 8), tokens=9, routing="one expert"),
    **{f"R-TOPK {k}": Case(top_k=k, experts=37, tokens=6) for k in (1, 2, 3, 6, 8, 9, 10, 16, 22, 32)},
}  # fmt: skip


class Run:
    """One dispatcher's buffers and data on a GPU."""

    def __init__(self, gpu: Any, case: Case, prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu, self.case = gpu, case
        self.held = case.held or case.experts
        pairs = max(case.tokens, 1) * case.top_k
        rows = case.layout.capacity(pairs, self.held)
        device = torch.device("cuda", 0)
        empty = lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device=device)  # noqa: E731
        if prefill:
            monkeypatch.setattr(moe_dispatch, "MAX_PAIRS", 0)
            monkeypatch.setattr(moe_dispatch, "ASSIGN_WARPS", 2)
        self.dispatcher = Dispatcher(
            device, experts=self.held, first_expert=case.first_expert, top_k=case.top_k, row_bytes=case.row_bytes,
            scale_bytes=case.scale_bytes, layout=case.layout, max_tokens=max(case.tokens, 1),
            column_scales=case.column_scales,
        )  # fmt: skip
        if prefill:
            assert self.dispatcher.assigner is not None
            self.dispatcher.assigner.pairs_per_block = 13  # several blocks for few pairs
        self.out = PackedRows(
            empty(rows, case.row_bytes, dtype=torch.uint8),
            empty(rows, case.scale_bytes, dtype=torch.uint8) if case.scale_bytes else None,
            empty(max(case.tokens, 1), case.top_k, dtype=torch.int32),
            empty(self.held, dtype=torch.int32),
            empty(self.held + 1, dtype=torch.int64),
        )

    def __call__(self) -> None:
        """Dispatch fresh data and compare."""
        case, gpu = self.case, self.gpu
        x = torch.randint(256, (case.tokens, case.row_bytes), dtype=torch.uint8)
        scales = torch.randint(256, (case.tokens, case.scale_bytes), dtype=torch.uint8)
        ids = make_ids(case)
        live = case.tokens if case.live is None else case.live
        bound = None if case.live is None else gpu.tensor(torch.tensor([live], dtype=torch.int32))
        before = gpu.plain(self.out.x)
        moved_scales = gpu.tensor(scales) if case.scale_bytes else None
        self.dispatcher(gpu.tensor(x), moved_scales, gpu.tensor(ids), case.tokens, bound, self.out)
        slots, counts, starts = expert_slots.reference(ids, live, case.first_expert, self.held, case.layout)
        assert gpu.plain(self.out.counts).tolist() == counts.tolist()
        assert gpu.plain(self.out.offsets).tolist() == starts.tolist()
        assert torch.equal(gpu.plain(self.out.slots)[:live], slots[:live])
        expected, packed = before, gpu.plain(self.out.x)
        held = slots[:live] >= 0
        tokens = torch.arange(live)[:, None].expand_as(held)[held]
        expected[slots[:live][held].long()] = x[tokens]
        assert torch.equal(packed, expected), "rows that no pair has must stay as they were"
        if case.scale_bytes:
            packed_scales = gpu.plain(self.out.scales)
            if case.column_scales:
                packed_scales = by_rows(packed_scales, case)
            assert torch.equal(packed_scales[slots[:live][held].long()], scales[tokens])


def by_rows(packed: torch.Tensor, case: Case) -> torch.Tensor:
    """Bytes [rows, scales] of fp32 scales that stand by columns."""
    words = packed.view(torch.int32).view(-1, case.scale_bytes // 4, case.layout.rows_per_expert or packed.shape[0])
    return words.transpose(1, 2).reshape(-1, case.scale_bytes // 4).contiguous().view(torch.uint8)


@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", CASES)
def test_matrix(gpu: Any, name: str, prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(gpu, CASES[name], prefill, monkeypatch)
    for _ in range(2):
        run()
