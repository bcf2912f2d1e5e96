"""`Local` on a GPU: two or three kernel launches on the current stream, and no host in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rose_dist.comm.all_to_all.packing import check_live
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Dispatched, Handle, Routing
from rose_dist.kernels.expert_slots import PackedChoice, PackedLayout
from rose_dist.kernels.moe_combine import combine
from rose_dist.kernels.moe_dispatch import Dispatcher, PackedRows


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """What an all-to-all on a GPU is built for beyond its sizes."""

    device: torch.device
    layout: PackedLayout = field(default_factory=PackedLayout)
    """As the grouped GEMM wants the rows."""
    in_flight: int = 1
    """Dispatches that may wait for their combine at once; each has its own buffers."""
    rank: int = 0
    """To be named in reports of waits that expired."""


class GpuHandle(Handle):
    """A dispatch whose rows are on the GPU. It holds its buffers until `combine` or until it is dropped."""

    packed: PackedRows
    choice: PackedChoice | None = None
    live_rows: torch.Tensor | None
    expert_out: torch.Tensor
    release: Callable[[], object]

    def dispatched(self) -> Dispatched:
        packed = self.packed
        return Dispatched(packed.x, packed.scales, packed.counts, packed.offsets, self, self.choice)


class LocalGpu:
    """The buffers and kernels of `Local` on one GPU. Used from one stream at a time; fit for CUDA graphs: a captured
    graph serves any routing, and fewer rows if `rows` is a tensor.
    """

    def __init__(self, config: AllToAllConfig, local_experts: range, options: GpuOptions) -> None:
        self.config, self.layout = config, options.layout
        self.local_experts = local_experts
        row_bytes = config.hidden * config.dtype.itemsize
        scale_bytes = config.scale_dim * config.scale_dtype.itemsize
        experts = max(len(local_experts), 1)
        self.dispatcher = Dispatcher(
            options.device, experts=experts, first_expert=local_experts.start if local_experts else config.num_experts,
            top_k=config.top_k, row_bytes=row_bytes, scale_bytes=scale_bytes, layout=options.layout,
            max_tokens=config.max_tokens, rank=options.rank,
        )  # fmt: skip
        self._experts = experts
        self._free = [self._buffers(options.device) for _ in range(options.in_flight)]
        self.buffer_bytes = options.in_flight * self._rows(config.max_tokens) * (row_bytes + scale_bytes)
        """Of packed rows, which is nearly all."""

    def check(self) -> None:
        """Raise `WaitExpiredError` if a kernel has waited in vain; reads host memory only."""
        self.dispatcher.report.check()

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
        self.dispatcher(x, scales, routing.ids, tokens, handle.live_rows, buffers)
        handle.packed = self._view(buffers, tokens)
        packed_as_chosen = self.layout == PackedLayout()
        choice = PackedChoice(routing.ids[:tokens], handle.live_rows, self.dispatcher.first_expert)
        handle.choice = choice if packed_as_chosen else None
        return handle

    def packed_by(self, owner: AllToAll, tokens: int, pack: Callable[[PackedRows], Routing]) -> GpuHandle:
        """A dispatch that `pack` does."""
        buffers = self._take()
        packed = self._view(buffers, tokens)
        try:
            routing = pack(packed)
        except BaseException:
            self._free.append(buffers)
            raise
        handle = GpuHandle(owner, routing, tokens, tokens)
        handle.release = weakref.finalize(handle, self._free.append, buffers)
        handle.packed, handle.live_rows = packed, None
        return handle

    def combine(self, handle: GpuHandle, out: torch.Tensor, accumulate: bool) -> None:
        """Sum this GPU's experts into `out` and give the buffers back."""
        weights = handle.routing.weights
        combine(
            handle.expert_out, handle.packed.slots, weights, out, tokens=handle.live, accumulate=accumulate,
            live_rows=handle.live_rows,
        )  # fmt: skip
        handle.release()

    def _take(self) -> PackedRows:
        if not self._free:
            raise RuntimeError("all buffers wait for their combine: build the all-to-all with a larger in_flight")
        return self._free.pop()

    def _rows(self, tokens: int) -> int:
        return max(1, self.layout.capacity(tokens * self.config.top_k, self._experts))

    def _buffers(self, device: torch.device) -> PackedRows:
        config, rows = self.config, self._rows(self.config.max_tokens)
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

    def _view(self, buffers: PackedRows, tokens: int) -> PackedRows:
        """The part that so many tokens can fill."""
        rows = self._rows(tokens)
        scales = None if buffers.scales is None else buffers.scales[:rows]
        return PackedRows(buffers.x[:rows], scales, buffers.slots[:tokens], buffers.counts, buffers.offsets)
