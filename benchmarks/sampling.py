"""Drawing a decode batch's tokens on one GPU, against torch's operations in fp64: compared, then timed in CUDA graphs.

    python -m benchmarks.sampling [--batch 1 8 32 128] [--columns 201088] [--out FOLDER]

Peaked logits are as a model's are when a few hundred tokens are possible; of flat ones (independent normal) top-p keeps
half of the vocabulary. The floor is one read of the logits at this run's copy rate; up to some tens of rows they are in
L2. Weights of relative error 2^-22 choose another token than fp64 where the number lies that near to a token's edge.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.graphs import copy_rate, table, time_call
from rose_dist.engine.device_draw import DeviceDraw
from rose_dist.engine.draw import DrawRules, uniform
from rose_dist.engine.protocol import Generate, SamplingParams
from rose_dist.engine.request import Request

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "top-k 40": {"temperature": 1.0, "top_k": 40},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "top-k 1000, top-p": {"temperature": 1.0, "top_k": 1000, "top_p": 0.9},
}


def made_logits(rows: int, columns: int, peaked: bool) -> torch.Tensor:
    logits = torch.randn(rows, columns, device="cuda")
    if peaked:
        logits *= 2
        chosen = torch.randint(columns, (rows, 300), device="cuda")
        logits.scatter_(1, chosen, 12 + 3 * torch.randn(rows, 300, device="cuda"))
    return logits


def by_torch(logits: torch.Tensor, requests: list[Request]) -> Callable[[], torch.Tensor]:
    """What `DrawRules.draw` does with numbers that are on the device already."""
    groups = DrawRules.groups(requests, logits.device)
    if not groups:
        return lambda: logits.argmax(-1)
    (group,) = groups
    numbers = torch.from_numpy(uniform(group.seeds, group.seeds * 0)).cuda()[:, None]
    draw = group._draw_sorted if group.candidates else group._draw_unsorted
    return lambda: draw(torch.softmax(logits[group.rows].double() / group.temperature, -1), numbers)


def measured(rows: int, columns: int, peaked: bool, kind: str, rate: float) -> dict[str, Any]:
    logits = made_logits(rows, columns, peaked)
    requests = [
        Request(b"", Generate(request_id="", prompt=[0], sampling=SamplingParams(**KINDS[kind])), 9, seed, [])  # type: ignore[arg-type]
        for seed in range(rows)
    ]
    drawing = DeviceDraw(torch.zeros(rows, dtype=torch.int64, device="cuda"), columns)
    rules = torch.from_numpy(drawing.rules(requests)).contiguous().cuda()
    peer = by_torch(logits, requests)
    differ = int((drawing.draw(logits, rules) != peer()).sum())
    ours = time_call(lambda: drawing.draw(logits, rules), calls=10, replays=12)
    return {
        "rows": rows, "logits": "peaked" if peaked else "flat", "kind": kind, "us": ours,
        "torch us": time_call(peer, calls=1, replays=7), "floor us": logits.nbytes / rate, "rows that differ": differ,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--columns", type=int, default=201_088)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"copy rate {rate / 1e6:.2f} TB/s", flush=True)
    results = []
    with torch.inference_mode():
        for rows in arguments.batch:
            for peaked in (True, False):
                for kind in KINDS:
                    results.append(measured(rows, arguments.columns, peaked, kind, rate))
                    print(results[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sampling.json").write_text(json.dumps({"copy TB/s": rate / 1e6, "rows": results}, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
