"""What public functions share between their checks and a kernel's launch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rose_dist.kernels.arch import Arch, DeviceInfo, device_info
from rose_dist.kernels.formats import BlockFormat, ScaleLayout
from rose_dist.kernels.jit import Launcher


def device(tensor: Tensor) -> DeviceInfo:
    """The GPU that holds `tensor`. Raises `UnsupportedArchError`."""
    return device_info(tensor.get_device())


def run(launcher: Launcher, on: Tensor, *arguments: Any) -> None:
    """Launch on the current stream of the GPU that holds `on`; `arguments` are numbers and tensors (None is 0)."""
    index = on.get_device()
    stream = torch._C._cuda_getCurrentRawStream(index)
    numbers = [a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments]
    if torch._C._cuda_getDevice() == index:
        launcher(*numbers, stream)
    else:
        with torch.cuda.device(index):
            launcher(*numbers, stream)


def widest(arch: Arch, row_bytes: int, *addresses: int) -> int:
    """Bytes of the widest access (a power of two ≤ `arch.vector_bytes`) that rows and base addresses allow."""
    return math.gcd(arch.vector_bytes, row_bytes, *addresses)


def address(tensor: Tensor | None) -> int:
    """The device address of the first element, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def empty_quantized(
    fmt: BlockFormat, layout: ScaleLayout, rows: int, columns: int, device: torch.device, group_rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Unwritten codes [rows, code columns] and scales in `layout` for [rows, columns] values. With groups of rows,
    which need COLUMNS, scales are [groups, group_rows, blocks] with strides (blocks · group_rows, 1, group_rows).
    """
    codes = torch.empty(rows, fmt.code_columns(columns), dtype=fmt.codes_dtype(), device=device)
    if not group_rows:
        return codes, layout.empty(fmt, rows, columns, device)
    shape = (rows // group_rows, fmt.blocks(columns), group_rows)
    return codes, torch.empty(*shape, dtype=fmt.scale.value, device=device).transpose(1, 2)
