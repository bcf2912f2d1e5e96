"""MoE dispatch of many tokens on one Hopper GPU, into the groups in which its expert GEMMs read rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch
from rose_dist.kernels.moe_dispatch import LIMIT_NS, PackedRows, SlotAssigner
from rose_dist.kernels.row_groups import GROUPS
from rose_dist.kernels.warpgroup_tiling import ROW_GROUP


class GroupDispatcher:
    """`Dispatcher` for bf16 rows, whose results are `PackedRows.groups`. A token's codes are made once, and copied."""

    def __init__(
        self, device: torch.device, *, experts: int, first_expert: int, top_k: int, columns: int,
        max_tokens: int, dtypes: Sequence[torch.dtype], rank: int = 0, limit_ns: int = LIMIT_NS,
    ) -> None:  # fmt: skip
        """dtypes: of the groups: bf16, uint8 for e4m3's codes or both."""
        from rose_dist.kernels.cute.row_groups import (  # noqa: PLC0415 - it loads the compiler
            GatherGroups,
            QuantizeRows,
            RowCells,
        )

        checks.multiple("columns", columns, 16, "they are packed in cells")
        self._experts, self._top_k = experts, top_k
        self._assigner = SlotAssigner(
            device, experts=experts, first_expert=first_expert, top_k=top_k, layout=GROUPS, rank=rank, limit_ns=limit_ns
        )
        arch = self._assigner.info.arch
        cells = {dtype: RowCells(columns, dtype is torch.uint8) for dtype in dtypes}
        self._gather = {dtype: jit.load(GatherGroups(arch, experts, each)) for dtype, each in cells.items()}
        if torch.uint8 in dtypes:
            self._quantize = jit.load(QuantizeRows(arch, cells[torch.uint8]))
            self._codes = torch.empty(max_tokens, columns, dtype=torch.uint8, device=device)
            self._scales = torch.empty(max_tokens, dtype=torch.float32, device=device)
        most = GROUPS.capacity(max_tokens * top_k, experts)
        self._sources = torch.empty(most, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, ids: Tensor, tokens: int, live_rows: Tensor | None, out: PackedRows) -> None:
        """Dispatch the first `tokens` rows of `x` [tokens, columns], as `Dispatcher`."""
        groups = out.groups
        assert groups is not None
        self._assigner(ids, tokens, live_rows, out, self._sources)
        rows, scales = x, None
        if groups.scales is not None:
            rows, scales = self._codes, self._scales
            launch.run(self._quantize, x, x, rows, scales, tokens)
        gather = self._gather[groups.cells.dtype]
        most = GROUPS.capacity(tokens * self._top_k, self._experts) // ROW_GROUP
        launch.run(gather, x, rows, scales, self._sources, out.offsets, groups.cells, groups.scales, tokens, most)

    def check(self) -> None:
        """As `Dispatcher.check`."""
        self._assigner.report.check()
