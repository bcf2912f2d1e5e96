"""All-reduces of others for all_to_all.py. None uses NVLink multicast; one that can't be had says why."""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.all_to_all_ranks import Bench

Call = Callable[[], Tensor]
Arm = Callable[[Tensor], Call | None]
"""From what this rank gives to a call that returns the sums; None for sizes that it does not serve."""

BF16 = torch.bfloat16
CHECKED = (8, 2880)
CHECK_SECONDS = 5.0
STACKS_SECONDS = 15.0
CUSTOM_MOST = 8 << 20
"""Bytes; vLLM takes NCCL above."""
CUSTOM_BLOCKS = 36
CUSTOM_CALLS = 1 << 14
"""That may be captured."""
FUSED_MOST = 16 << 20
"""Bytes; its memory is 8 times that on two GPUs."""
MOST_BYTES = 64 << 20
"""Of the others."""
NORM_ROWS = 128
EPS = 1e-5

_kept: list[Any] = []
"""What libraries know by address only."""


class Peers:
    """Those of `makers` that every rank gets and that add up rightly, by the names of columns.

    missing: why others were left out.
    """

    def __init__(self, bench: Bench, makers: dict[str, Callable[[Bench], Arm]], missing: dict[str, str]) -> None:
        """Collective. missing: what is known before."""
        self.arms: dict[str, Arm] = {}
        self.missing = dict(missing)
        for name, make in makers.items():
            if name in missing:
                continue
            start = time.monotonic()
            try:
                arm, problem = make(bench), ""
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            problems = bench.control.all_gather_objects(problem)
            if not any(problems):
                problems = bench.control.all_gather_objects(_wrong(bench, arm))
            if any(problems):
                self.missing[name] = next(filter(None, problems)).splitlines()[0][:200]
            else:
                self.arms[name] = arm
            if bench.rank == 0:
                print(f"{name}: {self.missing.get(name, 'right')} ({time.monotonic() - start:.1f} s)", flush=True)

    def calls(self, x: Tensor) -> dict[str, Call | None]:
        """Collective. None for what does not serve this size."""
        found: dict[str, Call | None] = {}
        for name, arm in self.arms.items():
            try:
                found[f"{name} us"] = arm(x)
            except Exception as error:
                print(f"{name}, {x.nbytes} bytes: {type(error).__name__}: {str(error)[:200]}", flush=True)
                found[f"{name} us"] = None
        return found

    def __str__(self) -> str:
        left_out = "".join(f"; without {name} ({reason})" for name, reason in self.missing.items())
        return f"{', '.join(self.arms) or 'none'}{left_out}"


def _wrong(bench: Bench, arm: Arm) -> str:
    """Of small whole numbers. One that hangs ends the process: its kernel can't be stopped."""
    x = torch.full(CHECKED, bench.rank + 1, dtype=BF16, device=bench.device)
    call = arm(x)
    assert call is not None
    total, done, until = call(), torch.cuda.Event(), time.monotonic() + CHECK_SECONDS
    done.record()
    while not done.query():
        if time.monotonic() > until:
            print(f"rank {bench.rank}: an all-reduce hangs: {arm}", flush=True)
            sys.stdout.flush()
            os._exit(1)
    expected = bench.ranks * (bench.ranks + 1) // 2
    return "" if (total == expected).all() else f"wrong sums: {total.flatten()[:4].tolist()}, not {expected}"


# --- NCCL and torch ---------------------------------------------------------------------------------------------------


def nccl(bench: Bench) -> Arm:
    def arm(x: Tensor) -> Call:
        return functools.partial(_in_place, x)

    return arm


