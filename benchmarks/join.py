"""How long ranks of one host take from mpirun to joined, torch imported; and whether starts get in each other's way.

    python -m benchmarks.join [--ranks 8] [--starts 3] [--jobs 1]

Prints each start's time, the slowest rank's, and their median. With `--jobs 2` as many jobs start at once. Exit code 1
if a job failed, or left shared memory behind.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rose_dist.cli.launch import Launch

PROGRAM = """
import time
import torch
from rose_dist.comm.world import World
with World.join() as world:
    world.group.barrier()
    print(f"joined at {time.time()}", flush=True)
"""


def start(ranks: int, cores: str) -> subprocess.Popen[str]:
    launch = Launch(ranks, (), ())
    environment = launch.environment(os.environ)
    mpirun = launch.mpirun(environment)[: -len(["python", "-m", "rose_dist"])]
    command = ["taskset", "-c", cores, *mpirun, sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cores", default="0,1", help="as taskset takes them")
    options = parser.parse_args()
    before, seconds, failed = set(os.listdir("/dev/shm")), [], 0
    for number in range(options.starts):
        begun = time.time()
        for job in [start(options.ranks, options.cores) for _ in range(options.jobs)]:
            output = job.communicate(timeout=300)[0]
            joined = [float(text) for text in re.findall(r"joined at (\S+)", output)]
            if job.returncode or len(joined) != options.ranks:
                failed += 1
                print(output)
                continue
            seconds.append(max(joined) - begun)
            print(f"start {number + 1}: {seconds[-1]:.2f} s", flush=True)
    left = {name for name in set(os.listdir("/dev/shm")) - before if not in_use(Path("/dev/shm", name))}
    if seconds:
        print(f"{options.ranks} ranks, {options.jobs} jobs at once: median {statistics.median(seconds):.2f} s")
    print(f"{failed} jobs failed, {len(left)} files of shared memory left: {sorted(left)}")
    sys.exit(bool(failed or left))


def in_use(path: Path) -> bool:
    """Some process has the file mapped."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                return True
        except OSError:
            continue
    return not path.exists()


if __name__ == "__main__":
    main()
