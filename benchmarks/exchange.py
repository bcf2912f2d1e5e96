"""Dispatch and combine between data-parallel GPUs of one NVLink domain: checked to the bit, then timed beside others.

    python -m benchmarks.exchange --ranks 2 [--out FOLDER] [--budget SECONDS] [--sections checks,times,chain,dead]
        [--models gpt-oss,fp8] [--tokens 128,4096]

Starts one process a GPU. Every line is printed when it is known, and the results so far are written after each section,
so that a section that fails loses no other. Section `vdev`, torch's all_to_all_vdev_2d, wants NVSHMEM for itself: run
it alone. `--budget` bounds the checks. `--models`: those whose names contain one of these; `--tokens`: in place of each
section's own. Kernels are compiled first, by all CPU cores (`--build sm_90a` does so without a GPU and stops). Times
are medians of CUDA graph replays in microseconds, of the slowest rank; combine is the pair's time less dispatch's. The
floors are the bytes that must cross NVLink at the rate that this run's own copies reach, both ways at once. Column
`back`: all results come back to their token's rank, or one sum from each rank (`AllToAllConfig.partial_sums`).

    checks    fresh routing, bounds and delays every replay
    times     every model and size, beside NCCL
    forms     few tokens: results as packets and as plain rows, rows quantised by dispatch and by a launch before
    prefill   4,096 tokens: chunks of 8 and 16 tokens, shares of senders
    links     copies to and from the next rank by blocks of a kernel, both ways at once
    chain     step after step with nothing that aligns the ranks
    dead      a rank misses a call
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.exchange_layers import MODELS, Model
from benchmarks.exchange_sections import SECTIONS, Rank, build_kernels
from benchmarks.gpu_ranks import NO_MULTICAST
from benchmarks.graphs import table
from rose_dist.kernels.arch import ARCHS, device_info


def work(rank: int, arguments: argparse.Namespace, answers: Any) -> None:
    """A rank's process: each section's result, or what went wrong in it, as soon as it is known."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=120)
    dist.init_process_group("nccl", rank=rank, world_size=arguments.ranks, device_id=device, timeout=limit)
    try:
        one = Rank(device, chosen(arguments), tuple(int(size) for size in arguments.tokens.split(",") if size))
        answers.put({"NVLink GB/s each way": one.rate / 1e3})
        for section in arguments.sections.split(","):
            try:
                result: Any = getattr(one, section)(arguments.budget)
            except Exception:
                traceback.print_exc()
                result = f"FAILED on rank {rank}: {traceback.format_exc(limit=1)}"
            outcome = one.control.all_gather_objects(isinstance(result, str) and result.startswith("FAILED"))
            if rank == 0 or (isinstance(result, str) and result.startswith("FAILED")):
                print(section, "done" if not any(outcome) else "failed", flush=True)
                answers.put({section: result})
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    time.sleep(1.0)  # the queue's pipe
    os._exit(0)  # peers' teardown must not wait for one another


def chosen(arguments: argparse.Namespace) -> list[Model]:
    return [model for model in MODELS if any(part in model.name for part in arguments.models.split(","))]


def write(results: dict[str, Any], folder: Path, ranks: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"exchange_{ranks}.json").write_text(json.dumps(results, indent=1))
    tables = [f"## {key}\n\n{table(value)}" for key, value in results.items() if isinstance(value, list)]
    facts = [f"- {key}: {value}" for key, value in results.items() if not isinstance(value, list)]
    (folder / f"exchange_{ranks}.md").write_text("\n".join([*facts, "", *tables]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for the checks")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--models", default="", help="parts of names; all")
    parser.add_argument("--tokens", default="", help="numbers; each section's own")
    parser.add_argument("--build", choices=ARCHS, help="compile the kernels into the cache and stop; needs no GPU")
    arguments = parser.parse_args()
    start = time.perf_counter()
    arch = ARCHS[arguments.build] if arguments.build else device_info(0).arch
    count = build_kernels(arch, arguments.sections.split(","), chosen(arguments), arguments.ranks)
    print(f"{count} kernels built in {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.build:
        return
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    os.environ.update(NO_MULTICAST)
    processes = [context.Process(target=work, args=(rank, arguments, answers)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    save = functools.partial(write, results, arguments.out, arguments.ranks)
    while any(process.is_alive() for process in processes) or not answers.empty():
        if not answers.empty():
            results.update(answers.get())
            save()
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(2.0)
            while not answers.empty():
                results.update(answers.get())
            for process in processes:
                process.terminate()
            results["failed"] = "a rank ended; what it said is above"
            break
        time.sleep(0.05)
    save()
    wrong = [line for line in results.get("checks", ()) if isinstance(line, dict) and line["wrong"]]
    print((arguments.out / f"exchange_{arguments.ranks}.md").read_text())
    if wrong or "failed" in results or not isinstance(results.get("checks", []), list):
        sys.exit(f"WRONG OR FAILED: {wrong or 'see above'}")


if __name__ == "__main__":
    main()
