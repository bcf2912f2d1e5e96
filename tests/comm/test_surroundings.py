"""What hosts do to a job: memory that runs out, clocks that differ, full disks, other jobs beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.join import in_use
from tests.comm.test_world import wait_until_gone
from tests.ranks import mpirun

pytestmark = pytest.mark.mpi(2)

PROGRAM = """
import logging, os, sys, time
from pathlib import Path
import zmq
from rose_dist.comm.addresses import reachable_address
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.doorbell import Doorbell

behaviour, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["PMIX_RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
with World.join(timeout=180, log_dir=folder) as world:
    for number in range(200):
        logging.info("line %d", number)
    if behaviour == "raise" and rank == 0:
        raise ValueError("nobody will read this")
    groups = world.groups(Layout.of(world.size))
    with world.stage("serve", stall=60):
        bell = Doorbell(zmq.Context(), reachable_address(world.hosts), groups.lockstep)
        (bell.ring if rank == 0 else lambda: bell.wait((), bool, world.progress))()
        assert world.group.all_gather_objects(rank) == list(range(world.size))
        if behaviour == "memory" and rank == 1:
            Path(sys.argv[3], "cgroup.procs").write_text(str(os.getpid()))
            hoard = []
            while True:
                hoard.append(b"x" * (1 << 20))
        if behaviour == "clock":
            times = world.group.all_gather_objects(time.time())
            assert abs(times[1] - times[0]) > 86000, times
            for _ in range(30):
                world.progress()
                time.sleep(0.1)
        world.group.barrier()
"""
MEMORY_BYTES = 256 << 20

SKEW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static const time_t offset = 86400 + 7;
int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += offset;
  return code;
}
time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *restrict result, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  result->tv_sec = now.tv_sec;
  result->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


def start(folder: Path, behaviour: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    command = [*prefix, sys.executable, str(folder / "program.py"), behaviour, str(folder), *arguments]
    return mpirun(2, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(job: subprocess.Popen[bytes]) -> tuple[int, str]:
    try:
        output = job.communicate(timeout=300)[0].decode()
    finally:
        job.kill()
    return job.returncode, output


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group whose processes may have little memory."""
    name = f"rose-test-{os.getpid()}"
    version_1 = Path("/sys/fs/cgroup/memory")
    group = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / name
    limit = group / ("memory.limit_in_bytes" if version_1.is_dir() else "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        limit.write_text(str(MEMORY_BYTES))
        yield group
    except OSError as error:
        pytest.skip(f"control groups here do not limit memory: {error}")
    finally:
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


def test_a_rank_killed_for_want_of_memory_ends_the_job(small_memory: Path, tmp_path: Path) -> None:
    code, output = finish(start(tmp_path, "memory", str(small_memory)))
    assert code != 0
    assert re.search(r"rank 1, stage 'serve': the process is gone|process rank 1 .* exited on\s+signal 9", output), (
        output
    )
    wait_until_gone(tmp_path, time.monotonic() + 60)


def test_clocks_a_day_apart(tmp_path: Path) -> None:
    """Time limits and beats go by the monotonic clock, and no message carries the time of day."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs cc")
    library = tmp_path / "skew.so"
    (tmp_path / "skew.c").write_text(SKEW)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "skew.c", "-ldl"], check=True, timeout=60)
    skewed = f'[ "$PMIX_RANK" = 0 ] || export LD_PRELOAD={library}; exec "$@"'
    code, output = finish(start(tmp_path, "clock", prefix=("sh", "-c", skewed, "sh")))
    assert code == 0, output
    assert "rank 1" not in output


def test_a_full_disk_for_logs(tmp_path: Path) -> None:
    """/dev/full takes no byte, as a full disk; the ranks do their work all the same."""
    (tmp_path / "rank-1.log").symlink_to("/dev/full")
    code, output = finish(start(tmp_path, "in order", prefix=("sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh")))
    assert code == 0, output


def test_a_failure_that_nobody_can_be_told_of_ends_the_job(tmp_path: Path) -> None:
    code, _ = finish(start(tmp_path, "raise", prefix=("sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh")))
    assert code == 1
    wait_until_gone(tmp_path, time.monotonic() + 60)


def test_two_jobs_at_once(tmp_path: Path) -> None:
    """No port or shared memory of one is another's. `benchmarks/join.py --starts 10 --jobs 2` does it ten times."""
    before = set(os.listdir("/dev/shm"))
    for job in [start(tmp_path / str(number), "in order") for number in range(2)]:
        code, output = finish(job)
        assert code == 0, output
    assert not {name for name in set(os.listdir("/dev/shm")) - before if not in_use(Path("/dev/shm", name))}
