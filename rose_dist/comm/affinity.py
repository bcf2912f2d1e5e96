"""A rank's place on its host: the cores and the RDMA port nearest to its GPU, from sysfs, and network interfaces that
lead nowhere. Libraries learn of it by environment variables, which are all written here and in `mpi_environment`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali")
"""Beginnings of the names of interfaces that lead to containers, or nowhere: their addresses are alike on all hosts."""

_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID")
_PCI_ADDRESS_BYTES = 16


@dataclass(frozen=True)
class PciDevice:
    """branch: the bridges from the root to the device, and it itself, as in `pci0000:15`, `0000:15:01.0`, …
    numa_node: −1 where it is unknown.
    """

    branch: tuple[str, ...]
    numa_node: int

    def nearness(self, other: PciDevice) -> tuple[int, bool]:
        """Greater is nearer: the bridges that two devices share, then whether they hang on the same processor."""
        shared = 0
        for one, two in zip(self.branch, other.branch, strict=False):
            if one != two:
                break
            shared += 1
        return shared, self.numa_node == other.numa_node != -1


def settle(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """What this rank's environment needs besides `environment`, whose own values stay; binds this process to the cores
    of its GPU's processor. To be called before MPI, CUDA and threads start.

    Args:
        root: where `sys` is.
    """
    local_rank = next((int(environment[name]) for name in _LOCAL_RANK_VARIABLES if name in environment), 0)
    address = gpu_address(local_rank)
    added = interface_variables(environment, root)
    if address is not None:
        added |= rdma_variables(nearest_port(root, address, local_rank))
        bind_to_cores(root, address)
    return {name: value for name, value in added.items() if name not in environment}


def gpu_address(local_rank: int) -> str | None:
    """The PCI address of the GPU that a rank takes, `0000:1b:00.0`; None without GPUs.

    The driver is asked rather than sysfs: containers, Slurm and CUDA_VISIBLE_DEVICES hide and renumber GPUs. That makes
    no context on any.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device = ctypes.c_int(), ctypes.c_int()
    text = ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    if cuda.cuDeviceGet(ctypes.byref(device), local_rank % count.value):
        return None
    if cuda.cuDeviceGetPCIBusId(text, _PCI_ADDRESS_BYTES, device):
        return None
    return text.value.decode().lower()


def nearest_port(root: Path, address: str, local_rank: int) -> str | None:
    """The active RDMA port, as `mlx5_3:1`, nearest to the GPU; of several as near, ranks take turns. None without."""
    gpu = pci_device(root / "sys/bus/pci/devices" / address)
    ports = [
        (f"{device.name}:{port.name}", pci_device(device / "device"))
        for device in sorted(_entries(root / "sys/class/infiniband"), key=_number)
        for port in sorted(_entries(device / "ports"), key=_number)
        if "ACTIVE" in _read(port / "state")
    ]
    if gpu is None or not ports:
        return None
    near = [(name, gpu.nearness(nic) if nic is not None else (0, False)) for name, nic in ports]
    most = max(nearness for _, nearness in near)
    nearest = [name for name, nearness in near if nearness == most]
    return nearest[local_rank % len(nearest)]


def rdma_variables(port: str | None) -> dict[str, str]:
    """NCCL finds the nearest ports itself."""
    if port is None:
        return {}
    return {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1", "NVSHMEM_HCA_LIST": port, "UCX_NET_DEVICES": port}


def interface_variables(environment: Mapping[str, str], root: Path) -> dict[str, str]:
    """For NCCL and NVSHMEM prefixes will do; Open MPI wants the names that there are."""
    names = [entry.name for entry in _entries(root / "sys/class/net")]
    virtual = sorted(name for name in names if name == "lo" or name.startswith(VIRTUAL[1:]))
    if len(virtual) == len(names):
        return {}
    prefixes = "^" + ",".join(VIRTUAL)
    variables = {"NCCL_SOCKET_IFNAME": prefixes, "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": prefixes}
    if "OMPI_MCA_btl_tcp_if_include" not in environment:  # Open MPI takes one of the two
        variables["OMPI_MCA_btl_tcp_if_exclude"] = ",".join(virtual)
    return variables


def bind_to_cores(root: Path, address: str) -> None:
    """To those beside the GPU, as far as this process may use them."""
    cores = parse_cores(_read(root / "sys/bus/pci/devices" / address / "local_cpulist"))
    if near := cores & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near)


def parse_cores(text: str) -> set[int]:
    """`0-3,8` as the kernel writes it."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def pci_device(path: Path) -> PciDevice | None:
    """The device that a link in sysfs leads to."""
    if not path.exists():
        return None
    parts: Sequence[str] = path.resolve().parts
    numa = _read(path / "numa_node")
    branch = tuple(part for part in parts if re.fullmatch(r"pci[\da-f:]+|[\da-f]+:[\da-f]{2}:[\da-f]{2}\.\d", part))
    return PciDevice(branch, int(numa) if re.fullmatch(r"-?\d+", numa) else -1)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _number(path: Path) -> list[int]:
    """mlx5_10 comes after mlx5_9."""
    return [int(digits) for digits in re.findall(r"\d+", path.name)]


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
