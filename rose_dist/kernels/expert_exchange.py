"""MoE dispatch and combine between the GPUs of one NVLink domain: rows to the ranks of their experts, results back.

What stands where in the memory that ranks share, and why it is safe: `exchange_layout`. Up to `layout.packet_tokens`
tokens travel as packets and take one launch each way; more travel as plain rows, and a dispatch is two launches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch
from rose_dist.kernels.exchange_kernels import ExchangeKernels
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_order import SourceOrder
from rose_dist.kernels.exchange_sizes import HEADER_WORDS
from rose_dist.kernels.exchange_tiling import (
    PARTS,
    PUSHERS,
    SUM_PUSHERS,
    PacketTiling,
    record_tiling,
    sum_parts,
)
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.moe_dispatch import LIMIT_NS
from rose_dist.kernels.peer_regions import STAGES

RESULT_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class ReceivedRows:
    """Where a dispatch writes on the receiving side; uint8 unless it says otherwise."""

    x: Tensor
    """[packed rows, row_bytes]."""
    scales: Tensor | None
    """[packed rows, scale_bytes]."""
    counts: Tensor
    """int32 [width], rows of each local expert."""
    offsets: Tensor
    """int64 [width + 1], where each expert's rows start."""
    sources: Tensor
    """int32 [ranks, 3], the first words of each source's header."""
    tokens: Tensor
    """int32 [ranks, max_records], each record's token."""
    slots: Tensor
    """int32 [ranks + 1, max_records, note_words], the packed row of each place of a record; −1: not here, −2: no room.
    With `partial_sums`, the bits of their weights follow. The last: by token, of this rank's own tokens' places that
    are here; other places are from an earlier exchange or −1."""
    runs: Tensor
    """int32 [ranks, chunks], each chunk's records."""


