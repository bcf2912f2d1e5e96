"""GPU architectures that kernels are compiled for."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from rose_dist.kernels.errors import UnsupportedArchError


@dataclass(frozen=True)
class Arch:
    """One compilation target."""

    name: str
    """As the compiler spells it, e.g. "sm_90a"."""
    vector_bytes: int
    """Bytes of the widest global load and store of one thread."""

    @property
    def blackwell(self) -> bool:
        """Has `cvt` to and from e2m1 and ue8m0, and 256-bit global accesses."""
        return self.vector_bytes == 32

    @property
    def hopper(self) -> bool:
        """Has `wgmma`, products of a warpgroup."""
        return self.name == "sm_90a"

    def __str__(self) -> str:
        return self.name


HOPPER = Arch("sm_90a", 16)
BLACKWELL = Arch("sm_100a", 32)
BLACKWELL_ULTRA = Arch("sm_103a", 32)
ARCHS = {arch.name: arch for arch in (HOPPER, BLACKWELL, BLACKWELL_ULTRA)}
_BY_CAPABILITY = {(9, 0): HOPPER, (10, 0): BLACKWELL, (10, 3): BLACKWELL_ULTRA}


@dataclass(frozen=True)
class DeviceInfo:
    """What kernels ask of a GPU. Read from it, never assumed."""

    arch: Arch
    sms: int


@functools.cache
def device_info(index: int) -> DeviceInfo:
    """The GPU with this torch index. Raises `UnsupportedArchError` for one that is neither Hopper nor Blackwell."""
    properties = torch.cuda.get_device_properties(index)
    arch = arch_of((properties.major, properties.minor), properties.name)
    return DeviceInfo(arch, properties.multi_processor_count)


def arch_of(capability: tuple[int, int], device_name: str = "this GPU") -> Arch:
    """The target of a compute capability. Raises `UnsupportedArchError`."""
    arch = _BY_CAPABILITY.get(capability)
    if arch is None:
        allowed = ", ".join(f"{major}.{minor} ({arch})" for (major, minor), arch in _BY_CAPABILITY.items())
        raise UnsupportedArchError(
            f"{device_name} has compute capability {capability[0]}.{capability[1]}; kernels exist for {allowed}"
        )
    return arch
