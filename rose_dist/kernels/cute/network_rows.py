"""Dispatch of many tokens to ranks of other nodes: plain rows, put to where the receiver takes them.

See `rose_dist.kernels.network_layout`; `DispatchRows` does the same over NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import nvshmem, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.cute.exchange_parts import copy_of, header_word
from rose_dist.kernels.cute.exchange_push import RowPusher
from rose_dist.kernels.cute.exchange_rows import THREADS
from rose_dist.kernels.cute.expert_slots import shared_integers
from rose_dist.kernels.cute.network_parts import message_at, place_of, signal_at, signal_of
from rose_dist.kernels.dsl import Int32, Int64, Stream, Uint32, cute
from rose_dist.kernels.exchange_layout import HEADER_WORDS, ROWS, ExchangeLayout
from rose_dist.kernels.network_layout import NetworkLayout


@dataclass(frozen=True)
class SendRows(nvshmem.NetworkKernel):
    """A block a chunk at a time; the first one sends the headers too. It counts no exchange: `DispatchRows`, which
    follows, does.
    """

    layout: ExchangeLayout

    @property
    def network_layout(self) -> NetworkLayout:
        return NetworkLayout(self.layout)

    @cute.jit
    def __call__(
        self, x: Int64, scales: Int64, ids: Int64, live_rows: Int64, numbers: Int64, counts: Int64, offsets: Int64,
        outboxes: Int64, far: Int64, far_count: Int32, network: Int64, own: Int64, state: Int64, rank: Int32,
        tokens: Int32, blocks: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        """Arguments as for `DispatchRows` and `SendRecords`; own: this rank's exchange region; outboxes: int64 [ranks],
        for ranks of other nodes what stands for a peer's region: an address such that its part for this source is the
        row outbox for that rank; 0 for the others.
        """
        self.kernel(
            x, scales, ids, live_rows, numbers, counts, offsets, outboxes, far, far_count, network, own, state, rank,
            tokens,
        ).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, scales: Int64, ids: Int64, live_rows: Int64, numbers: Int64, counts: Int64, offsets: Int64,
        outboxes: Int64, far: Int64, far_count: Int32, network: Int64, own: Int64, state: Int64, rank: Int32,
        tokens: Int32,
    ) -> None:  # fmt: skip
        layout, block, thread = self.layout, cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        pusher = RowPusher(layout, THREADS)
        counted, masks = shared_integers(layout.experts + layout.ranks), shared_integers(layout.chunk)
        runs = shared_integers(layout.ranks)
        live, epoch = vector.live_rows(live_rows, tokens), packets.current_epoch(state)
        if block == 0:
            pusher.load_counts(counts, counted)
            for number in range(far_count):
                to = vector.scalar(far + Int64(number) * 4, Int32)[0]
                self.send_header(counted, to, live, network, rank, epoch)
        for chunk in range(block, (live + (layout.chunk - 1)) // layout.chunk, cute.arch.grid_dim()[0]):
            cute.arch.sync_threads()
            pusher.find_destinations(ids, chunk, live, masks, Int32(0))
            cute.arch.sync_threads()
            pusher.push_tokens(
                x, scales, ids, Int64(0), numbers, offsets, outboxes, rank, chunk, live, epoch, masks, Int32(0)
            )
            if thread < layout.ranks:
                runs[thread] = pusher.run(chunk, thread, masks, Int32(0))
            cute.arch.sync_threads()
            for number in range(far_count):
                to = vector.scalar(far + Int64(number) * 4, Int32)[0]
                self.send_chunk(runs[to], to, chunk, outboxes, network, own, rank, epoch)

    @cute.jit
    def send_header(
        self, counted: cute.Tensor, to: Int32, live: Int32, network: Int64, rank: Int32, epoch: Uint32
    ) -> None:
        """A record message without records."""
        layout, names = self.network_layout, ("record", "outbox", "inbox")
        outbox = network + message_at(layout, names[0], names[1], place_of(layout, names[0], epoch, to, 0))
        for at in range(cute.arch.thread_idx()[0], HEADER_WORDS + self.layout.width, THREADS):
            vector.scalar(outbox + Int64(at) * 4, Uint32)[0] = header_word(self.layout, counted, to, at, live, ROWS)
        place = place_of(layout, names[0], epoch, rank, 0)
        nvshmem.put_signal_block(
            self.arch, network + message_at(layout, names[0], names[2], place), outbox, layout.header_bytes,
            network + signal_at(layout, names[0], place), signal_of(Int32(0), epoch), to,
        )  # fmt: skip

    @cute.jit
    def send_chunk(
        self, run: Int32, to: Int32, chunk: Int32, outboxes: Int64, network: Int64, own: Int64, rank: Int32,
        epoch: Uint32,
    ) -> None:  # fmt: skip
        """A chunk's records to where the receiver takes them, its run and flag as their signal."""
        layout = self.layout
        copy = copy_of(epoch, layout.copies) * layout.ranks + rank
        rows = layout.start("records") + copy * layout.source_record_bytes + Int64(run >> 8) * layout.record_bytes
        size = Int64(run & 255) * layout.record_bytes
        nothing = network + self.network_layout.start("nothing")
        some = size > 0
        signal = own + layout.start("runs") + copy * layout.source_run_bytes + Int64(chunk) * 8
        outbox = vector.scalar(outboxes + Int64(to) * 8, Int64)[0]
        nvshmem.put_signal_block(
            self.arch, vector.select(some, own + rows, nothing), vector.select(some, outbox + rows, nothing),
            vector.max_of(size, Int64(16)), signal, signal_of(run, epoch), to,
        )  # fmt: skip
