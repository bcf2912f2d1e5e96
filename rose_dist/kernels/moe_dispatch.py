"""MoE dispatch on one GPU: rows are copied into expert order, in an order that the routing alone decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch
from rose_dist.kernels.arch import DeviceInfo
from rose_dist.kernels.expert_slots import MAX_EXPERTS, MAX_K, MAX_PAIRS, PackedLayout
from rose_dist.kernels.peer_regions import ASSIGN_STAGE, STAGES
from rose_dist.kernels.row_groups import GroupedRows
from rose_dist.kernels.row_tiling import RowShape, tile
from rose_dist.kernels.variants import Ranges

DECODE_THREADS = 256
LIMIT_NS = 10_000_000_000
"""After which a wait inside a kernel is given up and reported."""
ASSIGN_WARPS = 8
"""A block; a quarter for more than 1,024 experts, whose histograms would not fit into 48 KB of shared memory."""
SCATTER_SHAPE = RowShape(bytes=64, threads=128)
PAIRS_PER_THREAD = 4
"""Pairs from which on a further block helps to assign slots."""

SPLITS = Ranges((0, 25, 51), (4, 2, 1))
"""Blocks a token by tokens for every 100 SMs, so that few tokens still use many SMs."""


@dataclass(frozen=True)
class PackedRows:
    """Where a dispatch writes."""

    x: Tensor
    """[rows, hidden]."""
    scales: Tensor | None
    """[rows, scale_dim], or by columns: as DeepGEMM wants them, [rows, scale_dim] with strides (1, rows), or [experts,
    rows_per_expert, scale_dim] with strides (scale_dim · rows_per_expert, 1, rows_per_expert).
    """
    slots: Tensor
    """int32 [tokens, k]: each pair's packed row, −1 for none; only of live tokens."""
    counts: Tensor
    """int32 [experts]."""
    offsets: Tensor
    """int64 [experts + 1]: where each expert's rows start; the last is the end."""
    groups: GroupedRows | None = None
    """The rows, in place of `x`."""


