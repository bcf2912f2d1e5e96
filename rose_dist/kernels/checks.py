"""Argument checks of the public functions: each raises `KernelArgumentError` that names the argument."""

from __future__ import annotations

import torch

from rose_dist.kernels.errors import KernelArgumentError



def fail(name: str, problem: str) -> KernelArgumentError:
    """The error to raise for argument `name`."""
    return KernelArgumentError(f"{name}: {problem}")


def dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """`tensor` has one of the dtypes."""
    if tensor.dtype not in allowed:
        raise fail(name, f"dtype is {tensor.dtype}; allowed: {', '.join(str(d) for d in allowed)}")


def shape(name: str, tensor: torch.Tensor, *expected: int | None) -> None:
    """`tensor` has this shape; None stands for any extent."""
    matches = tensor.dim() == len(expected) and all(e in (None, n) for e, n in zip(expected, tensor.shape, strict=True))
    if not matches:
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise fail(name, f"shape is {tuple(tensor.shape)}; needs ({wanted})")


def same_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """`tensor` is on `device`."""
    if tensor.device != device:
        raise fail(name, f"is on {tensor.device}; must be on {device} like the first argument")


def rows(name: str, tensor: torch.Tensor, align: int = 16) -> None:
    """The last dimension is dense, and every row starts at a multiple of `align` bytes."""
    if tensor.numel() == 0:
        return
    if tensor.stride(-1) != 1:
        raise fail(name, f"rows are not contiguous (last stride is {tensor.stride(-1)}); call .contiguous()")
    size = tensor.element_size()
    if tensor.data_ptr() % align:
        raise fail(name, f"starts at an address that is not a multiple of {align} bytes; copy it with .clone()")
    for extent, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if extent > 1 and stride * size % align:
            raise fail(name, f"has a stride of {stride * size} bytes; must be a multiple of {align}")


def dense(name: str, tensor: torch.Tensor, align: int = 16) -> None:
    """The whole tensor is contiguous and starts at a multiple of `align` bytes."""
    if not tensor.is_contiguous():
        raise fail(name, f"is not contiguous (strides {tensor.stride()}); call .contiguous()")
    rows(name, tensor, align)


def multiple(name: str, value: int, of: int, why: str) -> None:
    """`value` is a positive multiple of `of`."""
    if value <= 0 or value % of:
        raise fail(name, f"is {value}; must be a positive multiple of {of} ({why})")
