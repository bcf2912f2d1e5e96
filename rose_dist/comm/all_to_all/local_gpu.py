"""`Local` on a GPU: two or three kernel launches on the current stream, and no host in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from rose_dist.comm.all_to_all.packing import check_live
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Dispatched, Handle, Routing
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.group_dispatch import GroupDispatcher
from rose_dist.kernels.moe_combine import combine
from rose_dist.kernels.moe_dispatch import Dispatcher, PackedRows
from rose_dist.kernels.row_groups import GROUPS, GroupedRows
from rose_dist.kernels.variants import Ranges


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """What an all-to-all on a GPU is built for beyond its sizes."""

    device: torch.device
    layout: PackedLayout = field(default_factory=PackedLayout)
    """As the grouped GEMM wants the rows."""
    few_layout: PackedLayout | None = None
    """As it wants them of up to `rows_per_expert` tokens; None: as always."""
    column_scales: bool = False
    """Scales, which are fp32, stand by columns: `PackedRows.scales`."""
    groups: Ranges[torch.dtype | None] | None = None
    """By the number of tokens: the dtype of rows that are packed in groups, as `GroupDispatcher` packs them; None: not
    in groups."""
    late_bias: bool = False
    """`combine` will be given a bias."""
    in_flight: int = 1
    """Dispatches that may wait for their combine at once; each has its own buffers."""
    rank: int = 0
    """To be named in reports of waits that expired."""


class GpuHandle(Handle):
    """A dispatch whose rows are on the GPU. It holds its buffers until `combine` or until it is dropped."""

    packed: PackedRows
    live_rows: torch.Tensor | None
    layout: PackedLayout
    expert_out: torch.Tensor
    bias: torch.Tensor | None = None
    release: Callable[[], object]

    def dispatched(self) -> Dispatched:
        packed = self.packed
        return Dispatched(
            packed.x, packed.scales, packed.counts, packed.offsets, self, self.layout, packed.slots, packed.groups
        )


class LocalGpu:
    """The buffers and kernels of `Local` on one GPU. Used from one stream at a time; fit for CUDA graphs: a captured
    graph serves any routing, and fewer rows if `rows` is a tensor.
    """

    def __init__(self, config: AllToAllConfig, local_experts: range, options: GpuOptions) -> None:
        self.config, self.options = config, options
        self.local_experts = local_experts
        row_bytes = config.hidden * config.dtype.itemsize
        scale_bytes = config.scale_dim * config.scale_dtype.itemsize
        experts = max(len(local_experts), 1)
        self.first_expert = local_experts.start if local_experts else config.num_experts
        self._dispatchers = {
            layout: Dispatcher(
                options.device, experts=experts, first_expert=self.first_expert, top_k=config.top_k,
                row_bytes=row_bytes, scale_bytes=scale_bytes, layout=layout, max_tokens=most,
                column_scales=options.column_scales, rank=options.rank,
            )
            for layout, most in self._layouts()
        }  # fmt: skip
        self._experts = experts
        dtypes = [dtype for dtype in options.groups.variants if dtype] if options.groups else []
        self._group_dispatcher: GroupDispatcher | None = None
        if dtypes:
            self._group_dispatcher = GroupDispatcher(
                options.device, experts=experts, first_expert=self.first_expert, top_k=config.top_k,
                columns=config.hidden, max_tokens=config.max_tokens, dtypes=dtypes, rank=options.rank,
            )  # fmt: skip
        layouts = [*self._layouts(), *([(GROUPS, config.max_tokens)] if dtypes else [])]
        self._most_rows = max(self._rows(layout, most) for layout, most in layouts)
        self._free = [self._buffers(options.device) for _ in range(options.in_flight)]
        self.buffer_bytes = options.in_flight * self._most_rows * (row_bytes + scale_bytes)
        """Of packed rows, which is nearly all."""

    def check(self) -> None:
        """Raise `WaitExpiredError` if a kernel has waited in vain; reads host memory only."""
        for dispatcher in self._dispatchers.values():
            dispatcher.check()
        if self._group_dispatcher is not None:
            self._group_dispatcher.check()

    def send(
        self, owner: AllToAll, x: torch.Tensor, routing: Routing, scales: torch.Tensor | None,
        rows: torch.Tensor | int | None,
    ) -> GpuHandle:  # fmt: skip
        """Dispatch on the current stream; arguments are checked."""
        tokens = x.shape[0] if isinstance(rows, torch.Tensor) else check_live(x.shape[0], rows)
        handle = GpuHandle(owner, routing, x.shape[0], tokens)
        handle.live_rows = rows if isinstance(rows, torch.Tensor) else None
        buffers = self._take()
        handle.release = weakref.finalize(handle, self._free.append, buffers)
        dtype = self._group_dtype(tokens)
        handle.layout = self._layout_for(tokens) if dtype is None else GROUPS
        packed = handle.packed = self._view(buffers, handle.layout, tokens)
        if dtype is None:
            self._dispatchers[handle.layout](x, scales, routing.ids, tokens, handle.live_rows, packed)
        else:
            assert self._group_dispatcher is not None
            packed = handle.packed = replace(packed, groups=GroupedRows.within(packed.x, dtype))
            self._group_dispatcher(x, routing.ids, tokens, handle.live_rows, packed)
        return handle

    def packed_by(self, owner: AllToAll, tokens: int, pack: Callable[[PackedRows], Routing]) -> GpuHandle:
        """A dispatch that `pack` does."""
        buffers = self._take()
        layout = self._layout_for(tokens)
        packed = self._view(buffers, layout, tokens)
        try:
            routing = pack(packed)
        except BaseException:
            self._free.append(buffers)
            raise
        handle = GpuHandle(owner, routing, tokens, tokens)
        handle.release = weakref.finalize(handle, self._free.append, buffers)
        handle.packed, handle.live_rows, handle.layout = packed, None, layout
        return handle

    def combine(self, handle: GpuHandle, out: torch.Tensor, accumulate: bool) -> None:
        """Sum this GPU's experts into `out` and give the buffers back."""
        routing = handle.routing
        combine(
            handle.expert_out, handle.packed.slots, routing.weights, out, tokens=handle.live, accumulate=accumulate,
            ids=routing.ids, bias=handle.bias, first_expert=self.first_expert, live_rows=handle.live_rows,
        )  # fmt: skip
        handle.release()

    def _take(self) -> PackedRows:
        if not self._free:
            raise RuntimeError("all buffers wait for their combine: build the all-to-all with a larger in_flight")
        return self._free.pop()

    def _layouts(self) -> list[tuple[PackedLayout, int]]:
        """Each with the most tokens that it is used for."""
        few, most = self.options.few_layout, self.config.max_tokens
        if few is None:
            return [(self.options.layout, most)]
        if most <= few.rows_per_expert:
            return [(few, most)]
        return [(few, few.rows_per_expert), (self.options.layout, most)]

    def _layout_for(self, tokens: int) -> PackedLayout:
        few = self.options.few_layout
        return self.options.layout if few is None or tokens > few.rows_per_expert else few

    def _group_dtype(self, tokens: int) -> torch.dtype | None:
        return None if self.options.groups is None or not tokens else self.options.groups.select(tokens)

    def _rows(self, layout: PackedLayout, tokens: int) -> int:
        return max(layout.alignment, layout.capacity(tokens * self.config.top_k, self._experts))

    def _buffers(self, device: torch.device) -> PackedRows:
        config, rows = self.config, self._most_rows
        scales = None
        if config.scale_dim:
            scales = torch.empty(rows, config.scale_dim, dtype=config.scale_dtype, device=device)
        return PackedRows(
            torch.empty(rows, config.hidden, dtype=config.dtype, device=device),
            scales,
            torch.empty(config.max_tokens, config.top_k, dtype=torch.int32, device=device),
            torch.empty(self._experts, dtype=torch.int32, device=device),
            torch.empty(self._experts + 1, dtype=torch.int64, device=device),
        )

    def _view(self, buffers: PackedRows, layout: PackedLayout, tokens: int) -> PackedRows:
        """The part that so many tokens can fill."""
        rows = self._rows(layout, tokens)
        scales = None if buffers.scales is None else buffers.scales[:rows]
        if scales is not None and self.options.column_scales:
            grouped = scales.view(-1, self.config.scale_dim, layout.rows_per_expert or rows).transpose(1, 2)
            scales = grouped if layout.rows_per_expert else grouped[0]
        return PackedRows(buffers.x[:rows], scales, buffers.slots[:tokens], buffers.counts, buffers.offsets)
