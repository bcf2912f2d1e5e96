"""Argument checks of the public functions: each raises `KernelArgumentError` that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.formats import BlockFormat, Scale, ScaleLayout

P = ParamSpec("P")
R = TypeVar("R")

MOST_FORMS = 1024
"""Forms of arguments that each check remembers."""
MOST_ALIGNMENT = 32
"""Bytes: no check asks for more."""

_PLAIN = frozenset((type(None), int, float, bool, torch.dtype))


def once(check: Callable[P, R]) -> Callable[P, R]:
    """Makes a check that goes by the form of its arguments alone, not by tensors' values, only once for each form: a
    model's layers and steps come with the same few forms, and a check takes longer than a launch.

    What it returns, such as the kernel for the form, is remembered too; `cache_clear` forgets. Arguments are tensors,
    hashable values, and tuples and dataclasses of such.
    """
    known: dict[Any, R] = {}

    @wraps(check)
    def checked(*arguments: P.args, **named: P.kwargs) -> R:
        key: Any = tuple([form(argument) for argument in arguments])
        if named:
            key = (key, *((name, form(argument)) for name, argument in named.items()))
        if key in known:
            return known[key]
        result = check(*arguments, **named)
        if len(known) >= MOST_FORMS:
            known.clear()
        known[key] = result
        return result

    checked.cache_clear = known.clear  # type: ignore[attr-defined]
    return checked


def form(value: Any) -> Any:
    """All that checks may go by, hashable."""
    if isinstance(value, torch.Tensor):
        alignment = value.data_ptr() % MOST_ALIGNMENT
        return value.shape, value.stride(), value.dtype, value.device, value.is_cuda, alignment
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return tuple([form(part) for part in value])
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else (kind, *[form(getattr(value, name)) for name in fields])


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


def global_scale(fmt: BlockFormat, tensor: torch.Tensor | None, device: torch.device) -> None:
    """NVFP4 comes with an fp32 tensor scale of one element, other formats without."""
    if (fmt.scale is Scale.E4M3) != (tensor is not None):
        needs = "needs one: fp32 [1], 448 · 6 / max|x|" if tensor is None else "takes none; leave it out"
        raise fail("global_scale", f"format {fmt} {needs}")
    if tensor is not None:
        shape("global_scale", tensor, 1)
        dtype("global_scale", tensor, torch.float32)
        same_device("global_scale", tensor, device)


def live_rows(tensor: torch.Tensor | None, device: torch.device) -> None:
    """None or int32 [1]."""
    if tensor is not None:
        shape("live_rows", tensor, 1)
        dtype("live_rows", tensor, torch.int32)
        same_device("live_rows", tensor, device)


def scales(tensor: torch.Tensor, fmt: BlockFormat, layout: ScaleLayout, rows: int, columns: int) -> None:
    """The shape, strides and dtype that `ScaleLayout.empty` gives."""
    wanted = layout.empty(fmt, rows, columns, torch.device("meta"))
    dtype("scales", tensor, wanted.dtype)
    shape("scales", tensor, *wanted.shape)
    if tensor.numel() and tensor.stride() != wanted.stride():
        raise fail("scales", f"strides are {tensor.stride()}; layout {layout} has {wanted.stride()}")


def indices(name: str, tensor: torch.Tensor, count: int, device: torch.device) -> None:
    """int64 [count], contiguous."""
    shape(name, tensor, count)
    dtype(name, tensor, torch.int64)
    same_device(name, tensor, device)
    dense(name, tensor, 8)
