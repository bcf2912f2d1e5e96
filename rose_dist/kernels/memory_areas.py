"""Areas that follow one another in a region of memory, as plain arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod

ALIGNMENT = 128
"""Bytes to which an area's start is rounded up."""


class MemoryAreas(ABC):
    """Base of layouts whose areas have names."""

    @property
    @abstractmethod
    def _areas(self) -> dict[str, int]:
        """Bytes of each area, in their order."""

    def start(self, area: str) -> int:
        """Where an area starts in a region."""
        offset = 0
        for name, size in self._areas.items():
            if name == area:
                return offset
            offset += round_up(size, ALIGNMENT)
        raise KeyError(area)

    @property
    def region_bytes(self) -> int:
        """Of one rank's region."""
        return sum(round_up(size, ALIGNMENT) for size in self._areas.values())


def round_up(size: int, unit: int) -> int:
    """To the next multiple of `unit`."""
    return -(-size // unit) * unit
