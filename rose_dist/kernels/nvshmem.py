"""NVSHMEM's device functions for kernels: messages to GPUs across the network.

A kernel that calls them is a `NetworkKernel`. It is compiled with NVSHMEM's bitcode, which the package
nvidia-nvshmem-cu13 has for every arch (3.5.21 and later suit this compiler), and `load` prepares it for the process's
NVSHMEM, which must be initialised by then (`rose_dist.comm.symmetric_memory`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import Int32, Int64, Uint64, cute
from rose_dist.kernels.errors import MissingToolchainError
from rose_dist.kernels.jit import Kernel, Launcher

SIGNAL_SET = 9
"""NVSHMEM_SIGNAL_SET: the signal word is set to the value."""


class NetworkKernel(Kernel):
    """A kernel that calls functions of this module."""

    tvm_ffi = False


def put_signal_block(arch: Any, target: Any, source: Any, size: Any, signal: Any, value: Any, peer: Any) -> None:
    """Start to copy `size` bytes at `source`, in this GPU's symmetric memory, to rank `peer`'s place of the symmetric
    address `target`, and to set the u64 at `signal` there to `value` once they have arrived. Returns at once.

    By all threads of the block, with the same arguments; it is a block barrier, and what any of them wrote to `source`
    before is sent. Messages may overtake one another. The receiver acquire-loads the signal (u64, system scope); it
    publishes this message's payload and nothing else. `source` must stay as it is until the receiver is known to have
    seen the signal.
    """
    _function("nvshmemx_putmem_signal_nbi_block", bitcode(arch))(
        Int64(target), Int64(source), Uint64(size), Int64(signal), Uint64(value), Int32(SIGNAL_SET), Int32(peer)
    )


@cache
def _function(name: str, library: Path | None) -> Callable[..., None]:
    """NVSHMEM's pointers are passed as integers, as nvshmem4py's own bindings pass those of `nvshmem_ptr`."""

    def declaration(
        target: Int64, source: Int64, size: Uint64, signal: Int64, value: Uint64, operation: Int32, peer: Int32
    ) -> None: ...

    # The annotations are names in this module, not strings, for who reads them.
    declaration.__annotations__ = {
        "target": Int64, "source": Int64, "size": Uint64, "signal": Int64, "value": Uint64, "operation": Int32,
        "peer": Int32, "return": None,
    }  # fmt: skip
    source = None if library is None else cute.BitCode(str(library))
    declared: Callable[..., None] = cute.extern(declaration, name=name, source=source)
    return declared


def bitcode(arch: Arch) -> Path | None:
    """NVSHMEM's device library for `arch`. Raises `MissingToolchainError` where it is not installed.

    None would leave the functions open; the tests, which interpret calls of them, do that.
    """
    found = importlib.util.find_spec("nvidia.nvshmem")
    names = f"libnvshmem_device_{str(arch).rstrip('a')}.bc", "libnvshmem_device.bc"
    for folder in (found.submodule_search_locations or ()) if found else ():
        for name in names:
            if (path := Path(folder) / "lib" / name).exists():
                return path
    raise MissingToolchainError(
        f"messages between nodes need NVSHMEM's device library for {arch}: pip install 'nvidia-nvshmem-cu13>=3.5.21'"
    )


def load(kernel: NetworkKernel) -> Launcher:
    """Compile for the current GPU and make NVSHMEM's state known to the kernel; takes about 10 s, and is not cached on
    disk. A launch costs some 10 us of the host's time, so capture it in a graph.
    """
    import torch  # noqa: PLC0415
    from nvshmem.core import NvshmemKernelObject, library_init  # noqa: PLC0415

    compiled = cute.compile(kernel, *kernel.arguments(), options=f"--gpu-arch {kernel.arch}")
    executor = compiled.to(torch.cuda.current_device())
    library_init(NvshmemKernelObject.from_handle(int(executor.jit_module.cuda_library[0])))

    def launch(*arguments: Any) -> None:
        *numbers, stream = arguments
        from rose_dist.kernels.dsl import Stream  # noqa: PLC0415

        executor(*numbers, Stream(stream))

    return launch
