"""Small copies between page-locked memory of the host and a GPU, by a kernel.

A copy engine's copy keeps kernels waiting for 4 to 10 us before it and as long behind it (H200); a kernel's takes its
turn among the launches, and may be part of a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch


def read_host(source: Tensor, target: Tensor) -> None:
    """Copy to the GPU, in the order of the current stream.

    Args:
        source: int64 in page-locked memory, dense; not to be written before the copy is done.
        target: int64 on the GPU, dense, of the same shape.
    """
    launch.run(_prepare(source, target, False), target, source, target, target.numel())


def tell_host(source: Tensor, place: Tensor) -> None:
    """Copy to the host, in the order of the current stream; a graph may do so to another place each time.

    Args:
        source: int64 [n] on the GPU, dense.
        place: int64 [1] on the GPU: the address of as many int64 in page-locked memory; 0: nothing is copied.
    """
    launch.run(_prepare(source, place, True), source, source, place, source.numel())


@checks.once
def _prepare(source: Tensor, target: Tensor, indirect: bool) -> jit.Launcher:
    name = "place" if indirect else "target"
    if indirect:
        checks.shape("place", target, 1)
        checks.same_device("source", source, target.device)
    else:
        checks.shape("target", target, *source.shape)
    for each, tensor in (("source", source), (name, target)):
        checks.dtype(each, tensor, torch.int64)
        checks.dense(each, tensor, 8)
    if not target.is_cuda:
        raise checks.fail(name, "is not on a GPU")
    from rose_dist.kernels.cute import host_copy as cute  # noqa: PLC0415 - it loads the compiler

    return cute.launcher(launch.device(target).arch, indirect)
