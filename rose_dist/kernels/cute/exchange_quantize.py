"""Rows quantised on their way into a dispatch's packets, and the way back; see `rose_dist.kernels.exchange_layout`.

A part of a record is whole units. 16 lanes make a unit's codes and scales from 16 bytes of bf16 each and lay them, 33
words, into shared memory, where the threads that send find the three words of each packet side by side. The receiver
lays codes and scales apart again, so that it can store codes as wide as any other row. Nobody needs more of the row
than its own part, and no scale is looked at by two blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import block_scale, ptx, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import UNIT_PACKETS, UNIT_VALUES, UNIT_WORDS
from rose_dist.kernels.exchange_tiling import PacketTiling
from rose_dist.kernels.formats import BlockFormat, Scale
from rose_dist.kernels.peer_regions import PACKET_WORDS

VALUES = 8
"""That a lane has: 16 bytes of bf16, two words of codes."""
LANES = UNIT_VALUES // VALUES
CODE_WORDS = UNIT_WORDS - 1


@dataclass(frozen=True)
class PartQuantizer:
    """Part of a kernel that sends, for layouts with `quantized`."""

    arch: Arch
    layout: ExchangeLayout
    tiling: PacketTiling

    @property
    def units(self) -> int:
        """Of a part."""
        return self.tiling.part // UNIT_PACKETS

    @property
    def groups(self) -> int:
        """Units that a block's threads encode at once."""
        return self.tiling.threads // LANES

    @property
    def turns(self) -> int:
        return -(-self.units // self.groups)

    @property
    def format(self) -> BlockFormat:
        assert self.layout.quantized is not None
        return self.layout.quantized

    def stage(self) -> Any:
        """Uint32 [units, UNIT_WORDS] in shared memory, flat."""
        words = self.units * UNIT_WORDS
        return cute.make_tensor(cute.arch.alloc_smem(Uint32, words, alignment=16), cute.make_layout(words))

    def load(self, x: Any, token: Any, split: Any) -> list[Any]:
        """This thread's vectors of a part of a bf16 row; the row's last one in place of any beyond it, which belongs
        to the same block or to one that nobody stores.
        """
        thread, last = cute.arch.thread_idx()[0], Int32(self.layout.row_bytes // VALUES - 1)
        row, loaded = x + Int64(token) * (2 * self.layout.row_bytes), []
        for turn in range(self.turns):
            unit = split * self.units + thread // LANES + turn * self.groups
            at = vector.min_of(unit * LANES + thread % LANES, last)
            loaded.append(vector.load(row + Int64(at) * (2 * VALUES), BFloat16, VALUES, 2 * VALUES))
        return loaded

    @cute.jit
    def encode(self, loaded: list[Any], split: Int32, stage: cute.Tensor) -> None:
        """The vectors' codes and scales into `stage`. All threads must arrive."""
        thread, each = cute.arch.thread_idx()[0], self.format.block // VALUES
        lane = thread % LANES
        for turn in range_constexpr(self.turns):
            wide, unit = loaded[turn].to(Float32), thread // LANES + turn * self.groups
            words, scale = block_scale.encode(self.format, self.arch, [wide[i] for i in range(VALUES)])
            if unit < self.units:
                start = unit * UNIT_WORDS
                for i in range_constexpr(len(words)):
                    stage[start + lane * len(words) + i] = words[i]
                if lane % each == 0:
                    if const_expr(self.format.scale is Scale.FP32):
                        stage[start + CODE_WORDS] = ptx.bits(scale)
                    else:
                        scale_bytes = cute.make_tensor(
                            cute.recast_ptr(stage.iterator, dtype=Uint8), cute.make_layout(self.units * UNIT_WORDS * 4)
                        )
                        scale_bytes[(start + CODE_WORDS) * 4 + lane // each] = Uint8(scale)

    def words(self, stage: Any) -> list[list[Any]]:
        """Of each of this thread's packets of the part; any for packets that are not its own."""
        last, thread = self.tiling.part - 1, cute.arch.thread_idx()[0]
        numbers = [vector.min_of(thread + i * self.tiling.threads, Int32(last)) for i in range(self.tiling.turns)]
        return [[Uint32(stage[PACKET_WORDS * number + i]) for i in range(PACKET_WORDS)] for number in numbers]


def apart(packet: Any, word: int, units: int) -> Any:
    """Where word `word` of a part's packet number `packet` is laid: codes of all `units` first, then their scales."""
    unit, at = packet // UNIT_PACKETS, packet % UNIT_PACKETS * PACKET_WORDS + word
    return vector.select(at < CODE_WORDS, unit * CODE_WORDS + at, units * CODE_WORDS + unit)