def _in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def nccl_symmetric(bench: Bench) -> Arm:
    """On memory that every rank has registered as a window, for which NCCL has kernels of its own."""
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        raise RuntimeError("NCCL_NVLS_ENABLE is not 0")
    backend = dist.group.WORLD._get_backend(bench.device)  # type: ignore[union-attr]
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        memory = torch.zeros(MOST_BYTES // 2, dtype=BF16, device=bench.device)
    torch.cuda.synchronize()
    backend.register_mem_pool(pool, symm=True)  # registers what is in the pool by now
    _kept.append(pool)

    def arm(x: Tensor) -> Call:
        buffer = memory[: x.numel()].view(x.shape).copy_(x)
        return functools.partial(_in_place, buffer)

    return arm


def torch_symmetric(operation: str) -> Callable[[Bench], Arm]:
    def make(bench: Bench) -> Arm:
        import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415

        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        call = getattr(torch.ops.symm_mem, operation)

        def arm(x: Tensor) -> Call:
            buffer = symmetric.empty(x.numel(), dtype=x.dtype, device=bench.device)
            symmetric.rendezvous(buffer, name)
            buffer.copy_(x.flatten())
            return functools.partial(call, buffer, "sum", name)

        return arm

    return make


LIBRARIES = {
    "NCCL": nccl, "NCCL symmetric": nccl_symmetric, "torch one-shot": torch_symmetric("one_shot_all_reduce"),
    "torch two-shot": torch_symmetric("two_shot_all_reduce_"),
}  # fmt: skip


# --- FlashInfer -------------------------------------------------------------------------------------------------------


def flashinfer_custom(bench: Bench) -> Arm:
    """vLLM's: each rank reads the others' inputs between two barriers, here where the inputs stand, with no copy."""
    from flashinfer import comm  # noqa: PLC0415

    signals = bench.memory.take(comm.vllm_meta_size() + CUSTOM_MOST)
    inputs = bench.memory.take(CUSTOM_MOST)
    # A captured call reads the addresses of its inputs from the next entry of this table, which registration would
    # fill in after the capture; here all entries are those of the one buffer.
    entry = torch.zeros(8, dtype=torch.int64)
    entry[: bench.ranks] = torch.tensor(inputs.addresses)
    table = entry.repeat(CUSTOM_CALLS).to(bench.device).view(torch.uint8)
    handle = comm.vllm_init_custom_ar(list(signals.addresses), table, bench.rank, True)
    comm.vllm_register_buffer(handle, list(inputs.addresses))
    _kept.append(table)
    bench.meet()

    def arm(x: Tensor) -> Call | None:
        if x.nbytes > CUSTOM_MOST:
            return None
        mine = inputs.local[: x.nbytes].view(BF16).view(x.shape).copy_(x)
        out = torch.empty_like(x)

        def call() -> Tensor:
            comm.vllm_all_reduce(handle, mine, out, 0, 0, CUSTOM_BLOCKS)
            return out

        return call

    return arm


class Fused:
    """TensorRT-LLM's, with or without the residual and the norm behind it; one shot or two, as it chooses."""

    def __init__(self, bench: Bench) -> None:
        """Collective."""
        from flashinfer import comm  # noqa: PLC0415

        self.comm, self.bench, width = comm, bench, 4096
        self.handles, self.workspace = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            bench.rank, bench.ranks, FUSED_MOST // (width * 2), width, group=dist.group.WORLD
        )
        bench.meet()

    def __call__(self, x: Tensor) -> Call | None:
        if x.nbytes > FUSED_MOST:
            return None
        out = torch.empty_like(x)
        call = self._call(x, self.comm.AllReduceFusionPattern.kAllReduce, allreduce_out=out)

        def summed() -> Tensor:
            call()
            return out

        return summed

    def with_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Call:
        """norm(residual + sum), the sum with the residual besides."""
        total, normed = torch.empty_like(x), torch.empty_like(x)
        call = self._call(
            x, self.comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual, residual_out=total, norm_out=normed, rms_gamma=weight, rms_eps=EPS,
        )  # fmt: skip

        def run() -> Tensor:
            call()
            return normed

        return run

    def _call(self, x: Tensor, pattern: int, **tensors: Any) -> Callable[[], None]:
        names = (
            "allreduce_out", "residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma",
            "rms_eps", "scale_factor", "layout_code",
        )  # fmt: skip
        return functools.partial(
            self.comm.trtllm_allreduce_fusion, x, self.bench.ranks, self.bench.rank, *x.shape, self.workspace, True,
            True, True, pattern, None, **(dict.fromkeys(names) | tensors),
        )  # fmt: skip


FLASHINFER: dict[str, Callable[[Bench], Arm]] = {"FlashInfer custom": flashinfer_custom, "FlashInfer fused": Fused}
FLASHINFER_MODULES = {"custom all-reduce": "FlashInfer custom", "fused all-reduce": "FlashInfer fused"}
"""Of `flashinfer_modules`, and the columns that need them."""


def beside_flashinfer(bench: Bench, rows_of: dict[int, tuple[int, ...]], problems: dict[str, str]) -> dict[str, Any]:
    """rows_of: by hidden size; problems: by module, what `Builds` says."""
    faulthandler.dump_traceback_later(STACKS_SECONDS, repeat=True)  # says where it hangs, should it
    missing = {column: problems[name] for name, column in FLASHINFER_MODULES.items() if problems[name]}
    peers, table = Peers(bench, FLASHINFER, missing), []
    fused = peers.arms.get("FlashInfer fused")
    for hidden, counts in rows_of.items():
        weight = torch.randn(hidden, device=bench.device).to(BF16)
        for rows in counts:
            x, residual, out = (torch.randn(rows, hidden, device=bench.device).to(BF16) for _ in range(3))
            if x.nbytes > FUSED_MOST:
                continue
            calls = {"ours us": functools.partial(bench.ours[hidden, "ours"], x, out)} | peers.calls(x)
            line: dict[str, Any] = {"rows": rows, "hidden": hidden, "KB": x.nbytes / 1024}
            line |= {name: bench.time(call) for name, call in calls.items()}
            others = [line[name] for name in line if name.startswith("FlashInfer") and line[name]]
            if others and line["ours us"]:
                line["fastest other / ours"] = min(others) / line["ours us"]
            if rows <= NORM_ROWS and isinstance(fused, Fused):
                ours = bench.layer_ends(hidden, x, residual, weight)
                line["ours + residual, norm us"] = bench.time(ours["all-reduce + residual, norm"])
                line["FlashInfer + residual, norm us"] = bench.time(fused.with_norm(x, residual, weight))
            table.append(line)
            if bench.rank == 0:
                print(line, flush=True)
    faulthandler.cancel_dump_traceback_later()
    return {"all_reduce beside FlashInfer": table, "FlashInfer's all-reduces": str(peers)}


def symmetric_kernels(bench: Bench) -> dict[str, Any]:
    """Whether NCCL takes its kernels for symmetric memory, by the bytes of a rank."""
    peers, found = Peers(bench, {"NCCL symmetric": nccl_symmetric}, {}), {}
    for size in (8 << 10, 1 << 20, MOST_BYTES):
        call = peers.calls(torch.zeros(size // 2, dtype=BF16, device=bench.device)).get("NCCL symmetric us")
        if call is not None:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                call()
                torch.cuda.synchronize()
            names = {event.name.partition("(")[0] for event in profile.events()}
            found[f"NCCL symmetric, {size >> 10} KB"] = ", ".join(sorted(names))
    return found or {"NCCL symmetric": str(peers)}
