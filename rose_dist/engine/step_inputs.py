"""A step's plan on its way to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROOM = 1 << 18
"""Bytes that go in one copy: what 4,000 tokens of prompts need."""
_ALIGNMENT = 32


class StepInputs:
    """Arrays that go to a device together: a copy each would keep the host longer than some small kernels do.

    `put` gives the place at once, what is in it comes with `send`. On a CPU arrays stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._there = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def put(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Tensor:
        """A tensor like `array`, to be read once `send` has been called."""
        values = torch.from_numpy(array)
        if self._device.type == "cpu":
            return values
        if self._used + max(values.nbytes, 1) > self._there.shape[0]:
            self.send()
            self._host, self._there = self._room(max(ROOM, values.nbytes))
        part = slice(self._used, self._used + values.nbytes)
        self._used = -(-part.stop // _ALIGNMENT) * _ALIGNMENT
        host, there = (memory[part].view(values.dtype).view(values.shape) for memory in (self._host, self._there))
        host.copy_(values)
        return there

    def send(self) -> None:
        """Copy what has been put, in the order of the current stream; nothing waits."""
        if self._used:
            self._there[: self._used].copy_(self._host[: self._used], non_blocking=True)
        self._host = self._there = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def _room(self, size: int) -> tuple[Tensor, Tensor]:
        """Memory for one copy: page-locked, since a copy out of other memory may keep the host waiting for all that the
        device still has to do, and on the device. torch gives neither to anyone else before the copy is done.
        """
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return host, torch.empty(size, dtype=torch.uint8, device=self._device)
