"""How the packets of a record are spread over threads and blocks: plain arithmetic, on the host or while tracing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import UNIT_PACKETS
from rose_dist.kernels.variants import WARP, Ranges

MOST_THREADS = 512
LEAST_THREADS = 64
PART_UNIT = 8
"""Packets of a part are a multiple of this, so that it holds whole vectors of 32 bytes."""

PARTS = Ranges((0, 13, 51), (128, 512, 1024))
"""Most packets of a record that a block takes at a time, by tokens for every 100 SMs: with few tokens a record is
spread over several blocks. At 1,024 a part takes 12 KB of shared memory."""

PUSHERS, SUM_PUSHERS = 1 / 3, 1 / 2
"""Of the blocks of a launch that sends plain rows and takes them, the share that sends; the latter of a combine with
`partial_sums`, whose senders read as much as the others. Other shares: `benchmarks.exchange`, `prefill`."""


@dataclass(frozen=True)
class PacketTiling:
    """`splits` blocks take a record of `packets` packets, each up to `most`, a thread up to `turns` of them."""

    packets: int
    most: int
    unit: int = PART_UNIT
    """Packets of a part are a multiple of this."""
    least: int = LEAST_THREADS
    """Threads of a block."""

    @property
    def splits(self) -> int:
        return -(-self.packets // self.most)

    @property
    def part(self) -> int:
        """Packets of a block's part."""
        return _up(_up(self.packets, self.splits) // self.splits, self.unit)

    @property
    def turns(self) -> int:
        return -(-self.part // MOST_THREADS)

    @property
    def threads(self) -> int:
        """Of a block."""
        return max(self.least, _up(_up(self.part, self.turns) // self.turns, WARP))

    def packet(self, split: Any, thread: Any, turn: int) -> Any:
        """The number of a thread's packet in the record; possibly none of its own."""
        return split * self.part + thread + turn * self.threads

    def inside(self, split: Any, thread: Any, turn: int) -> Any:
        """Whether it is the thread's own."""
        return (thread + turn * self.threads < self.part) & (self.packet(split, thread, turn) < self.packets)


@dataclass(frozen=True)
class MoverTiling:
    """Of warps that move rows through rings in shared memory: `row_mover`."""

    row_bytes: int
    warps: ClassVar[int] = 8
    ahead: ClassVar[int] = 2
    """Pieces of a warp whose loads are on their way."""
    behind: ClassVar[int] = 3
    """Pieces of a warp whose stores are."""
    most: ClassVar[int] = 3584
    """Bytes of a piece. With 8 warps and 6 stages 168 KB a block."""

    @property
    def pieces(self) -> int:
        """Of a row; all but the last of one size."""
        return -(-self.row_bytes // self.most)

    @property
    def piece_bytes(self) -> int:
        return _up(-(-self.row_bytes // self.pieces), 16)

    @property
    def stages(self) -> int:
        """A warp's; the load that begins takes one more than those on their way."""
        return self.ahead + self.behind + 1

    @property
    def ring_offset(self) -> int:
        """Behind the barriers, one a stage."""
        return _up(8 * self.warps * self.stages, 128)

    @property
    def shared_bytes(self) -> int:
        return self.ring_offset + self.warps * self.stages * self.piece_bytes


def sum_parts(layout: ExchangeLayout) -> int:
    """In which a chunk's results are summed, each by a block: the last chunks come all at once. Ranks' sums, for which
    warps share a token, have too little in a part.
    """
    return 4 if layout.chunk % 4 == 0 and not layout.weighted else 1


def record_tiling(layout: ExchangeLayout, most: int, least: int = LEAST_THREADS) -> PacketTiling:
    """Of a record's row and scales; a part of a quantised record is whole units."""
    return PacketTiling(layout.data_packets, most, PART_UNIT if layout.quantized is None else UNIT_PACKETS, least)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
