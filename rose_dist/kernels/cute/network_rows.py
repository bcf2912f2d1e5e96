"""Dispatch of many tokens to ranks of other nodes: plain rows, put to where the receiver takes or forwards them.

See `rose_dist.kernels.network_layout`; `DispatchRows` does the same over NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import nvshmem, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import copy_of
from rose_dist.kernels.cute.exchange_push import RowPusher
from rose_dist.kernels.cute.exchange_rows import THREADS
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.network_parts import (
    group_of,
    message_at,
    place_of,
    signal_at,
    signal_of,
    write_headers,
)
from rose_dist.kernels.dsl import Int32, Int64, Stream, Uint32, cute
from rose_dist.kernels.exchange_sizes import ROWS
from rose_dist.kernels.network_layout import NetworkLayout


@dataclass(frozen=True)
class SendRows(nvshmem.NetworkKernel):
    """A block a chunk at a time; the first one sends the headers too. It counts no exchange: `DispatchRows`, which
    follows, does.
    """

    layout: NetworkLayout

    @cute.jit
    def __call__(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live_rows: Int64, numbers: Int64, counts: Int64,
        offsets: Int64, outboxes: Int64, far: Int64, far_count: Int32, network: Int64, own: Int64, state: Int64,
        rank: Int32, tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Arguments as for `DispatchRows` and `SendRecords`; own: this rank's exchange region; outboxes: int64
        [groups], where the first copy of the row outbox for each group of other nodes starts, 0 for others.
        """
        self.kernel(
            x, scales, ids, weights, live_rows, numbers, counts, offsets, outboxes, far, far_count, network, own, state,
            rank, tokens,
        ).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, scales: Int64, ids: Int64, weights: Int64, live_rows: Int64, numbers: Int64, counts: Int64,
        offsets: Int64, outboxes: Int64, far: Int64, far_count: Int32, network: Int64, own: Int64, state: Int64,
        rank: Int32, tokens: Int32,
    ) -> None:  # fmt: skip
        layout, block, thread = self.layout.exchange, cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        pusher = RowPusher(layout, THREADS, self.layout.members)
        counted, masks = shared_integers(layout.experts + layout.ranks), shared_integers(layout.chunk)
        runs = shared_integers(self.layout.groups)
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(state)
        if block == 0:
            pusher.load_counts(counts, counted)
            for number in range(far_count):
                to = vector.scalar(far + Int64(number) * 4, Int32)[0]
                self.send_header(counted, to, live, network, rank, epoch)
        area = copy_of(epoch, layout.copies) * (self.layout.groups * layout.source_record_bytes)
        for chunk in range(block, (live + (layout.chunk - 1)) // layout.chunk, cute.arch.grid_dim()[0]):
            cute.arch.sync_threads()
            pusher.find_destinations(ids, chunk, live, masks, Int32(0))
            cute.arch.sync_threads()
            pusher.push_tokens(x, scales, ids, weights, numbers, offsets, outboxes, area, chunk, live, masks, Int32(0))
            if thread < self.layout.groups:
                runs[thread] = pusher.run(chunk, thread, masks, Int32(0))
            cute.arch.sync_threads()
            for number in range(far_count):
                to = vector.scalar(far + Int64(number) * 4, Int32)[0]
                run = runs[to // self.layout.members]
                self.send_chunk(run, to, chunk, outboxes, area, network, own, rank, epoch)

    @cute.jit
    def send_header(
        self, counted: cute.Tensor, to: Int32, live: Int32, network: Int64, rank: Int32, epoch: Uint32
    ) -> None:
        """A record message without records."""
        layout, names = self.layout, ("record", "outbox", "inbox")
        outbox = network + message_at(layout, names[0], names[1], place_of(layout, names[0], epoch, to, 0))
        write_headers(layout, counted, to, live, ROWS, outbox, THREADS)
        place = place_of(layout, names[0], epoch, rank, 0)
        nvshmem.put_signal_block(
            self.arch, network + message_at(layout, names[0], names[2], place), outbox, layout.headers_bytes,
            network + signal_at(layout, names[0], place), signal_of(Int32(0), epoch), to,
        )  # fmt: skip

    @cute.jit
    def send_chunk(
        self, run: Int32, to: Int32, chunk: Int32, outboxes: Int64, area: Int64, network: Int64, own: Int64,
        rank: Int32, epoch: Uint32,
    ) -> None:  # fmt: skip
        """A chunk's records to where the receiver takes them, its run and flag as their signal."""
        layout = self.layout.exchange
        first, size = Int64(run >> 8) * layout.record_bytes, Int64(run & 255) * layout.record_bytes
        nothing, some = network + self.layout.start("nothing"), size > 0
        records, runs = self.places(network, own, rank, epoch)
        outbox = vector.scalar(outboxes + Int64(to // self.layout.members) * 8, Int64)[0] + area
        nvshmem.put_signal_block(
            self.arch, vector.select(some, records + first, nothing), vector.select(some, outbox + first, nothing),
            vector.max_of(size, Int64(16)), runs + Int64(chunk) * 8, signal_of(run, epoch), to,
        )  # fmt: skip

    def places(self, network: Any, own: Any, rank: Any, epoch: Any) -> tuple[Any, Any]:
        """Where a receiver finds this source's records, and their signals."""
        layout = self.layout.exchange
        if self.layout.forwards_rows:
            group = group_of(self.layout, epoch, rank)
            records, runs = network + self.layout.start("row_inbox"), network + self.layout.start("row_signals")
        else:
            group = copy_of(epoch, layout.copies) * layout.ranks + rank
            records, runs = own + layout.start("records"), own + layout.start("runs")
        return records + group * layout.source_record_bytes, runs + group * layout.source_run_bytes
