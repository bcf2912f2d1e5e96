"""Network interfaces and RDMA ports, from /sys."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rose_dist.cli.doctor.probe import Probe


@dataclass(frozen=True)
class Interface:
    """A network interface with hardware behind it. speed_mbps: 0 where it doesn't say."""

    name: str
    up: bool
    speed_mbps: int


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device. layer: `InfiniBand`, or `Ethernet` for RoCE. numa_node: −1 where it is unknown."""

    device: str
    port: int
    active: bool
    gbps: float
    layer: str
    numa_node: int


@dataclass(frozen=True)
class Network:
    """gpudirect: the kernel module that lets RDMA devices reach GPU memory is loaded.
    verbs: user programs have device files for RDMA.
    gdrcopy: the device file through which CPUs write into GPU memory is there."""

    interfaces: tuple[Interface, ...]
    rdma_ports: tuple[RdmaPort, ...]
    gpudirect: bool
    verbs: bool
    gdrcopy: bool


def inspect_network(probe: Probe) -> Network:
    interfaces = tuple(
        Interface(
            entry.name,
            probe.read(f"sys/class/net/{entry.name}/operstate") == "up",
            max(_integer(probe.read(f"sys/class/net/{entry.name}/speed"), 0), 0),
        )
        for entry in probe.entries("sys/class/net")
        if (entry / "device").exists()
    )
    ports = tuple(
        _rdma_port(probe, device.name, int(port.name))
        for device in probe.entries("sys/class/infiniband")
        for port in probe.entries(f"sys/class/infiniband/{device.name}/ports")
        if port.name.isdigit()
    )
    gpudirect = any((probe.root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem"))
    verbs = any(entry.name.startswith("uverbs") for entry in probe.entries("dev/infiniband"))
    return Network(interfaces, ports, gpudirect, verbs, (probe.root / "dev/gdrdrv").exists())


def _rdma_port(probe: Probe, device: str, port: int) -> RdmaPort:
    folder = f"sys/class/infiniband/{device}"
    rate = re.match(r"[\d.]+", probe.read(f"{folder}/ports/{port}/rate"))
    return RdmaPort(
        device=device,
        port=port,
        active="ACTIVE" in probe.read(f"{folder}/ports/{port}/state"),
        gbps=float(rate.group()) if rate else 0.0,
        layer=probe.read(f"{folder}/ports/{port}/link_layer"),
        numa_node=_integer(probe.read(f"{folder}/device/numa_node"), -1),
    )


def _integer(text: str, default: int) -> int:
    return int(text) if re.fullmatch(r"-?\d+", text) else default
