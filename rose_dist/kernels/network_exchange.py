"""MoE dispatch and combine between GPUs of several nodes: messages between nodes, NVLink inside each.

What stands where, and why it is safe: `network_layout`. Every half is up to two launches more than `ExpertExchange`'s:
messages leave before anything goes over NVLink, so that it hides behind them, and are landed before what arrived over
NVLink is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from rose_dist.kernels import jit, launch
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.expert_exchange import ExpertExchange, ReceivedRows
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.moe_dispatch import LIMIT_NS
from rose_dist.kernels.network_layout import RECORDS, NetworkLayout


class NetworkExchange(ExpertExchange):
    """`ExpertExchange` where some ranks are across the network."""

    def __init__(
        self, layout: ExchangeLayout, device: torch.device, rank: int, regions: tuple[int, ...], *, network: int,
        far: Sequence[int], rails: Sequence[int] | None = None, packed: PackedLayout, result_dtype: torch.dtype,
        sms: int, limit_ns: int = LIMIT_NS,
    ) -> None:  # fmt: skip
        """`regions`: as for `ExpertExchange`, 0 for the ranks `far`, which are in the order of sending; `network`: the
        address of this rank's network region of `NetworkLayout.region_bytes` zeroed bytes of symmetric memory. With
        `rails`, this rank's peer of each other node in the order of sending, those forward: nodes are then equally
        many neighbours in rank order.
        """
        super().__init__(
            layout, device, rank, regions, packed=packed, result_dtype=result_dtype, sms=sms, limit_ns=limit_ns
        )
        self.network = NetworkLayout(layout, 1 if rails is None else layout.ranks // (len(rails) + 1))
        self._across = (_on_device(far, torch.int32, device), len(far), network)
        senders = far if rails is None else rails
        self._rails = (_on_device(senders, torch.int32, device), len(senders), network)
        if self.network.sums:
            self._returns = _on_device(self._return_regions(regions), torch.int64, device)
        for kernel in ("SendRecords", "LandRecords", "SumNode" if self.network.sums else "SendResults", "LandResults"):
            self._kernel(kernel)
        if layout.has_rows:
            self._row_kernel()
            self._kernel("LandResultRows")
            boxes, groups = network + self.network.start("row_outbox"), [to // self.network.members for to in senders]
            bases = [
                boxes + group * layout.source_record_bytes if group in groups else 0
                for group in range(self.network.groups)
            ]
            self._outboxes = _on_device(bases, torch.int64, device)

    def _return_regions(self, regions: tuple[int, ...]) -> list[int]:
        """Where results for each source go: of other nodes, to the rank of this one that is on the source's rail."""
        members, found = self.network.members, []
        first = self.rank - self.rank % members
        for source, region in enumerate(regions):
            rail = regions[first + source % members] + self.layout.node_region(source // members)
            found.append(region or rail)
        return found

    def dispatch(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, tokens: int, live_rows: Tensor | None,
        out: ReceivedRows,
    ) -> None:  # fmt: skip
        """Both halves."""
        self.dispatch_send(x, scales, ids, weights, tokens, live_rows)
        self.dispatch_receive(out, tokens)

    def dispatch_send(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, tokens: int, live_rows: Tensor | None
    ) -> None:
        if tokens > self.layout.packet_tokens:
            self._send_rows(x, scales, ids, weights, tokens, live_rows)
            return
        blocks = self._message_blocks(max(1, -(-tokens // RECORDS)), self._rails)
        self._run(
            "SendRecords", x, scales, ids, weights, live_rows, *self._rails, self._state.data_ptr(), self.rank, tokens,
            blocks,
        )  # fmt: skip
        super().dispatch_send(x, scales, ids, weights, tokens, live_rows)

    def dispatch_receive(self, out: ReceivedRows, tokens: int) -> None:
        messages = self.layout.chunks if self.network.forwards_rows else self.network.record_messages
        blocks = self._message_blocks(messages, self._rails)
        self._run("LandRecords", *self._rails, self._peers, self._state.data_ptr() + 8, *self._wait, blocks)
        super().dispatch_receive(out, tokens)

    def combine(
        self, expert_out: Tensor, received: ReceivedRows, ids: Tensor, weights: Tensor, out: Tensor, *, tokens: int,
        live_rows: Tensor | None, accumulate: bool,
    ) -> None:  # fmt: skip
        """Both halves."""
        self.combine_send(expert_out, received, tokens)
        self.combine_receive(ids, weights, out, tokens=tokens, live_rows=live_rows, accumulate=accumulate)

    def combine_send(self, expert_out: Tensor, received: ReceivedRows, tokens: int) -> None:
        if self.network.sums:
            super().combine_send(expert_out, received, tokens)
            self._run(
                "SumNode", *self._rails, self._own, self._state.data_ptr() + 16, *self._wait,
                self._message_blocks(self.network.result_messages, self._rails),
            )  # fmt: skip
            return
        stride = expert_out.stride(0) * expert_out.element_size()
        tables = (received.sources, received.tokens, received.slots, received.runs)
        self._run(
            "SendResults", expert_out, stride, *tables, *self._across, self._state.data_ptr() + 16, self.rank,
            self._message_blocks(self.network.result_messages, self._across),
        )  # fmt: skip
        super().combine_send(expert_out, received, tokens)

    def combine_receive(
        self, ids: Tensor, weights: Tensor, out: Tensor, *, tokens: int, live_rows: Tensor | None, accumulate: bool
    ) -> None:
        across = self._rails if self.network.sums else self._across
        blocks = self._message_blocks(max(1, -(-tokens // RECORDS)), across)
        if tokens > self.layout.packet_tokens:
            self._run(
                "LandResultRows", live_rows, *across, self._own, self._state.data_ptr() + 24, *self._wait,
                tokens, blocks,
            )  # fmt: skip
            super().combine_receive(ids, weights, out, tokens=tokens, live_rows=live_rows, accumulate=accumulate)
            return
        self._run(
            "LandResults", ids, live_rows, *across, self._own, self._state.data_ptr() + 24, *self._wait, tokens,
            blocks,
        )  # fmt: skip
        super().combine_receive(ids, weights, out, tokens=tokens, live_rows=live_rows, accumulate=accumulate)

    def _send_rows(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, tokens: int, live_rows: Tensor | None
    ) -> None:
        order, chunks = self._order(ids, tokens, live_rows, *self._wait), -(-tokens // self.layout.chunk)
        launch.run(
            self._row_kernel(), self._state, x, scales, ids, weights, live_rows, *order, self._outboxes, *self._rails,
            self._own, self._state.data_ptr(), self.rank, tokens, min(self._sms, chunks),
        )  # fmt: skip
        self._launch_push((x, scales, ids, weights, live_rows, *order), tokens, None)

    def _row_kernel(self) -> jit.Launcher:
        from rose_dist.kernels.cute.network_rows import SendRows  # noqa: PLC0415 - it loads the compiler

        return _load(SendRows(self._arch, self.network))

    def _message_blocks(self, messages: int, across: tuple[Tensor, int, int]) -> int:
        """Blocks for so many messages to or from each of the ranks of `across`."""
        return max(1, min(self._sms, messages * across[1]))

    def _run(self, name: str, *arguments: object) -> None:
        launch.run(self._kernel(name), self._state, *arguments)

    def _kernel(self, name: str) -> jit.Launcher:
        from rose_dist.kernels.cute import network_combine, network_dispatch, network_sums  # noqa: PLC0415

        if name == "SumNode":
            return _load(network_sums.SumNode(self._arch, self.network, self.result_dtype))
        module = network_dispatch if hasattr(network_dispatch, name) else network_combine
        return _load(getattr(module, name)(self._arch, self.network))


def _on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.empty(len(values), dtype=dtype, device=device)
    return tensor.copy_(torch.tensor(values, dtype=dtype))


@cache
def _load(kernel: jit.Kernel) -> jit.Launcher:
    return jit.load(kernel)
