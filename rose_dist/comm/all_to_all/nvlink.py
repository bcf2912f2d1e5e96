"""Rows between data-parallel GPUs of one NVLink domain: straight into the peers' memory, and no host in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from rose_dist.comm.all_to_all.agreement import agree
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.packing import check_combine, check_live, check_out, check_shapes, travelling
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Dispatched, Handle, Routing, with_bias
from rose_dist.comm.layout import even_split
from rose_dist.comm.symmetric_memory import Ranks, Region
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import CHUNK, NVLINK_CHUNKS, PACKET_TOKENS, RESULT_PACKET_BYTES
from rose_dist.kernels.expert_exchange import ExpertExchange, ReceivedRows, received_rows


class NvLinkHandle(Handle):
    """A dispatch on its way. It holds its buffers until `combine` or until it is dropped."""

    live_rows: torch.Tensor | None
    received: ReceivedRows
    release: Callable[[], object]


class NvLink(AllToAll):
    """Used from one stream at a time; fit for CUDA graphs: a captured graph serves any routing, and fewer rows if
    `rows` is a tensor. Halves are to be called in the same order on all ranks, each kind in the order of the sends.
    """

    def __init__(
        self, config: AllToAllConfig, group: Ranks, options: GpuOptions, take: Callable[[int], Region], sms: int
    ) -> None:
        """Collective over `group`, whose GPUs reach one another's memory. `take` gives zeroed symmetric memory, as
        `SymmetricMemory.take` does; `sms`: of the smallest GPU.
        """
        agree(config, group)
        self.config = config
        self.local_experts = even_split(config.num_experts, group.size, group.rank)
        self.layout = self.lay_out(config, group.size, options.in_flight)
        agree(self.layout, group)
        region = take(self.layout.region_bytes)
        self.exchange = self.build(group, options, take, region, sms)
        self._region = region
        self._free = [received_rows(self.layout, options.layout, options.device) for _ in range(options.in_flight)]

    def lay_out(self, config: AllToAllConfig, ranks: int, in_flight: int) -> ExchangeLayout:
        """Of the memory that ranks write into; the same on all."""
        return exchange_layout(config, ranks, in_flight)

    def build(
        self, group: Ranks, options: GpuOptions, take: Callable[[int], Region], region: Region, sms: int
    ) -> ExpertExchange:
        """The kernels, over this rank's `region` and its peers'."""
        return ExpertExchange(
            self.layout, options.device, group.rank, region.addresses, packed=options.layout,
            result_dtype=self.config.expert_dtype, sms=sms,
        )  # fmt: skip

    @property
    def rows_sent(self) -> torch.Tensor:  # type: ignore[override]  # read-only here
        return self.exchange.sent

    def check(self) -> None:
        """Raise `WaitExpiredError` if a kernel has waited in vain; to be called once a step, after it."""
        self.exchange.check()

    def dispatch(
        self, x: torch.Tensor, routing: Routing, *, scales: torch.Tensor | None = None,
        rows: torch.Tensor | int | None = None,
    ) -> Dispatched:  # fmt: skip
        handle = self._start(x, routing, scales, rows)
        handle.enter(self, "dispatch_recv")
        x, scales = self._travelling(x, scales, handle)
        self.exchange.dispatch(x, scales, routing.ids, routing.weights, handle.live, handle.live_rows, handle.received)
        return self._dispatched(handle)

    def dispatch_send(
        self, x: torch.Tensor, routing: Routing, *, scales: torch.Tensor | None = None,
        rows: torch.Tensor | int | None = None,
    ) -> NvLinkHandle:  # fmt: skip
        handle = self._start(x, routing, scales, rows)
        x, scales = self._travelling(x, scales, handle)
        self.exchange.dispatch_send(x, scales, routing.ids, routing.weights, handle.live, handle.live_rows)
        return handle

    def dispatch_recv(self, handle: Handle) -> Dispatched:
        assert isinstance(handle, NvLinkHandle)
        handle.enter(self, "dispatch_recv")
        self.exchange.dispatch_receive(handle.received, handle.live)
        return self._dispatched(handle)

    def combine(
        self, expert_out: torch.Tensor, dispatched: Dispatched, *, out: torch.Tensor, accumulate: bool = False,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        expert_out = with_bias(expert_out, dispatched, bias)
        handle = self._check_results(expert_out, dispatched)
        check_out(self.config, out, handle.tokens)
        handle.enter(self, "combine_recv")
        routing = handle.routing
        self.exchange.combine(
            expert_out, handle.received, routing.ids, routing.weights, out, tokens=handle.live,
            live_rows=handle.live_rows, accumulate=accumulate,
        )  # fmt: skip
        handle.release()

    def combine_send(self, expert_out: torch.Tensor, dispatched: Dispatched) -> None:
        handle = self._check_results(expert_out, dispatched)
        self.exchange.combine_send(expert_out, handle.received, handle.live)

    def combine_recv(self, dispatched: Dispatched, *, out: torch.Tensor, accumulate: bool = False) -> None:
        handle = dispatched.handle
        assert isinstance(handle, NvLinkHandle)
        check_out(self.config, out, handle.tokens)
        handle.enter(self, "combine_recv")
        routing = handle.routing
        self.exchange.combine_receive(
            routing.ids, routing.weights, out, tokens=handle.live, live_rows=handle.live_rows, accumulate=accumulate
        )
        handle.release()

    def _start(
        self, x: torch.Tensor, routing: Routing, scales: torch.Tensor | None, rows: torch.Tensor | int | None
    ) -> NvLinkHandle:
        check_shapes(self.config, x, routing, scales)
        if not self._free:
            raise RuntimeError("all buffers wait for their combine: build the all-to-all with a larger in_flight")
        tokens = x.shape[0] if isinstance(rows, torch.Tensor) else check_live(x.shape[0], rows)
        handle = NvLinkHandle(self, routing, x.shape[0], tokens)
        handle.live_rows = rows if isinstance(rows, torch.Tensor) else None
        handle.received = self._free.pop()
        handle.release = weakref.finalize(handle, self._free.append, handle.received)
        return handle

    def _travelling(
        self, x: torch.Tensor, scales: torch.Tensor | None, handle: NvLinkHandle
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the kernels are given: they quantise few rows themselves."""
        if self.exchange.fuses(handle.live):
            return x, scales
        return travelling(self.config, x, scales, handle.live_rows)

    def _dispatched(self, handle: NvLinkHandle) -> Dispatched:
        received, local, config = handle.received, len(self.local_experts), self.config
        scales: Any = received.scales
        return Dispatched(
            x=received.x.view(config.dtype),
            scales=None if scales is None else scales.view(config.scale_dtype),
            counts=received.counts[:local],
            offsets=received.offsets[: local + 1],
            handle=handle,
        )

    def _check_results(self, expert_out: torch.Tensor, dispatched: Dispatched) -> NvLinkHandle:
        handle = dispatched.handle
        assert isinstance(handle, NvLinkHandle)
        check_combine(self.config, expert_out, dispatched.x.shape[0])
        handle.enter(self, "combine_send")
        return handle


def exchange_layout(
    config: AllToAllConfig, ranks: int, in_flight: int, *, network: bool = False, node_ranks: int = 0
) -> ExchangeLayout:
    """Of the memory that so many ranks need; raises `KernelArgumentError` for sizes that don't fit. network: some are
    on other nodes, whose messages are larger and carry rows as they are given. node_ranks: of each node, if it is that
    which makes partial sums.
    """
    result_bytes = config.hidden * config.expert_dtype.itemsize
    return ExchangeLayout(
        ranks=ranks, experts=config.num_experts, top_k=config.top_k, max_tokens=config.max_tokens,
        row_bytes=config.hidden * config.dtype.itemsize, scale_bytes=config.scale_dim * config.scale_dtype.itemsize,
        result_bytes=result_bytes, in_flight=in_flight,
        most_packet_tokens=PACKET_TOKENS, most_result_packet_bytes=1 << 62 if network else RESULT_PACKET_BYTES,
        chunk=CHUNK if network else NVLINK_CHUNKS.select(result_bytes), quantized=None if network else config.quantized,
        partial_sums=config.partial_sums and not node_ranks, node_ranks=node_ranks,
    )  # fmt: skip
