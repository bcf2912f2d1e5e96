"""torch's all_to_all_vdev_2d over symmetric memory, a section of exchange.py."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.exchange_layers import BF16, Inputs

if TYPE_CHECKING:
    from benchmarks.exchange_sections import Rank

TOKENS = (1, 8, 32, 64, 128, 4096)
HEAP = 8 << 30
CALLS = 20


def vdev(one: Rank) -> list[dict[str, Any]]:
    """Its dispatch, which has no combine: a row a pair, in bf16, ordered by expert before."""
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(HEAP))
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415

    symmetric.set_backend("NVSHMEM")
    operation, name = torch.ops.symm_mem.all_to_all_vdev_2d, dist.group.WORLD.group_name  # type: ignore[union-attr]
    rows = []
    for model in [model for model in one.models if not model.fp8]:
        for tokens in one.sizes(TOKENS):
            pairs, local = tokens * model.top_k, model.experts // one.ranks
            x = symmetric.empty(pairs, model.hidden, dtype=BF16, device=one.device)
            out = symmetric.empty(pairs * one.ranks, model.hidden, dtype=BF16, device=one.device)
            splits = symmetric.empty(model.experts, dtype=torch.int64, device=one.device)
            both = symmetric.empty(2, one.ranks * local, dtype=torch.int64, device=one.device)
            for tensor in (x, out, splits, both):
                symmetric.rendezvous(tensor, name)
            ids = Inputs.of(model, tokens, one.rank, 0, one.device, whole=True).ids
            splits.copy_(torch.bincount(ids.flatten().long(), minlength=model.experts))
            call = functools.partial(operation, x, out, splits, both, name)
            line: dict[str, Any] = {"model": model.name, "tokens": tokens, "counts": counts(one, call, splits, both)}
            line["dispatch us"] = one.time(call)
            if line["dispatch us"] is None:
                line["without a graph us"] = launched(one, call)
            rows.append(line)
            one.say(line)
    return rows


def counts(one: Rank, call: Callable[[], Any], splits: torch.Tensor, both: torch.Tensor) -> str:
    """Whether every rank gets as many rows as are sent to it."""
    call()
    sent = one.control.all_gather_objects(splits.view(one.ranks, -1).sum(1).tolist())
    wrong = int(both[0].sum()) != sum(to[one.rank] for to in sent)
    return "WRONG" if any(one.control.all_gather_objects(wrong)) else "right"


def launched(one: Rank, call: Callable[[], Any]) -> float:
    """Where it can't be captured: the slowest rank's mean of calls in a row, which the host's launches may rule."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    one.align()
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(max(one.control.all_gather_objects(begin.elapsed_time(end) * 1e3 / CALLS)))
