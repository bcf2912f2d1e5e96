"""A real Slurm cluster on this machine: its daemons on hosts made of namespaces, `tests.hosts`.

Host 1 is the login node with the controller and munge, the others are compute nodes. The folder is their shared file
system. Everything ends with the hosts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.hosts import Host, Hosts, skip_unless_root

START_SECONDS = 90
KILL_WAIT_SECONDS = 60
"""What Slurm gives a job between SIGTERM and SIGKILL; its default is 30."""
_PMIX = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/pmix2/lib")

_CONFIG = """
ClusterName=test
SlurmctldHost={login.name}({login.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=pmix
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MinJobAge=600
KillWait={kill_wait}
SlurmctldTimeout=30
SlurmdTimeout=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def skip_without_slurm() -> None:
    """Skips the test where there is no Slurm to start."""
    skip_unless_root()
    for program in ("slurmctld", "slurmd", "munged", "srun"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (Debian: apt-get install slurmctld slurmd slurm-client munge libpmix2)")
    if not (_PMIX / "libpmix.so.2").exists():
        pytest.skip(f"needs {_PMIX}/libpmix.so.2 (Debian: apt-get install libpmix2)")


class SlurmCluster:
    """`nodes` compute nodes with `cpus` cores and `gpus` pretended GPUs each, until the block is left."""

    def __init__(self, folder: Path, *, nodes: int, cpus: int, gpus: int) -> None:
        self.folder = folder
        self.cpus = cpus
        self.gpus = gpus
        self.hosts = Hosts(nodes + 1, folder)

    @property
    def login(self) -> Host:
        return self.hosts[0]

    @property
    def nodes(self) -> list[Host]:
        return list(self.hosts[1:])

    def __enter__(self) -> SlurmCluster:
        self.hosts.__enter__()
        try:
            self._configure()
            self._start()
        except BaseException:
            print(self.logs())
            self.hosts.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.logs())
        self.hosts.stop()

    def _configure(self) -> None:
        for name in (
            "state",
            "log",
            "dev",
            *(f"{kind}/{node.name}" for kind in ("spool", "tmp") for node in self.nodes),
        ):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        lines = [_CONFIG.format(folder=self.folder, login=self.login, kill_wait=KILL_WAIT_SECONDS)]
        for node in self.nodes:
            size = f"CPUs={self.cpus} RealMemory=4000 Gres=gpu:test:{self.gpus}"
            lines.append(f"NodeName={node.name} NodeAddr={node.address} {size} State=UNKNOWN")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # This plugin isn't used, but loads where no cgroup file system is mounted.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        devices = [self.folder / "dev" / f"gpu{index}" for index in range(self.gpus)]
        for device in devices:
            os.mknod(device, 0o20666, os.makedev(1, 3))  # Slurm wants character devices: these are like /dev/null
        names = ",".join(node.name for node in self.nodes)
        (self.folder / "gres.conf").write_text(
            "".join(f"NodeName={names} Name=gpu Type=test File={device}\n" for device in devices)
        )
        # Slurm's PMIx plugin opens the library by the name that only Debian's libpmix-dev has.
        shutil.copytree(_PMIX, self.folder / "pmix", symlinks=True)
        if not (self.folder / "pmix/libpmix.so").exists():
            (self.folder / "pmix/libpmix.so").symlink_to("libpmix.so.2")

    def _start(self) -> None:
        for host in self.hosts:
            host.run("mount", "--bind", str(self.folder / "pmix"), str(_PMIX))
        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid",
                 "log-file": "log/munged.log", "seed-file": "munge.seed"}  # fmt: skip
        paths = [f"--{option}={self.folder / name}" for option, name in munge.items()]
        self.login.run("munged", "--force", "--num-threads=2", *paths)
        self.run("slurmctld", "-c")
        for node in self.nodes:
            self.start_node(node)
        self.wait_until_idle()

    def start_node(self, node: Host) -> None:
        """Start slurmd there."""
        node.run("slurmd", "-N", node.name, env=self.environment)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command on the login node."""
        return self.login.run(*command, **({"env": self.environment} | options))

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """The same, not waited for."""
        return subprocess.Popen(self.login.enter(*command), text=True, env=self.environment, **options)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while set(states := self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split()) != {"idle"}:
            assert time.monotonic() < deadline, states
            time.sleep(0.1)

    def submit(self, *arguments: str, **options: Any) -> int:
        """`sbatch`; the job's number."""
        return int(self.run("sbatch", "--parsable", *arguments, **options).stdout.partition(";")[0])

    def state(self, job: int | str) -> str:
        return self.run("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T").stdout.strip()

    def wait_for_state(self, job: int | str, *states: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {' or '.join(states)}\n{self.logs()}"
            time.sleep(0.1)
        return state

    def logs(self) -> str:
        texts = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted((self.folder / "log").glob("*.log"))]
        return "\n".join(texts)