def received_rows(layout: ExchangeLayout, packed: PackedLayout, device: torch.device) -> ReceivedRows:
    """For whatever the ranks may send."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    rows = packed_rows(layout, packed)
    slots = empty(layout.ranks + 1, layout.max_records, layout.note_words, dtype=torch.int32)
    slots[-1].fill_(-1)  # what a dispatch whose wait expired has left unwritten must not be an address
    return ReceivedRows(
        empty(rows, layout.row_bytes, dtype=torch.uint8),
        empty(rows, layout.scale_bytes, dtype=torch.uint8) if layout.scale_bytes else None,
        empty(layout.width, dtype=torch.int32),
        empty(layout.width + 1, dtype=torch.int64),
        empty(layout.ranks, HEADER_WORDS, dtype=torch.int32),
        empty(layout.ranks, layout.max_records, dtype=torch.int32),
        slots,
        empty(layout.ranks, layout.chunks, dtype=torch.int32),
    )


def packed_rows(layout: ExchangeLayout, packed: PackedLayout) -> int:
    """Rows of the packed buffer: every rank may send all its pairs here."""
    return packed.capacity(layout.ranks * layout.max_tokens * layout.top_k, layout.width)


class ExpertExchange:
    """Dispatches and combines of one layout on one GPU. All ranks make the same calls in the same order, each from one
    stream at a time. Fit for CUDA graphs: nothing is read on the host, epochs advance on the device.
    """

    def __init__(
        self, layout: ExchangeLayout, device: torch.device, rank: int, regions: tuple[int, ...], *,
        packed: PackedLayout, result_dtype: torch.dtype, sms: int, limit_ns: int = LIMIT_NS,
    ) -> None:  # fmt: skip
        """`regions`: the address, on this device, of each rank's region of `layout.region_bytes` zeroed bytes; no rank
        may call before all have zeroed theirs. `sms`: blocks of a full grid, at most this GPU's SMs.
        """
        from rose_dist.kernels import sync  # noqa: PLC0415 - it loads the compiler

        if result_dtype not in RESULT_DTYPES:
            raise checks.fail("result_dtype", f"is {result_dtype}; allowed: {', '.join(map(str, RESULT_DTYPES))}")
        self.layout, self.packed, self.rank, self.result_dtype = layout, packed, rank, result_dtype
        self.report = sync.WaitReport(STAGES)
        self._state = torch.empty(5, dtype=torch.int64, device=device).zero_()
        self._arch = launch.device(self._state).arch
        self._sms = sms
        shares = (PUSHERS, SUM_PUSHERS if layout.partial_sums else PUSHERS)
        self.pushers = (max(1, int(sms * shares[0])), max(1, int(sms * shares[1])))
        """Blocks that send plain rows in a dispatch and in a combine, fewer than SMs."""
        self._peers = torch.empty(layout.ranks, dtype=torch.int64, device=device)
        self._peers.copy_(torch.tensor(regions))
        self._returns, self._own = self._peers, regions[rank]
        self._wait = (self.report.address, limit_ns, rank)
        self._kernels = ExchangeKernels(self._arch, layout, packed, result_dtype)
        for kernel in self._kernels.usual():
            _load(kernel)
        if layout.has_rows:
            self._order = SourceOrder(layout, device, sms)

    def fuses(self, tokens: int) -> bool:
        """Whether dispatches of so many tokens quantise."""
        return self.layout.quantized is not None and tokens <= self.layout.packet_tokens

    @property
    def sent(self) -> Tensor:
        """int64 [1] on the device: (token, place) pairs sent to other ranks so far."""
        return self._state[4:]

    def check(self) -> None:
        """Raise `WaitExpiredError` if a kernel has waited in vain; reads host memory only."""
        self.report.check()

    def dispatch(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, tokens: int, live_rows: Tensor | None,
        out: ReceivedRows,
    ) -> None:  # fmt: skip
        """Both halves, in one launch where that goes."""
        _check_inputs(x, scales, ids, weights)
        if tokens > self.layout.packet_tokens:
            self._push_rows(x, scales, ids, weights, tokens, live_rows, out)
        else:
            self._dispatch((x, scales, ids, weights, live_rows), tokens, out, True, True)

    def dispatch_send(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, tokens: int, live_rows: Tensor | None
    ) -> None:
        """`x` [tokens, row], `ids` int32 and `weights` fp32 [tokens, top_k], the latter read with `partial_sums` only;
        live are the first `tokens` or fewer, if `live_rows`, int32 [1], says so. Where `fuses(tokens)`, `x` is bf16 and
        `scales` None.
        """
        _check_inputs(x, scales, ids, weights)
        if tokens > self.layout.packet_tokens:
            self._push_rows(x, scales, ids, weights, tokens, live_rows)
        else:
            self._dispatch((x, scales, ids, weights, live_rows), tokens, None, True, False)

    def dispatch_receive(self, out: ReceivedRows, tokens: int) -> None:
        """What all ranks sent in their oldest dispatch that is not received yet; `tokens`: what this one sent, by which
        a shape is chosen.
        """
        self._dispatch((None,) * 5, tokens, out, False, True)

    def combine(
        self, expert_out: Tensor, received: ReceivedRows, ids: Tensor, weights: Tensor, out: Tensor, *, tokens: int,
        live_rows: Tensor | None, accumulate: bool,
    ) -> None:  # fmt: skip
        """Both halves, in one launch where that goes."""
        if tokens > self.layout.result_packet_tokens:
            self._sum_rows((ids, weights, live_rows, out), tokens, accumulate, expert_out, received)
        else:
            self._combine(expert_out, received, (ids, weights, live_rows, out), tokens, accumulate)

    def combine_send(self, expert_out: Tensor, received: ReceivedRows, tokens: int) -> None:
        """Results in the order of the packed rows, as this dispatch's receipt left them; `tokens` as for that."""
        self._combine(expert_out, received, None, tokens, False)

    def combine_receive(
        self, ids: Tensor, weights: Tensor, out: Tensor, *, tokens: int, live_rows: Tensor | None, accumulate: bool
    ) -> None:
        """The weighted sums of this rank's tokens, from the oldest combine that is not received yet; `ids`, `tokens`
        and `live_rows` as given to its dispatch, `weights` fp32 [tokens, top_k].
        """
        if tokens > self.layout.result_packet_tokens:
            self._sum_rows((ids, weights, live_rows, out), tokens, accumulate)
        else:
            self._combine(None, None, (ids, weights, live_rows, out), tokens, accumulate)

    def _dispatch(
        self, given: tuple[Tensor | None, ...], tokens: int, out: ReceivedRows | None, send: bool, receive: bool
    ) -> None:
        most = PARTS.select(tokens * 100 // self._sms)
        tiling = record_tiling(self.layout, most)
        state = self._state.data_ptr()
        launch.run(
            _load(self._kernels.dispatch(most, send, receive)), self._state, *given, state + 32, *_written(out),
            self._peers, self._own, state, state + 8, *self._wait, tokens,
            self._blocks(tokens * tiling.splits, receive),
        )  # fmt: skip

    def _combine(
        self, expert_out: Tensor | None, received: ReceivedRows | None, wanted: tuple[Tensor | None, ...] | None,
        tokens: int, accumulate: bool,
    ) -> None:  # fmt: skip
        most = PARTS.select(tokens * 100 // self._sms)
        tiling = PacketTiling(self.layout.result_packets, most)
        ids, weights, live_rows, out = wanted or (None,) * 4
        if out is not None:
            _check_out(out)
        out_dtype = self.result_dtype if out is None else out.dtype
        kernel = self._kernels.combine(most, received is not None, wanted is not None, out_dtype, accumulate)
        state = self._state.data_ptr()
        launch.run(
            _load(kernel), self._state, *_results(expert_out, received), ids, weights, live_rows, out, self._returns,
            self._own, state + 16, state + 24, *self._wait, tokens,
            self._blocks(tokens * tiling.splits, received is not None),
        )  # fmt: skip

    def _push_rows(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, tokens: int, live_rows: Tensor | None,
        out: ReceivedRows | None = None,
    ) -> None:  # fmt: skip
        """With `out`, what all ranks send is taken by the same launch."""
        order = self._order(ids, tokens, live_rows, *self._wait)
        self._launch_push((x, scales, ids, weights, live_rows, *order), tokens, out)

    def _launch_push(self, given: tuple[Tensor | None, ...], tokens: int, out: ReceivedRows | None) -> None:
        chunks, receive, state = -(-tokens // self.layout.chunk), out is not None, self._state.data_ptr()
        pushers = min(self.pushers[0] if receive else self._sms, chunks)
        blocks = pushers + max(1, self._sms - pushers) * receive
        launch.run(
            _load(self._kernels.push(receive)), self._state, *given, state + 32, *_written(out), self._peers, self._own,
            state, state + 8, *self._wait, tokens, pushers, blocks,
        )  # fmt: skip

    def _sum_rows(
        self, wanted: tuple[Tensor, Tensor, Tensor | None, Tensor], tokens: int, accumulate: bool,
        expert_out: Tensor | None = None, received: ReceivedRows | None = None,
    ) -> None:  # fmt: skip
        """With `expert_out`, this rank's results are sent by the same launch."""
        ids, weights, live_rows, out = wanted
        _check_out(out)
        layout, state, send = self.layout, self._state.data_ptr(), expert_out is not None
        by_token = tokens <= layout.packet_tokens
        pushers = self.pushers[1] if send else 0
        items = tokens if by_token else -(-tokens // layout.chunk) * sum_parts(layout)
        summers = max(1, min(self._sms - pushers, items))
        launch.run(
            _load(self._kernels.sum(out.dtype, accumulate, by_token, send)), self._state,
            *_results(expert_out, received), ids, weights, live_rows, out, self._returns, self._own, state + 16,
            state + 24, *self._wait, tokens, pushers, pushers + summers,
        )  # fmt: skip

    def _blocks(self, items: int, others: bool) -> int:
        """Blocks for this rank's `items`; with `others`, for what other ranks sent too: only the GPU knows how much."""
        return self._sms if others else max(1, min(self._sms, items))


def _written(out: ReceivedRows | None) -> tuple[Tensor | None, ...]:
    """What a receiving kernel writes, as its arguments."""
    if out is None:
        return (None,) * 8
    return out.x, out.scales, out.counts, out.offsets, out.sources, out.tokens, out.slots, out.runs


def _results(expert_out: Tensor | None, received: ReceivedRows | None) -> tuple[Tensor | int | None, ...]:
    """What a sending kernel of a combine reads, as its arguments."""
    if expert_out is None or received is None:
        return None, 0, None, None, None, None
    checks.rows("expert_out", expert_out)
    stride = expert_out.stride(0) * expert_out.element_size()
    return expert_out, stride, received.sources, received.tokens, received.slots, received.runs


def _check_out(out: Tensor) -> None:
    checks.dtype("out", out, torch.bfloat16, torch.float16, torch.float32)
    checks.dense("out", out)


def _check_inputs(x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor) -> None:
    checks.dense("x", x)
    checks.dense("ids", ids, 4)
    checks.dense("weights", weights, 4)
    if scales is not None:
        checks.dense("scales", scales, math.gcd(4, scales.shape[-1] * scales.element_size()))


@cache
def _load(kernel: jit.Kernel) -> jit.Launcher:
    return jit.load(kernel)
