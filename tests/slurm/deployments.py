"""Servers on two hosts of a test cluster, as faults hit them: one job by mpirun or by Slurm, or two replicas."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2

from tests.hosts import Host
from tests.ranks import REPOSITORY
from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import submit

OPTIONS = ["--kv-tokens", "4096", "--drain-timeout", "5"]
RANK = re.compile(r"\S*python\S* -m rose_dist serve")


class Deployment:
    """A server on two hosts."""

    url = ""

    def __init__(self, cluster: SlurmCluster, model: Path, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.log = folder / "job.out"
        self.endpoint = folder / "endpoint"
        self.start(model)
        deadline = time.monotonic() + 150
        while not self.endpoint_file().exists():
            assert not self.ended(), self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)
        self.url = self.endpoint_file().read_text().strip()

    def start(self, model: Path) -> None:
        raise NotImplementedError

    def endpoint_file(self) -> Path:
        raise NotImplementedError

    def ended(self) -> str:
        """How it ended; empty while it runs."""
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def ranks(self) -> list[tuple[Host, int]]:
        """Host and process by rank."""
        found = {}
        for host in self.cluster.nodes:
            for process, command in host.processes().items():
                if RANK.match(command):
                    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                    rank = next(v for v in variables if v.startswith(b"PMIX_RANK="))
                    found[int(rank.partition(b"=")[2])] = host, process
        return [found[rank] for rank in sorted(found)]

    def frontend(self) -> int:
        return next(
            process for process, command in self.ranks()[0][0].processes().items() if "-m rose_dist.frontend" in command
        )


class Mpirun(Deployment):
    launch: tuple[str, ...] = ("-n", "2")

    def start(self, model: Path) -> None:
        hosts = self.cluster.hosts
        variables = {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "PRTE_MCA_plm_ssh_agent": str(hosts.agent),
            "PRTE_MCA_prte_if_include": hosts.network,
            "OMPI_MCA_btl_tcp_if_include": hosts.network,
        }
        places = ",".join(f"{node.address}:1" for node in self.cluster.nodes)
        serve = ["serve", str(model), "--host", "0.0.0.0", "--port", "0", "--endpoint-file", str(self.endpoint)]
        command = ["launch", *self.launch, "--hosts", places, "--", *serve, "--log-dir", str(self.folder), *OPTIONS]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rose_dist", *command],
                env=os.environ | variables, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def endpoint_file(self) -> Path:
        return self.endpoint

    def ended(self) -> str:
        code = self.process.poll()
        return "" if code is None else f"exit code {code}"

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                return


class Replicas(Mpirun):
    """A replica a host, and the front door on this machine."""

    launch = ("--replicas", "2", "-n", "1")

    def ranks(self) -> list[tuple[Host, int]]:
        return [
            (host, process)
            for host in self.cluster.nodes
            for process, command in host.processes().items()
            if RANK.match(command)
        ]

    def frontend(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(c) for c in children if b"rose_dist.frontend" in Path(f"/proc/{c}/cmdline").read_bytes())

    def wait_until_whole(self, seconds: float) -> bool:
        """Both replicas take requests."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{self.url.removesuffix('/v1')}/health").json() == {"status": "ok"}:
                    return True
            time.sleep(0.2)
        return False


class Slurm(Deployment):
    def start(self, model: Path) -> None:
        self.job = submit(
            self.cluster, self.folder, "serve.sbatch", "-N2", "--ntasks-per-node=1", "--", str(model), *OPTIONS
        )

    def endpoint_file(self) -> Path:
        return self.folder / f"rose-{self.job}" / "endpoint"

    def ended(self) -> str:
        state = self.cluster.state(self.job)
        return "" if state in ("PENDING", "CONFIGURING", "RUNNING") else state

    def stop(self) -> None:
        self.cluster.run("scancel", str(self.job), check=False)
