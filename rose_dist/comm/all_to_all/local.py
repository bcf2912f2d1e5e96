"""All experts are here: nothing travels, rows are put in expert order and summed back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rose_dist.comm.all_to_all.local_gpu import GpuHandle, GpuOptions, LocalGpu
from rose_dist.comm.all_to_all.packing import (
    Packing,
    check_combine,
    check_live,
    check_out,
    check_shapes,
    starts,
    travelling,
    weighted_sum,
    write_out,
)
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Dispatched, Handle, Routing
from rose_dist.kernels.combine_norm import combine_norm
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.moe_dispatch import PackedRows


class LocalHandle(Handle):
    """Between the halves: the rows in expert order, then the experts' results."""

    packing: Packing
    x: torch.Tensor
    scales: torch.Tensor | None
    expert_out: torch.Tensor

    def dispatched(self) -> Dispatched:
        counts = self.packing.counts
        return Dispatched(
            x=self.x,
            scales=self.scales,
            counts=torch.from_numpy(counts).int(),
            offsets=torch.from_numpy(starts(counts)),
            handle=self,
        )


class Local(AllToAll):
    """The all-to-all of one rank that holds every expert, or those of `local_experts`: other ids are skipped.

    With `gpu` it also takes tensors of that GPU.
    """

    def __init__(
        self, config: AllToAllConfig, local_experts: range | None = None, gpu: GpuOptions | None = None
    ) -> None:
        self.config = config
        self.local_experts = range(config.num_experts) if local_experts is None else local_experts
        self.rows_sent = 0
        self.gpu = None if gpu is None else LocalGpu(config, self.local_experts, gpu)

    def dispatch_send(
        self,
        x: torch.Tensor,
        routing: Routing,
        *,
        scales: torch.Tensor | None = None,
        rows: torch.Tensor | int | None = None,
    ) -> LocalHandle | GpuHandle:
        check_shapes(self.config, x, routing, scales)
        if x.is_cuda:
            live_rows = rows if isinstance(rows, torch.Tensor) else None
            x, scales = travelling(self.config, x, scales, live_rows)
            return self._on_gpu().send(self, x, routing, scales, rows)
        live = check_live(x.shape[0], rows)
        x, scales = travelling(self.config, x, scales)
        handle = LocalHandle(self, routing, x.shape[0], live)
        handle.packing = Packing.of(routing, live, self.config.num_experts, self.local_experts)
        index = torch.from_numpy(handle.packing.tokens)
        handle.x = x.index_select(0, index)
        handle.scales = None if scales is None else scales.index_select(0, index)
        return handle

    def dispatch_recv(self, handle: Handle) -> Dispatched:
        assert isinstance(handle, LocalHandle | GpuHandle)
        handle.enter(self, "dispatch_recv")
        return handle.dispatched()

    def combine(
        self, expert_out: torch.Tensor, dispatched: Dispatched, *, out: torch.Tensor, accumulate: bool = False,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        handle = dispatched.handle
        if isinstance(handle, GpuHandle):
            handle.bias, bias = bias, None  # the kernel that sums adds it
        super().combine(expert_out, dispatched, out=out, accumulate=accumulate, bias=bias)

    def combine_send(self, expert_out: torch.Tensor, dispatched: Dispatched) -> None:
        handle = dispatched.handle
        assert isinstance(handle, LocalHandle | GpuHandle)
        check_combine(self.config, expert_out, dispatched.x.shape[0])
        handle.enter(self, "combine_send")
        handle.expert_out = expert_out

    def combine_recv(self, dispatched: Dispatched, *, out: torch.Tensor, accumulate: bool = False) -> None:
        handle = dispatched.handle
        assert isinstance(handle, LocalHandle | GpuHandle)
        check_out(self.config, out, handle.tokens)
        handle.enter(self, "combine_recv")
        if isinstance(handle, GpuHandle):
            self.reduce_on_gpu(handle, out, accumulate)
        else:
            write_out(self.reduce(handle), out, handle.live, accumulate)

    @property
    def packs_only(self) -> bool:
        return self._packs_compactly and len(self.local_experts) == self.config.num_experts

    @property
    def holds_all(self) -> bool:
        return self.packs_only and type(self) is Local

    @property
    def _packs_compactly(self) -> bool:
        return self.gpu is not None and not self.config.scale_dim and self.gpu.options.layout == PackedLayout()

    def dispatch_packed(self, tokens: int, pack: Callable[[PackedRows], Routing]) -> Dispatched:
        handle = self._on_gpu().packed_by(self, tokens, pack)
        handle.enter(self, "dispatch_recv")
        return handle.dispatched()

    def combine_norm(
        self, expert_out: torch.Tensor, dispatched: Dispatched, residual: torch.Tensor, norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:  # fmt: skip
        handle = self._end(expert_out, dispatched)
        handle.expert_out = expert_out
        result = self.reduce_norm_on_gpu(handle, residual, norm_weight, eps)
        handle.release()
        return result

    def results(self, expert_out: torch.Tensor, dispatched: Dispatched) -> tuple[torch.Tensor, torch.Tensor]:
        handle = self._end(expert_out, dispatched)
        handle.release()
        return handle.packed.slots, handle.routing.weights

    def _end(self, expert_out: torch.Tensor, dispatched: Dispatched) -> GpuHandle:
        """The handle of a dispatch whose combine is in another launch."""
        handle = dispatched.handle
        assert isinstance(handle, GpuHandle)
        check_combine(self.config, expert_out, dispatched.x.shape[0])
        handle.enter(self, "combine_send")
        handle.enter(self, "combine_recv")
        return handle

    def reduce_norm_on_gpu(
        self, handle: GpuHandle, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the weighted sums over all experts to `residual`; returns that, normalised."""
        return combine_norm(handle.expert_out, handle.packed.slots, handle.routing.weights, residual, norm_weight, eps)

    def check(self) -> None:
        """Raise `WaitExpiredError` if a kernel on the GPU has waited in vain; to be called once a step, after it."""
        if self.gpu is not None:
            self.gpu.check()

    def reduce_on_gpu(self, handle: GpuHandle, out: torch.Tensor, accumulate: bool) -> None:
        """Leave the weighted sums over all experts in `out`."""
        self._on_gpu().combine(handle, out, accumulate)

    def _on_gpu(self) -> LocalGpu:
        if self.gpu is None:
            raise ValueError("this all-to-all was built for CPU tensors: give it GpuOptions")
        return self.gpu

    def reduce(self, handle: LocalHandle) -> torch.Tensor:
        """[live, hidden] fp32: the weighted sums over this rank's experts."""
        return weighted_sum(handle.expert_out, handle.packing.slots, handle.routing.weights[: handle.live])
