"""How a block of warpgroups attends for many queries: pure data and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_tiling import WARPGROUP

WARPGROUP_ROWS = 64
"""Rows of a warpgroup's products."""
MARGIN = 3
"""Stages of the ring that must have come before a feeding warp asks for the next: a computing warp is at one, still
reads the values of the one before, and is not to wait for the one after."""


@dataclass(frozen=True)
class PrefillTiling:
    """A block's warpgroups take 64 rows each, a row being one query head of one token; as many warps as one has feed
    them with keys and values, a tile of which is a stage of the ring.
    """

    head_dim: int
    warpgroups: int
    """That compute."""
    keys: int
    """A tile."""
    stages: int
    registers: tuple[int, int]
    """Of a feeding and of a computing thread, once they are shared out anew."""

    def __post_init__(self) -> None:
        assert self.keys % (8 * self.feeders) == 0, self.keys
        assert self.stages > MARGIN, self.stages

    @property
    def rows(self) -> int:
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def warps(self) -> int:
        """That compute."""
        return self.warpgroups * WARPGROUP

    @property
    def feeders(self) -> int:
        """Warps that copy."""
        return WARPGROUP

    @property
    def threads(self) -> int:
        return (self.warps + self.feeders) * WARP

    @property
    def feeder_keys(self) -> int:
        """Keys of a tile that a feeding warp copies."""
        return self.keys // self.feeders

    @property
    def cells(self) -> int:
        """Pieces of 16 bytes in a head's key."""
        return self.head_dim // 8

    @property
    def tile_bytes(self) -> int:
        """Of a tile's keys, and of its values."""
        return self.keys * self.head_dim * 2

    @property
    def stage_bytes(self) -> int:
        return 2 * self.tile_bytes

    @property
    def late(self) -> int:
        """How many stages a feeding warp has asked for, but not seen come."""
        return self.stages - MARGIN

    @property
    def ring_offset(self) -> int:
        """Behind two barriers a stage: it is full, it is free."""
        return -(-2 * self.stages * 8 // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return self.ring_offset + self.stages * self.stage_bytes


PREFILL_TILINGS = {
    64: PrefillTiling(64, warpgroups=3, keys=96, stages=8, registers=(32, 160)),
    128: PrefillTiling(128, warpgroups=2, keys=96, stages=4, registers=(40, 232)),
}
"""By head_dim."""
