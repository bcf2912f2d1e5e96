"""What the other ranks say when one is late or dies inside a dispatch, a combine or an all-reduce."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.exchange_layers import MODELS, Layer, varied
from rose_dist.comm.all_to_all.protocol import Dispatched
from rose_dist.kernels import jit
from rose_dist.kernels.all_reduce import AllReduce
from rose_dist.kernels.arch import Arch, device_info
from rose_dist.kernels.exchange_kernels import ExchangeKernels
from rose_dist.kernels.exchange_order import order_kernel
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.sync import WaitExpiredError

if TYPE_CHECKING:
    from benchmarks.all_to_all_ranks import Bench

DELAY_S, LIMIT_S = 5.0, 0.3
HIDDEN, TOKENS, MANY = 2880, 8, 2048


@dataclass(frozen=True)
class Case:
    """One collective call, what says that it waited in vain, and what it needs to have happened before."""

    name: str
    call: Callable[[], object]
    check: Callable[[], None]
    before: Callable[[], object] = lambda: None


def cases(bench: Bench) -> list[Case]:
    """Each with memory of its own: after a wait in vain nothing may follow on it."""
    found = [*_reductions(bench), *_exchanges(bench)]
    for case in found:
        case.before()
    bench.meet()
    return found


def _reductions(bench: Bench) -> list[Case]:
    def reduce() -> AllReduce:
        sizes = bench.ours[HIDDEN, "ours"].sizes
        region = bench.memory.take(sizes.region_bytes)
        return AllReduce(sizes, bench.device, bench.rank, region.addresses, limit_ns=int(LIMIT_S * 1e9))

    few, many, summing = reduce(), reduce(), reduce()
    x = torch.randn(MANY, HIDDEN, device=bench.device).bfloat16()
    slots = torch.arange(TOKENS * 4, dtype=torch.int32, device=bench.device).view(TOKENS, 4)
    weights, out = torch.rand(TOKENS, 4, device=bench.device), torch.empty_like(x[:TOKENS])
    return [
        Case("all-reduce, one shot", lambda: few(x[:TOKENS]), few.check),
        Case("all-reduce, two shots", lambda: many(x), many.check),
        Case(
            "combine + all-reduce", lambda: summing.combine(x[: TOKENS * 4], slots, weights, out, tokens=TOKENS),
            summing.check,
        ),
    ]  # fmt: skip


def _exchanges(bench: Bench) -> list[Case]:
    sms = min(bench.control.all_gather_objects(device_info(bench.device.index).sms))
    found = []
    for tokens in (TOKENS, MANY):
        for stage in ("dispatch", "combine"):
            layer = Layer(MODELS[0], tokens, bench.control, bench.device, bench.memory.take, sms, {})
            exchange = layer.moe.exchange
            exchange._wait = (exchange.report.address, int(LIMIT_S * 1e9), bench.rank)
            held: list[Dispatched] = []

            def combine(layer: Layer = layer, held: list[Dispatched] = held) -> None:
                layer.moe.combine(layer.expert_out, held[0], out=layer.out)

            def dispatch(layer: Layer = layer, held: list[Dispatched] = held) -> None:
                held[:] = [layer.dispatch()]

            name = f"{stage} between GPUs, {tokens} tokens"
            if stage == "dispatch":
                found.append(Case(name, dispatch, layer.moe.check))
            else:
                found.append(Case(name, combine, layer.moe.check, before=dispatch))
    return found


def exchange_kernels(arch: Arch, ranks: int) -> list[jit.Kernel]:
    """That `_exchanges` loads."""
    found: list[jit.Kernel] = []
    for tokens in (TOKENS, MANY):
        config = MODELS[0].config(tokens)
        layout = varied(config, ranks, 1, {})
        found += ExchangeKernels(arch, layout, PackedLayout(), config.expert_dtype).usual()
        found += [order_kernel(arch, layout)] if layout.has_rows else []
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
