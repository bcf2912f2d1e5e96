"""What feeds prefill attention: keys and values of one head from the paged cache, by copies of 16 bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import vector
from rose_dist.kernels.cute.mxfp4_operands import barrier, next_stage, wait
from rose_dist.kernels.cute.prefill_items import Items
from rose_dist.kernels.dsl import Int32, Int64, Uint32, cute, range_constexpr
from rose_dist.kernels.prefill_tiling import PrefillTiling
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warp_matrix import await_copies, commit_copies, copy_async
from rose_dist.kernels.warpgroup_matrix import CELL_BYTES


@dataclass(frozen=True)
class Stored:
    """One layer's cache and where the keys are in it; traced values, strides in elements."""

    keys: Any
    values: Any
    slot_stride: Any
    head_stride: Any
    slots: Any
    """0 where key number i of the batch is in slot i."""


@dataclass(frozen=True)
class KeyFeeder:
    """The feeding warps: each copies every fourth part of a tile's keys and their values.

    Of its copies a warp awaits those of `late` stages ago whenever it has started a stage's, and announces them, across
    the borders of items.
    """

    tiling: PrefillTiling
    group: int

    @cute.jit
    def run(self, shared: Int32, stored: Stored, items: Items, feeder: Int32) -> None:
        """Feeding warp number `feeder`, all of its block's items."""
        tiling, lane = self.tiling, cute.arch.thread_idx()[0] % WARP
        own = feeder * tiling.feeder_keys
        # A fresh barrier lets a wait for the phase before its first one pass.
        stage, parity, number = Int32(0), Int32(1), Int32(0)
        for round_number in range(items.rounds()):
            item = items.of(round_number, self.group, tiling.rows, tiling.keys)
            head = Int64(item.head) * stored.head_stride * 2 + lane // 8 * CELL_BYTES
            keys, values = stored.keys + head, stored.values + head
            first = item.high - tiling.keys + own
            slot = Int32(0)
            if item.tiles > 0:
                slot = self.slot_of(stored.slots, item.first_key, first + lane, item.low)
            for _ in range(item.tiles):
                following = self.slot_of(stored.slots, item.first_key, first - tiling.keys + lane, item.low)
                wait(barrier(shared, stage + tiling.stages), parity)
                target = shared + tiling.ring_offset + stage * tiling.stage_bytes
                target += (lane // 8 * tiling.keys + own + lane % 8) * CELL_BYTES
                self.copy(target, keys, values, stored.slot_stride, slot, first, item.low)
                commit_copies()
                if number >= tiling.late:
                    await_copies(tiling.late)
                    self.announce(shared, number - tiling.late)
                number += 1
                stage, parity = next_stage(stage, parity, tiling.stages)
                slot = following
                first -= tiling.keys
        await_copies(0)
        for last in range(vector.max_of(number - tiling.late, Int32(0)), number):
            self.announce(shared, last)

    @cute.jit
    def slot_of(self, slots: Int64, first_key: Int32, key: Int32, low: Int32) -> Int32:
        """Of a sequence's key; of a key before `low`, that one's."""
        at = first_key + vector.max_of(key, low)
        if (slots != 0) & (cute.arch.thread_idx()[0] % WARP < self.tiling.feeder_keys):
            at = Int32(vector.scalar(slots + Int64(at) * 8, Int64)[0])
        return at

    @cute.jit
    def copy(
        self, target: Int32, keys: Int64, values: Int64, slot_stride: Int64, slot: Int32, first: Int32, low: Int32
    ) -> None:
        """Start copying this warp's part of a tile. Lane 8c + r copies of key r of 8 each cells c, c + 4 and so on;
        zeros for keys before `low`.
        """
        tiling, place = self.tiling, cute.arch.thread_idx()[0] % 8
        for begin in range_constexpr(0, tiling.feeder_keys, 8):
            source = Int64(cute.arch.shuffle_sync(slot, begin + place)) * slot_stride * 2
            size = vector.select(first + begin + place >= low, Uint32(CELL_BYTES), Uint32(0))
            for cell in range_constexpr(0, tiling.cells, 4):
                at = target + (cell * tiling.keys + begin) * CELL_BYTES
                copy_async(at, keys + source + cell * CELL_BYTES, size, CELL_BYTES)
                copy_async(at + tiling.tile_bytes, values + source + cell * CELL_BYTES, size, CELL_BYTES)

    @cute.jit
    def announce(self, shared: Int32, number: Int32) -> None:
        """This warp's copies for the block's stage `number`, which have come."""
        # What this thread has copied, tensor cores read through another path than its own loads.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cute.arch.thread_idx()[0] % WARP == 0:
            cute.arch.mbarrier_arrive(barrier(shared, number % self.tiling.stages))
