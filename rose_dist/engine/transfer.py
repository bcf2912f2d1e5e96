"""From the host to the device without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` there, in the order of the current stream. Through page-locked memory: a copy out of other memory may
    keep the host waiting for all that the device still has to do.
    """
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
