"""Random faults under load: what becomes of the job, and of every client.

    python -m tests.slurm.faults MODEL [--faults 60] [--seed 0] [--kinds kill,stop] [--by Mpirun,Slurm,Replicas]

Two hosts made of namespaces with a rank each, by mpirun or by a real Slurm as one job, or by mpirun as two replicas,
serve MODEL to six clients that ask without pause. Each fault gets a server of its own; a line of the table says how it
went. Exit code 1 if any went wrong:

- the job has ended, with a message and an exit code, or answers again, within 10 s, or 30 s where the network is cut.
  "Answers again" is an answer to what was asked after the fault; it may take as long as the slowest one before longer,
  since this machine may be slow;
- replicas go on answering where one job ends, and the lost one joins again;
- no process of it is left;
- every request got its right answer, a beginning of that and an error, or an error; none waits for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import SlurmCluster
from tests.slurm.deployments import Deployment, Mpirun, Replicas, Slurm
from tests.slurm.load import CLIENTS, PROMPTS, Load, ask


@dataclass(frozen=True)
class Fault:
    """`inflict(deployment, rank)` returns what undoes it."""

    inflict: Callable[[Deployment, int], Callable[[], object]]
    seconds: float
    message: str
    """What the log must say if the job ends; a regular expression. Empty: the job must go on."""
    slurm_only: bool = False
    hits_replica: bool = True
    """Where the server is replicas, only one is lost."""


def send(number: signal.Signals) -> Callable[[Deployment, int], Callable[[], object]]:
    def inflict(deployment: Deployment, rank: int) -> Callable[[], object]:
        os.kill(deployment.ranks()[rank][1], number)
        return lambda: None

    return inflict


def cut(deployment: Deployment, rank: int) -> Callable[[], object]:
    host = deployment.ranks()[rank][0]
    host.set_link("down")
    return lambda: host.set_link("up")


def cut_for_5_s(deployment: Deployment, rank: int) -> Callable[[], object]:
    join = cut(deployment, rank)
    time.sleep(5)
    join()
    return lambda: None


def kill_frontend(deployment: Deployment, rank: int) -> Callable[[], object]:
    os.kill(deployment.frontend(), signal.SIGKILL)
    return lambda: None


def kill_slurmd(deployment: Deployment, rank: int) -> Callable[[], object]:
    host = deployment.ranks()[rank][0]
    for process, command in host.processes().items():
        if command.startswith("slurmd "):
            os.kill(process, signal.SIGKILL)
    return lambda: deployment.cluster.start_node(host)


def fill_disk(deployment: Deployment, rank: int) -> Callable[[], object]:
    filler = deployment.folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65536))
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0")
    return filler.unlink


GUARDS = r"\[\d@\S+\] rank \d, stage '.*': "
FAULTS = {
    "kill": Fault(send(signal.SIGKILL), 10, GUARDS + "the process is gone"),
    "stop": Fault(send(signal.SIGSTOP), 10, GUARDS + "stopped for 5 s"),
    "cut": Fault(cut, 30, GUARDS + "nothing heard for 10 s"),
    "cut 5 s": Fault(cut_for_5_s, 30, ""),
    "kill frontend": Fault(
        kill_frontend, 10, "error: the frontend process ended by itself with exit code -9", hits_replica=False
    ),
    "kill slurmd": Fault(kill_slurmd, 10, "", slurm_only=True),
    "fill disk": Fault(fill_disk, 10, ""),
}


def run_one(name: str, rank: int, make: type[Deployment], cluster: SlurmCluster, model: Path, folder: Path) -> str:
    """One line of the table; it ends in `ok` or in what went wrong."""
    fault = FAULTS[name]
    deployment = make(cluster, model, folder)
    goes_on = not fault.message or (isinstance(deployment, Replicas) and fault.hits_replica)
    problems = []
    if isinstance(deployment, Replicas) and not deployment.wait_until_whole(60):
        problems.append("not all replicas have started")
    right = {prompt: ask(deployment.url, prompt) for prompt in PROMPTS}
    with Load(deployment.url, right) as load:
        while load.outcomes["answered"] < CLIENTS:
            time.sleep(0.1)
        time.sleep(random.uniform(0.0, 2.0))
        limit = fault.seconds + (load.slowest if goes_on else 0)
        begun = time.monotonic()
        undo = fault.inflict(deployment, rank)
        end = watch(deployment, load, begun + limit, after=time.monotonic() if goes_on else math.inf)
        seconds = time.monotonic() - begun
        if isinstance(deployment, Replicas) and goes_on:
            problems += joins_again(deployment, undo, lost=bool(fault.message))
        else:
            undo()
        log = deployment.log.read_text(errors="replace")
    problems += wrong_end(end, log, "" if goes_on else fault.message) + load.problems()
    deployment.stop()
    if left := wait_until_clean(cluster):
        problems.append(f"left behind: {left}")
    said = next((line for line in log.splitlines() if re.search(GUARDS, line)), "")
    outcomes = load.outcomes
    verdict = "ok" if not problems else "FAILED: " + "; ".join(problems)
    return (
        f"| {name} | {rank} | {make.__name__} | {end} | {seconds:.1f} s | {outcomes['answered']} | {outcomes['error']} "
        f"| {outcomes['hung']} | {said.partition('] ')[2][:90]} | {verdict} |"
    )


def watch(deployment: Deployment, load: Load, deadline: float, after: float) -> str:
    """How the job ended, or `answers again` to what was asked after `after`; empty if neither came in time."""
    while time.monotonic() < deadline:
        if end := deployment.ended():
            return end
        if load.last_answer > after:
            return "answers again"
        time.sleep(0.1)
    return ""


def wrong_end(end: str, log: str, message: str) -> list[str]:
    """`message`: what the log must say; empty if the job must go on."""
    if not end:
        return ["neither ended nor answered in time"]
    if bool(message) == (end == "answers again") or end in ("exit code 0", "COMPLETED"):
        return ["not as expected"]
    return [] if re.search(message, log) else ["no message"]


def joins_again(deployment: Replicas, undo: Callable[[], object], *, lost: bool) -> list[str]:
    """Undo the fault, once the front door has said that a replica was `lost`, and wait for both."""
    problems = []
    if lost and not wait_for_message(deployment.log, r"replica \d has ended: ", 30):
        problems.append("nothing says that a replica has ended")
    undo()
    if not deployment.wait_until_whole(90):
        problems.append("the lost replica has not joined again")
    return problems


def wait_for_message(log: Path, pattern: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not re.search(pattern, log.read_text(errors="replace")):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def wait_until_clean(cluster: SlurmCluster) -> list[str]:
    """What is left on the nodes after 30 s; it is killed then."""
    deadline = time.monotonic() + 30
    while True:
        left = {
            process: command
            for node in cluster.nodes
            for process, command in node.processes().items()
            if not command.startswith("slurmd ")
        }
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for node in cluster.nodes:
        cluster.run("scontrol", "update", f"NodeName={node.name}", "State=RESUME", check=False)
    with contextlib.suppress(AssertionError):
        cluster.wait_until_idle()
    return [command[:80] for command in left.values()]


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A folder on a disk of 4 MB that hosts made later see too."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(FAULTS), help="comma-separated")
    parser.add_argument("--by", default="Mpirun,Slurm,Replicas", help="comma-separated")
    options = parser.parse_args()
    makes = [make for make in (Mpirun, Slurm, Replicas) if make.__name__ in options.by.split(",")]
    chooser = random.Random(options.seed)
    kinds = options.kinds.split(",")
    print("| fault | of rank | by | end | after | answered | errors | hung | message | |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    good = 0
    with (
        small_disk() as disk,
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        SlurmCluster(Path(folder), nodes=2, cpus=2, gpus=1) as cluster,
    ):
        for number in range(options.faults):
            name = kinds[number % len(kinds)] if number < len(kinds) else chooser.choice(kinds)
            make = Slurm if FAULTS[name].slurm_only else chooser.choice(makes)
            place = disk / str(number)
            place.mkdir()
            rank = chooser.randrange(2)
            try:
                line = run_one(name, rank, make, cluster, options.model.resolve(), place)
            except AssertionError as error:
                wait_until_clean(cluster)
                line = f"| {name} | {rank} | {make.__name__} | | | | | | {str(error)[:200]!r} | FAILED: no start |"
            good += line.endswith("| ok |")
            print(line, flush=True)
    print(f"\n{good} of {options.faults} as they should be")
    sys.exit(good != options.faults)


if __name__ == "__main__":
    main()
