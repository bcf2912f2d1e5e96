"""Where the blocks of a launch meet that goes through both layers of the experts, and what they are handed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from rose_dist.kernels.handover import Handover
from rose_dist.kernels.stream_tiling import HANDOVER_STAGE, LAYERS_STAGE

LIMIT_NS = 10_000_000_000
_meetings: dict[torch.device, LayerMeeting] = {}


class LayerMeeting:
    """The counter of `phase_barrier` on one GPU, and the report of a wait that expired. One stream at a time."""

    def __init__(self, device: torch.device) -> None:
        from rose_dist.kernels import sync  # noqa: PLC0415 - it loads the compiler

        self.counter = torch.empty(1, dtype=torch.int32, device=device).zero_()
        self.report = sync.WaitReport({LAYERS_STAGE: "the experts' first layer", HANDOVER_STAGE: "the router"})
        self._device = device
        self._handovers: dict[int, Iterator[Handover]] = {}

    def handover(self, hidden: int) -> Handover:
        """Where the next router's launch leaves a token's row of `hidden` bf16 and its experts, for the experts' launch
        that must follow; two, in turn.
        """
        if hidden not in self._handovers:
            self._handovers[hidden] = itertools.cycle([Handover.of(hidden, self._device) for _ in range(2)])
        return next(self._handovers[hidden])


def meeting(device: torch.device) -> LayerMeeting:
    """That of all launches on `device`."""
    if device not in _meetings:
        _meetings[device] = LayerMeeting(device)
    return _meetings[device]


def check() -> None:
    """Raise `WaitExpiredError` if a block has waited for the others beyond the limit; reads host memory only."""
    for place in _meetings.values():
        place.report.check()
