"""From the host to the device and back without waiting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` there, in the order of the current stream. Through page-locked memory: a copy out of other memory may
    keep the host waiting for all that the device still has to do.
    """
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class ToHost:
    """A device's tensor on its way to the host, in the order of the current stream. On a CPU the tensor itself."""

    _tensor: Tensor
    _arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: Tensor) -> ToHost:
        if not tensor.is_cuda:
            return cls(tensor, None)
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        return cls(copied, _now())

    @classmethod
    def written(cls, memory: Tensor, by: torch.device) -> ToHost:
        """The host's memory, which launches on a device up to now write."""
        return cls(memory, None if by.type == "cpu" else _now())

    @property
    def there(self) -> bool:
        """Whether `result` would not wait."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def result(self) -> Tensor:
        """Waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
