"""What the other ranks say when one is late or dies inside an all-reduce, with a combine or without.

Between data-parallel GPUs: exchange_faults.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rose_dist.kernels.all_reduce import AllReduce
from rose_dist.kernels.sync import WaitExpiredError

if TYPE_CHECKING:
    from benchmarks.all_to_all_ranks import Bench

DELAY_S, LIMIT_S = 5.0, 0.3
HIDDEN, TOKENS, MANY = 2880, 8, 2048


@dataclass(frozen=True)
class Case:
    """One collective call, and what says that it waited in vain."""

    name: str
    call: Callable[[], object]
    check: Callable[[], None]


def cases(bench: Bench) -> list[Case]:
    """Each with memory of its own: after a wait in vain nothing may follow on it."""

    def reduce() -> AllReduce:
        sizes = bench.ours[HIDDEN, "ours"].sizes
        region = bench.memory.take(sizes.region_bytes)
        return AllReduce(sizes, bench.device, bench.rank, region.addresses, limit_ns=int(LIMIT_S * 1e9))

    few, many, summing = reduce(), reduce(), reduce()
    x = torch.randn(MANY, HIDDEN, device=bench.device).bfloat16()
    slots = torch.arange(TOKENS * 4, dtype=torch.int32, device=bench.device).view(TOKENS, 4)
    weights, out = torch.rand(TOKENS, 4, device=bench.device), torch.empty_like(x[:TOKENS])
    found = [
        Case("all-reduce, one shot", lambda: few(x[:TOKENS]), few.check),
        Case("all-reduce, two shots", lambda: many(x), many.check),
        Case(
            "combine + all-reduce", lambda: summing.combine(x[: TOKENS * 4], slots, weights, out, tokens=TOKENS),
            summing.check,
        ),
    ]  # fmt: skip
    bench.meet()
    return found


def late(bench: Bench) -> dict[str, Any]:
    """The last rank makes every call 5 s after the others, who give up long before and say whom they waited for. Its
    own calls find all that they wait for.
    """
    all_cases = cases(bench)
    if bench.rank == bench.ranks - 1:
        time.sleep(DELAY_S)
    rows = [_run(case, "5 s late") for case in all_cases]
    said = bench.control.all_gather_objects(rows)
    silent = [row for rank in said[:-1] for row in rank if not row["said"]]
    if silent:
        raise RuntimeError(f"nobody noticed the late rank: {silent}")
    return {"late": said[0]}


def killed(bench: Bench) -> dict[str, Any]:
    """The last rank dies while the others are inside the first call; what follows writes to memory of the dead, which
    the driver may keep or not. The last section, of course.
    """
    all_cases = cases(bench)
    if bench.rank == bench.ranks - 1:
        time.sleep(LIMIT_S / 4)
        os.kill(os.getpid(), signal.SIGKILL)
    rows: list[dict[str, Any]] = []
    try:
        for number, case in enumerate(all_cases):
            rows.append(_run(case, "dead" if number else "killed"))
    except Exception as error:
        rows.append({"inside": case.name, "last rank": "dead", "said": str(error).splitlines()[0], "GPU works": False})
    if not rows[0]["said"]:
        raise RuntimeError(f"nobody noticed the dead rank: {rows}")
    return {"killed": rows}


def _run(case: Case, how: str) -> dict[str, Any]:
    start, said = time.perf_counter(), ""
    case.call()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    try:
        case.check()
    except WaitExpiredError as error:
        said = str(error)
    works = bool((torch.ones(4, device="cuda").sum() == 4).item())
    return {
        "inside": case.name,
        "last rank": how,
        "limit s": LIMIT_S,
        "took s": seconds,
        "said": said,
        "GPU works": works,
    }