class SlotAssigner:
    """`AssignSlots` of one shape on one GPU, loaded, with its scratch memory. One stream at a time."""

    def __init__(
        self, device: torch.device, *, experts: int, first_expert: int, top_k: int, layout: PackedLayout, rank: int,
        limit_ns: int,
    ) -> None:  # fmt: skip
        from rose_dist.kernels import sync  # noqa: PLC0415 - it loads the compiler
        from rose_dist.kernels.cute.moe_dispatch_prefill import AssignSlots  # noqa: PLC0415

        self.top_k, self.first_expert, self.rank, self.limit_ns = top_k, first_expert, rank, limit_ns
        self._barrier = torch.empty(1, dtype=torch.int32, device=device).zero_()
        self.info = launch.device(self._barrier)
        self._histograms = torch.empty(self.info.sms, experts, dtype=torch.int32, device=device)
        self.report = sync.WaitReport({ASSIGN_STAGE: STAGES[ASSIGN_STAGE]})
        warps = ASSIGN_WARPS if experts <= 1024 else max(1, ASSIGN_WARPS // 4)
        kernel = AssignSlots(self.info.arch, experts, top_k, layout, warps=warps)
        self.pairs_per_block = kernel.threads * PAIRS_PER_THREAD
        self._launcher = jit.load(kernel)

    def __call__(
        self, ids: Tensor, tokens: int, live_rows: Tensor | None, out: PackedRows, sources: Tensor | None = None
    ) -> None:
        """Write the slots of the first `tokens` of ids, counts, offsets and, into int32 `sources` [rows], each packed
        row's token (−1: none).
        """
        blocks = min(self.info.sms, -(-tokens * self.top_k // self.pairs_per_block))
        launch.run(
            self._launcher, out.slots, ids, live_rows, out.slots, sources, out.counts, out.offsets, self._histograms,
            self._barrier, self.report.address, self.limit_ns, self.first_expert, tokens, blocks, self.rank,
        )  # fmt: skip


class Dispatcher:
    """Dispatches of one shape on one GPU, with all kernels loaded and all scratch memory allocated.

    One stream at a time: two dispatches must not overlap.
    """

    def __init__(
        self, device: torch.device, *, experts: int, first_expert: int, top_k: int, row_bytes: int, scale_bytes: int,
        layout: PackedLayout, max_tokens: int, column_scales: bool = False, rank: int = 0, limit_ns: int = LIMIT_NS,
    ) -> None:  # fmt: skip
        """`experts` from `first_expert` on are here; other ids are skipped. Sizes are in bytes of a token's row and of
        its scales. `column_scales`: these are fp32, and packed by columns.
        """
        if column_scales:
            checks.multiple("scale_bytes", scale_bytes, 4, "scales by columns are fp32")
        if not 1 <= experts <= MAX_EXPERTS:
            raise checks.fail("experts", f"is {experts}; must be 1 … {MAX_EXPERTS}")
        if not 1 <= top_k <= MAX_K:
            raise checks.fail("top_k", f"is {top_k}; must be 1 … {MAX_K}")
        checks.multiple("row_bytes", row_bytes, 16, "rows are copied 16 bytes at a time")
        from rose_dist.kernels.cute.moe_dispatch_decode import DispatchDecode  # noqa: PLC0415 - it loads the compiler
        from rose_dist.kernels.cute.moe_dispatch_prefill import ScatterRows  # noqa: PLC0415

        self.top_k, self.first_expert = top_k, first_expert
        self._layout = layout
        self.info: DeviceInfo = launch.device(torch.empty(0, device=device))
        arch = self.info.arch
        width, scale_width = launch.widest(arch, row_bytes), launch.widest(arch, scale_bytes)
        common = (experts, top_k, row_bytes, width, scale_bytes, scale_width, column_scales, layout)
        self._decode = {s: jit.load(DispatchDecode(arch, *common, s, DECODE_THREADS)) for s in SPLITS.variants}
        self.assigner: SlotAssigner | None = None
        if self._is_prefill(max_tokens):
            self.assigner = SlotAssigner(
                device, experts=experts, first_expert=first_expert, top_k=top_k, layout=layout, rank=rank,
                limit_ns=limit_ns,
            )  # fmt: skip
            tiling = tile(row_bytes // width, width, SCATTER_SHAPE)
            self._scatter = jit.load(ScatterRows(arch, top_k, tiling, width, scale_bytes, scale_width, column_scales))

    def __call__(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, tokens: int, live_rows: Tensor | None, out: PackedRows
    ) -> None:
        """Dispatch the first `tokens` rows of `x` [tokens, row], or fewer if the device says so: `live_rows` int32 [1].
        `ids` int32 [tokens, top_k].
        """
        group_rows = self._layout.rows_per_expert or out.x.shape[0]
        if self._is_prefill(tokens):
            assert self.assigner is not None
            self.assigner(ids, tokens, live_rows, out)
            launch.run(self._scatter, out.slots, x, scales, out.slots, live_rows, out.x, out.scales, group_rows, tokens)
            return
        decode = self._decode[SPLITS.select(tokens * 100 // self.info.sms)]
        readable = (x, scales) if tokens else (out.x, out.scales)
        launch.run(
            decode, out.slots, *readable, ids, live_rows, out.x, out.scales, out.slots, out.counts, out.offsets,
            self.first_expert, group_rows, tokens,
        )  # fmt: skip

    def check(self) -> None:
        """Raise `WaitExpiredError` if a kernel has waited in vain; reads host memory only."""
        if self.assigner is not None:
            self.assigner.report.check()

    def _is_prefill(self, tokens: int) -> bool:
        return tokens * self.top_k > MAX_PAIRS or tokens > 2 * self.info.sms
