"""One token's normalised row and its experts, on their way from the router's launch to the experts'."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PACKET_BYTES = 16
"""Three words and the epoch."""
EPOCH_AT, CHOICE_AT, ROW_AT = 0, PACKET_BYTES, 2 * PACKET_BYTES
"""Where a handover has its u64 epoch, the packet of the choice, and those of the row, behind which are those of what
the experts' first layer makes of it, a row an expert.
"""
MOST_CHOSEN = 12
"""Experts that the packet of the choice has room for, a byte each."""
NO_EXPERT = 255
"""Says that a place in the top k has no expert here."""


@dataclass(frozen=True)
class Handover:
    """memory: uint8, zeros at first. What stands in it, and why it is safe: `kernels.cute.handover`."""

    memory: Tensor

    @classmethod
    def of(cls, hidden: int, device: torch.device) -> Handover:
        """For rows of `hidden` bf16."""
        size = results_at(hidden) + MOST_CHOSEN * result_packets(hidden) * PACKET_BYTES
        return cls(torch.empty(size, dtype=torch.uint8, device=device).zero_())


def row_packets(hidden: int) -> int:
    """Of two bf16 a word."""
    return -(-hidden // 6)


def results_at(hidden: int) -> int:
    return ROW_AT + row_packets(hidden) * PACKET_BYTES


def result_packets(hidden: int) -> int:
    """Of four bf16 each, of one expert."""
    return hidden // 4


def takes(experts: int, k: int) -> bool:
    """Whether a handover can name k of so many experts."""
    return experts <= NO_EXPERT and k <= MOST_CHOSEN
