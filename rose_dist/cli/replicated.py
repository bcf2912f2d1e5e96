"""`rose launch --replicas`: what is started for each of them, and the front door before all."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import click

from rose_dist.cli import serve
from rose_dist.cli.frontends import Frontends, listen
from rose_dist.cli.launch import Launch, described
from rose_dist.cli.placement import Placement, place_replicas
from rose_dist.cli.replicas import Replica, run_replicas
from rose_dist.cli.serving_options import ServingOptions
from rose_dist.errors import RoseError
from rose_dist.frontend.config import ReplicaNews


def allocated_nodes() -> tuple[str, ...]:
    """The names of the Slurm job's nodes.

    Raises:
        RoseError: this is no Slurm job, or Slurm does not say.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise RoseError("--by srun is for a Slurm allocation; get one with salloc, or use slurm/serve.sbatch")
    try:
        named = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RoseError(f"Slurm does not say which nodes the job has: {error}") from error
    return tuple(named.stdout.split())


@dataclass(frozen=True)
class ReplicatedLaunch:
    """`replicas` jobs of `ranks` ranks, on `hosts` by mpirun or in a Slurm allocation by srun."""

    replicas: int
    ranks: int
    hosts: tuple[str, ...]
    command: tuple[str, ...]
    """`serve` and its arguments."""
    srun_options: Sequence[str] | None
    """Besides ours; None: mpirun."""

    def __post_init__(self) -> None:
        """
        Raises:
            click.UsageError: `command` is not `serve` with arguments that it takes.
            RoseError: the ranks don't fit the hosts.
        """
        if self.command[0] != "serve":
            raise click.UsageError("--replicas is for `serve`")
        if self.srun_options is not None and self.hosts:
            raise click.UsageError("--by srun takes the hosts of the Slurm allocation, not --hosts")
        _ = self._serving, self._launches(0)

    @cached_property
    def _places(self) -> list[Placement]:
        hosts = self.hosts if self.srun_options is None else allocated_nodes()
        return place_replicas(hosts, self.ranks, self.replicas)

    @cached_property
    def _serving(self) -> click.Context:
        return serve.command.make_context("rose serve", list(self.command[1:]))

    def _launches(self, start: int) -> list[Launch]:
        """By replica. `start` counts how often it was started before: logs are not overwritten."""
        where = "here" if not self.hosts and self.srun_options is None else "outside"
        logs = self._serving.params["log_dir"]
        launches = []
        for number, place in enumerate(self._places):
            own = ["--announce", where]
            if logs is not None:
                own += ["--log-dir", str(logs / f"replica-{number}.{start}")]
            devices = place.devices if self.srun_options is None else None  # Slurm gives each step its own
            launches.append(Launch(self.ranks, place.hosts, (*self.command, *own), devices))
        return launches

    def _environment(self, launch: Launch) -> dict[str, str]:
        """With threads for all ranks of a host."""
        together = Launch(self.ranks * self.replicas, self.hosts, ()) if self.srun_options is None else launch
        return launch.environment(together.environment(os.environ))

    def _launcher(self, launch: Launch, environment: Mapping[str, str]) -> list[str]:
        if self.srun_options is None:
            return launch.mpirun(environment)
        nodes = ",".join(host.partition(":")[0] for host in launch.hosts)
        return launch.srun(["--exact", "-w", nodes, *self.srun_options])

    def describe(self) -> list[str]:
        """A line for a shell for each replica."""
        lines = []
        for launch in self._launches(0):
            environment = self._environment(launch)
            lines.append(described(environment, self._launcher(launch, environment)))
        return lines

    def run(self, drain_timeout: float) -> None:
        """Until all is drained after a stop signal.

        Raises:
            RoseError: a frontend ended by itself, or no replica can be started.
        """
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s [launch] %(levelname)s: %(message)s", datefmt="%H:%M:%S"
        )
        names = ServingOptions.__dataclass_fields__
        serving = ServingOptions(**{name: self._serving.params[name] for name in names})
        model = self._serving.params["model"]
        if not (model / "config.json").exists():
            raise RoseError(f"there is no model in {model} on this host, where the API is (no config.json there)")
        listeners = listen(serving.host, serving.port, serving.frontends)
        frontends = Frontends(serving.frontend(model), listeners, replicas=self.replicas)
        asyncio.run(run_replicas(frontends, self._replicas, serving.endpoint_file, drain_timeout))

    def _replicas(self, tell: Callable[[ReplicaNews], None]) -> list[Replica]:
        return [self._replica(number, launch, tell) for number, launch in enumerate(self._launches(0))]

    def _replica(self, number: int, launch: Launch, tell: Callable[[ReplicaNews], None]) -> Replica:
        environment = self._environment(launch)
        return Replica(
            number, lambda start: self._launcher(self._launches(start)[number], environment), environment, tell
        )
