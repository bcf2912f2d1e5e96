"""A rank that is killed or late inside an exchange between two GPUs: what the other says and when, and if it lives on.

    python -m benchmarks.exchange_faults [--out FOLDER]

Every case has two processes of its own; all run at once. Exit code 1 if a rank hangs, says nothing or, after a delay
within the limit, has wrong sums.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.exchange_layers import MODELS, Layer
from benchmarks.exchange_sections import build_kernels
from benchmarks.gpu_ranks import Control
from benchmarks.graphs import table
from rose_dist.comm.symmetric_memory import SymmetricMemory
from rose_dist.kernels.arch import device_info
from rose_dist.kernels.sync import WaitExpiredError

TOKENS = 8
HEAP = 256 << 20
DELAY = 5.0
HANG = 90.0


@dataclass(frozen=True)
class Case:
    """What the last rank does before its half of the exchange, and how long the other waits."""

    fault: str
    half: str
    limit_s: float

    @property
    def in_time(self) -> bool:
        return self.fault == "late" and self.limit_s > DELAY


CASES = (
    *(Case("late", half, limit) for half in ("dispatch", "combine") for limit in (10.0, 2.0)),
    *(Case("killed", half, 2.0) for half in ("dispatch", "combine")),
)


def rank_of(rank: int, case: Case, port: int, answers: Any) -> None:
    """A process: rank 0 answers."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    control = Control()
    memory = SymmetricMemory(control, device, HEAP)
    layer = Layer(MODELS[0], TOKENS, control, device, memory.take, device_info(rank).sms, {})
    layer()
    torch.cuda.synchronize()
    everyone = layer.refill(0)
    layer.moe.exchange._wait = (layer.moe.exchange.report.address, int(case.limit_s * 1e9), rank)
    control.meet()
    started = time.perf_counter()
    try:
        exchange(layer, rank, case)
        problem = layer.wrong(everyone)
        message = f"WRONG {problem}" if problem else "all right"
    except WaitExpiredError as error:
        message = str(error)
    except RuntimeError as error:
        message = f"CUDA: {error}"
    seconds = time.perf_counter() - started
    try:
        alive = "yes" if float(torch.ones(1 << 20, device=device).sum()) == 1 << 20 else "WRONG"
    except RuntimeError as error:
        alive = f"no: {str(error)[:80]}"
    if rank == 0:
        answers.put(asdict(case) | {"seconds": seconds, "context lives": alive, "rank 0 says": message})
        time.sleep(1.0)  # the queue's pipe
    time.sleep(DELAY)  # a peer's memory must not go before the other is done
    os._exit(0)


def exchange(layer: Layer, rank: int, case: Case) -> None:
    """Raises `WaitExpiredError` after the half that waited in vain."""
    if case.half == "dispatch":
        fail(rank, case)
    layer.dispatched = layer.dispatch()
    layer.expert_out.copy_(layer.dispatched.x)
    torch.cuda.synchronize()
    layer.moe.check()
    if case.half == "combine":
        fail(rank, case)
    layer.moe.combine(layer.expert_out, layer.dispatched, out=layer.out)
    torch.cuda.synchronize()
    layer.moe.check()


def fail(rank: int, case: Case) -> None:
    if rank == 1 and case.fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(DELAY)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def bad(row: dict[str, Any], case: Case) -> bool:
    """Whether a case ended as it should not."""
    said = row["rank 0 says"]
    return (said != "all right") if case.in_time else not said.startswith("rank 0 waited for rank 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    build_kernels(device_info(0).arch, ["dead"], MODELS[:1], 2)
    context = torch.multiprocessing.get_context("spawn")
    running = []
    for case in CASES:
        answers, port = context.Queue(), free_port()
        processes = [context.Process(target=rank_of, args=(rank, case, port, answers)) for rank in range(2)]
        for process in processes:
            process.start()
        running.append((case, answers, processes))
    rows, failed = [], False
    for case, answers, processes in running:
        try:
            row = answers.get(timeout=HANG)
        except Exception:  # the queue's own class is hidden
            row = asdict(case) | {"seconds": HANG, "context lives": "?", "rank 0 says": "HUNG, or ended without a word"}
        rows.append(row)
        failed = failed or bad(row, case)
        for process in processes:
            process.join(2 * DELAY)
            process.kill()
    print(table(rows))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "exchange_faults.json").write_text(json.dumps(rows, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
