"""GPUs, RDMA ports and cores over sysfs trees written for the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rose_dist.comm.affinity import interface_variables, nearest_port, parse_cores, rdma_variables, settle

DGX = {  # two processors; each switch holds a GPU and its NIC, and one more GPU than it has NICs
    "gpus": {
        "0000:1b:00.0": ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0", 0),
        "0000:43:00.0": ("pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:01.0", 0),
        "0000:9d:00.0": ("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:01.0", 1),
        "0000:c3:00.0": ("pci0000:b7/0000:b7:01.0", 1),
    },
    "nics": {
        "mlx5_0": ("0000:18:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0", 0, "4: ACTIVE"),
        "mlx5_1": ("0000:3a:00.0", "pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:00.0", 0, "4: ACTIVE"),
        "mlx5_10": ("0000:9a:00.0", "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0", 1, "4: ACTIVE"),
        "mlx5_2": ("0000:9b:00.0", "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:02.0", 1, "1: DOWN"),
        "mlx5_3": ("0000:d0:00.0", "pci0000:d0", 1, "4: ACTIVE"),
    },
}
FLAT = {  # a virtual machine, which shows no bridges: nothing is nearer than anything else
    "gpus": {f"0000:00:0{i}.0": ("pci0000:00", -1) for i in range(4)},
    "nics": {f"mlx5_{i}": (f"0000:00:1{i}.0", "pci0000:00", -1, "4: ACTIVE") for i in range(2)},
}


def write(root: Path, machine: dict[str, dict[str, tuple[object, ...]]]) -> Path:
    for address, (branch, numa) in machine["gpus"].items():
        _device(root, address, str(branch), numa)
    for name, (address, branch, numa, state) in machine["nics"].items():
        folder = root / "sys/class/infiniband" / name
        (folder / "ports/1").mkdir(parents=True)
        (folder / "ports/1/state").write_text(f"{state}\n")
        (folder / "device").symlink_to(_device(root, str(address), str(branch), numa))
    return root


def _device(root: Path, address: str, branch: str, numa: object) -> Path:
    folder = root / "sys/devices" / branch / address
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa}\n")
    link = root / "sys/bus/pci/devices" / address
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
    return folder


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("0000:1b:00.0", "mlx5_0:1"),
        ("0000:43:00.0", "mlx5_1:1"),
        ("0000:9d:00.0", "mlx5_10:1"),
        ("0000:c3:00.0", "mlx5_3:1"),  # none on its branch; the second of those on its processor, as rank 3
        ("0000:ff:00.0", None),
    ],
)
def test_the_nearest_active_port(tmp_path: Path, address: str, port: str | None) -> None:
    ranks = list(DGX["gpus"])
    rank = ranks.index(address) if address in ranks else 0
    write(tmp_path, DGX)
    order = {"0000:c3:00.0": 0}.get(address, rank)  # of mlx5_3 and mlx5_10 the lower number comes first
    assert nearest_port(tmp_path, address, order) == port


def test_ports_as_near_are_taken_in_turn(tmp_path: Path) -> None:
    write(tmp_path, FLAT)
    assert [nearest_port(tmp_path, address, rank) for rank, address in enumerate(FLAT["gpus"])] == [
        "mlx5_0:1", "mlx5_1:1", "mlx5_0:1", "mlx5_1:1"
    ]  # fmt: skip


def test_no_rdma_no_variables(tmp_path: Path) -> None:
    write(tmp_path, {"gpus": FLAT["gpus"], "nics": {}})
    assert nearest_port(tmp_path, "0000:00:00.0", 0) is None
    assert rdma_variables(None) == {}
    assert rdma_variables("mlx5_3:1") == {
        "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1", "NVSHMEM_HCA_LIST": "mlx5_3:1", "UCX_NET_DEVICES": "mlx5_3:1"
    }  # fmt: skip


def interfaces(root: Path, *names: str) -> Path:
    for name in names:
        (root / "sys/class/net" / name).mkdir(parents=True)
    return root


def test_interfaces_of_containers_are_left_out(tmp_path: Path) -> None:
    root = interfaces(tmp_path, "lo", "eth0", "ib0", "docker0", "veth12ab", "br-77", "bond0")
    variables = interface_variables({}, root)
    assert variables["OMPI_MCA_btl_tcp_if_exclude"] == "br-77,docker0,lo,veth12ab"
    assert variables["NCCL_SOCKET_IFNAME"].startswith("^lo,docker,veth")
    assert variables["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == variables["NCCL_SOCKET_IFNAME"]
    assert "OMPI_MCA_btl_tcp_if_exclude" not in interface_variables({"OMPI_MCA_btl_tcp_if_include": "ib0"}, root)


def test_a_host_with_nothing_else_keeps_them(tmp_path: Path) -> None:
    assert interface_variables({}, interfaces(tmp_path, "lo", "veth0")) == {}


def test_what_is_set_already_stays(tmp_path: Path) -> None:
    root = interfaces(tmp_path, "lo", "eth0")
    assert settle({"NCCL_SOCKET_IFNAME": "ib0", "OMPI_MCA_btl_tcp_if_exclude": "x"}, root).keys() == {
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
    }


def test_lists_of_cores() -> None:
    assert parse_cores("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cores("") == set()


def test_without_a_gpu_no_cores_are_given_up(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    settle({}, tmp_path)
    assert os.sched_getaffinity(0) == before
