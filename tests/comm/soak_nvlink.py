"""A long run of exchanges between emulated GPUs, to the bit: too slow for the test suite.

    python -m tests.comm.soak_nvlink [--iterations 1024] [--seconds 3600] [--first 0]

An iteration is a dispatch and a combine of all ranks with fresh routing and fresh numbers of tokens, so that packets,
packets with plain results and plain rows meet one another, in one launch or by halves; either all results come back to
their tokens' ranks, or a sum a rank. Eight run back to back on the
same memory, as a replayed graph would, with nothing between the ranks: each is stopped now and then at random, so that
others run ahead. Every run of eight has a seed; an error says which one replays it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import pytest

from rose_dist.kernels.cute import exchange_rows
from tests.comm.echo import CASE, SUMMED, Echo, plain_results_from, plain_rows_from
from tests.comm.test_nvlink_gpu import Job

CHAIN = 8
MOST_TOKENS = 17
TOKENS = (0, 0, 1, 2, 3, 4, 5, 9, MOST_TOKENS)
RANKS = (2, 2, 2, 2, 2, 2, 2, 3)
THREADS = 64
"""Of a block that sends or takes plain rows: fewer than a GPU has, because the emulation pays for each."""
STALLS = 0.002


def run(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """One chain; the number of its ranks. Raises if anything is wrong."""
    rng = random.Random(seed)
    plain_results_from(3, monkeypatch)
    plain_rows_from(5, monkeypatch)
    ranks = rng.choice(RANKS)
    job = Job(rng.choice((CASE, SUMMED)), ranks, monkeypatch, max_tokens=MOST_TOKENS)
    echoes = []
    for number in range(CHAIN):
        echo = Echo(job, tuple(rng.choice(TOKENS) for _ in range(ranks)), CHAIN * seed + number)
        for half in ("dispatch", "combine"):
            for step in rng.choice(((half,), (f"{half}_send", f"{half}_recv"))):
                echo.call(step)
        echoes.append(echo)
    job.run(seed, stalls=STALLS)
    wrong = [number for number, echo in enumerate(echoes) if not echo.right()]
    if wrong:
        raise AssertionError(f"seed {seed}: exchanges {wrong} gave wrong sums")
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--first", type=int, default=0, help="the first chain's seed")
    arguments = parser.parse_args()
    exchange_rows.THREADS = THREADS
    start, done, seed = time.monotonic(), 0, arguments.first
    ranks = dict.fromkeys(RANKS, 0)
    while done < arguments.iterations and time.monotonic() - start < arguments.seconds:
        with pytest.MonkeyPatch.context() as monkeypatch:
            ranks[run(seed, monkeypatch)] += CHAIN
        done, seed = done + CHAIN, seed + 1
        print(f"{done} iterations right, {ranks}, {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(0 if done >= arguments.iterations else "the time was over")


if __name__ == "__main__":
    main()
