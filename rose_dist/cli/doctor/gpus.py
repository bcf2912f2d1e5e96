"""The NVIDIA GPUs, their driver and the NVLinks between them, as nvidia-smi tells."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rose_dist.cli.doctor.probe import Probe

_QUERY = "index,name,memory.total,compute_cap,pci.bus_id"


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_mib: int
    capability: str
    """As `9.0`."""
    pci: str


@dataclass(frozen=True)
class GpuReport:
    """driver, cuda: versions, empty without a driver; cuda is the newest that the driver runs.
    links: between each pair of GPUs what `nvidia-smi topo -m` calls it, as `NV18` or `SYS`; `X` on the diagonal.
    fabric: state of the NVSwitch fabric, empty where there is none.
    """

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]
    links: tuple[tuple[str, ...], ...]
    fabric: str

    @property
    def all_linked(self) -> bool:
        """Every pair of at least two GPUs is joined by NVLink."""
        pairs = [link for i, row in enumerate(self.links) for j, link in enumerate(row) if i != j]
        return bool(pairs) and all(link.startswith("NV") for link in pairs)


def inspect_gpus(probe: Probe) -> GpuReport:
    module = re.search(r"Kernel Module(?: for \S+)?\s+(\S+)", probe.read("proc/driver/nvidia/version"))
    listing = probe.run("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    gpus = tuple(gpu for line in (listing or "").splitlines() if (gpu := _parse_gpu(line)))
    if not gpus:
        return GpuReport(module.group(1) if module else "", "", (), (), "")
    summary = probe.run("nvidia-smi") or ""
    details = probe.run("nvidia-smi", "-q") or ""
    topology = probe.run("nvidia-smi", "topo", "-m") if len(gpus) > 1 else None
    return GpuReport(
        driver=_first(r"Driver Version:\s*(\S+)", summary) or (module.group(1) if module else ""),
        cuda=_first(r"CUDA Version:\s*(\S+)", summary),
        gpus=gpus,
        links=_parse_topology(topology or "", len(gpus)),
        fabric=_first(r"Fabric\s*\n\s*State\s*:(.+)", details).replace("N/A", ""),
    )


def _parse_gpu(line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(_QUERY.split(",")) or not fields[0].isdigit():
        return None
    index, name, memory, capability, pci = fields
    return Gpu(int(index), name, int(memory) if memory.isdigit() else 0, capability, pci)


def _parse_topology(text: str, count: int) -> tuple[tuple[str, ...], ...]:
    """The GPU columns of the rows `GPU0 …`; empty unless there is one for each GPU."""
    rows = [line.split() for line in text.splitlines()]
    links = [tuple(row[1 : count + 1]) for row in rows if re.fullmatch(r"GPU\d+", row[0] if row else "") and "X" in row]
    return tuple(links) if len(links) == count and all(len(row) == count for row in links) else ()


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found.group(1).strip() if found else ""
