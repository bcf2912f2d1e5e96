"""The several-GPU part of all_to_all.py: one process a GPU, started here."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.graphs import captured, copy_rate, time_call
from rose_dist.comm import all_reduce as comm_all_reduce
from rose_dist.comm.symmetric_memory import Region, SymmetricMemory
from rose_dist.kernels import all_reduce as kernels_all_reduce
from rose_dist.kernels.all_reduce import AllReduce
from rose_dist.kernels.moe_combine import combine
from rose_dist.kernels.rms_norm import add_rms_norm
from rose_dist.kernels.sync import WaitExpiredError

BF16 = torch.bfloat16
EPS = 1e-5
SHAPES = ((2880, 4), (7168, 8))
ROWS = (1, 2, 4, 8, 11, 16, 32, 64, 128, 256, 512, 1024, 4096)
MOST_BYTES = 64 << 20
REPLAYS = 2000
HEAP = 6 << 30
ALIGN_CYCLES = 150_000
CHECK_SPIN = 20_000
"""Most cycles by which ranks are put out of step before a replay."""


class Control:
    """What `SymmetricMemory` needs of a group, over torch.distributed on the CPU."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.cpu = dist.new_group(backend="gloo")

    def all_gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.cpu)
        return values

    def meet(self) -> None:
        dist.barrier(group=self.cpu)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    processes = [context.Process(target=_rank, args=(rank, arguments, answers)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    results: dict[str, Any] = {}
    while any(process.is_alive() for process in processes) or not answers.empty():
        if not answers.empty():
            results |= answers.get()
        if any(process.exitcode not in (None, 0) for process in processes):
            for process in processes:
                process.terminate()
            sys.exit("a rank failed; what it said is above")
        time.sleep(0.05)
    return results


def _rank(rank: int, arguments: argparse.Namespace, answers: Any) -> None:
    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=arguments.ranks, device_id=device)
        bench = Bench(Control(), device)
        for part in (bench.checks, bench.sizes, bench.fused, bench.dead_peer):
            result = part(arguments.budget)
            if rank == 0:
                print(result, flush=True)
                answers.put(result)
            bench.control.meet()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # peers' teardown must not wait for one another


class TorchMemory:
    """torch's symmetric memory in place of NVSHMEM's, where that can't start."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self.group, self.device = control, device

    def take(self, size: int) -> Region:
        import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415

        local = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(local, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        local.zero_()
        torch.cuda.synchronize()
        self.group.meet()
        return Region(local, tuple(handle.buffer_ptrs))


def memory_of(control: Control, device: torch.device, size: int = HEAP) -> tuple[Any, str]:
    """NVSHMEM's heap if every rank gets it, and what it is."""
    try:
        memory, problem = SymmetricMemory(control, device, size), ""
    except Exception as error:
        memory, problem = None, f"{type(error).__name__}: {error}"
    problems = control.all_gather_objects(problem)
    if not any(problems):
        return memory, "NVSHMEM"
    print(f"no NVSHMEM heap: {problems}", flush=True)
    return TorchMemory(control, device), "torch symmetric memory"


class Bench:
    """One rank's part."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self.control, self.device, self.rank, self.ranks = control, device, control.rank, control.size
        self.memory, self.heap = memory_of(control, device)
        self.ours = {(hidden, "ours"): self.all_reduce(hidden) for hidden, _ in SHAPES}
        usual = dict(kernels_all_reduce.ONE_SHOT_BYTES)
        for name, most in (("one shot", 4 << 20), ("two shots", 0)):
            kernels_all_reduce.ONE_SHOT_BYTES[self.ranks] = most
            for hidden, _ in SHAPES:
                self.ours[hidden, name] = _Fixed(self.all_reduce(hidden), most)
        kernels_all_reduce.ONE_SHOT_BYTES.update(usual)
        for hidden, _ in SHAPES:
            self.ours[hidden, "two shots, one round"] = _Fixed(self.ours[hidden, "two shots"].reduce, 0, 1 << 40)
        self.wide = {
            hidden: comm_all_reduce.create(self.memory, hidden=hidden, dtype=torch.float32, max_rows=64)
            for hidden, _ in SHAPES
        }
        self.token = torch.zeros(1, device=device)
        self.rate = copy_rate()

    def all_reduce(self, hidden: int) -> AllReduce:
        rows = MOST_BYTES // (hidden * 2)
        return comm_all_reduce.create(self.memory, hidden=hidden, dtype=BF16, max_rows=rows)

    def values(self, shape: tuple[int, ...], seed: int) -> list[Tensor]:
        """What each rank gives: all ranks can make it."""
        made = []
        for rank in range(self.ranks):
            generator = torch.Generator(self.device).manual_seed(1000 * seed + rank)
            made.append(torch.randn(shape, generator=generator, device=self.device).to(BF16))
        return made

    # --- Checks -------------------------------------------------------------------------------------------------------

    def checks(self, budget_s: float) -> dict[str, Any]:
        rows = []
        cases = [(hidden, k, n) for hidden, k in SHAPES for n in (1, 8, 64, 512)]
        for hidden, k, n in cases:
            for kind in ("ours", "two shots"):
                rows.append(self.check_sums(hidden, n, kind, budget_s / len(cases) / 3))
            rows.append(self.check_combine(hidden, k, n, budget_s / len(cases) / 3))
        self.check_special_values()
        return {"checks": rows, "symmetric memory": self.heap}

    def replay(
        self, name: str, budget_s: float, refill: Callable[[int], None], graph: Any, wrong: Callable[[], Tensor]
    ) -> dict[str, Any]:
        """Fresh data and a random delay before each replay. All ranks replay as often."""
        bad = torch.zeros((), dtype=torch.bool, device=self.device)
        start, count = time.perf_counter(), 0
        while count < REPLAYS:
            for _ in range(50):
                refill(count)
                torch.cuda._sleep(int(torch.randint(CHECK_SPIN, ())))
                graph.replay()
                bad |= wrong()
                count += 1
            if any(self.control.all_gather_objects(time.perf_counter() - start > budget_s)):
                break
        torch.cuda.synchronize()
        for one in self.ours.values():
            one.check()
        if bad.item():
            raise RuntimeError(f"WRONG RESULT: {name} within {count} replays")
        return {"check": name, "replays": count, "wrong": 0}

    def check_sums(self, hidden: int, rows: int, kind: str, budget_s: float) -> dict[str, Any]:
        reduce = self.ours[hidden, kind]
        x, out = (torch.empty(rows, hidden, dtype=BF16, device=self.device) for _ in range(2))
        expected = torch.empty_like(x)

        def refill(count: int) -> None:
            parts = self.values((rows, hidden), count)
            x.copy_(parts[self.rank])
            expected.copy_(functools.reduce(lambda a, b: a + b, [part.float() for part in parts]))
            out.fill_(torch.nan)

        graph = captured(lambda: reduce(x, out))
        return self.replay(
            f"{kind}: {rows} x {hidden}", budget_s, refill, graph,
            functools.partial(differ, out, expected),
        )  # fmt: skip

    def check_combine(self, hidden: int, k: int, rows: int, budget_s: float) -> dict[str, Any]:
        """Each rank holds half the pairs, at random slots."""
        reduce = self.ours[hidden, "ours"]
        expert_rows = torch.zeros(rows * k, hidden, dtype=BF16, device=self.device)
        slots = torch.full((rows, k), -1, dtype=torch.int32, device=self.device)  # the first call precedes `refill`
        weights = torch.zeros(rows, k, device=self.device)
        out, expected = (torch.empty(rows, hidden, dtype=BF16, device=self.device) for _ in range(2))

        def refill(count: int) -> None:
            parts = self.values((rows * k, hidden), count)
            generator = torch.Generator(self.device).manual_seed(count)
            chosen = torch.rand(rows, k, generator=generator, device=self.device)
            owner = torch.randint(self.ranks, (rows, k), generator=generator, device=self.device)
            order = chosen.flatten().argsort().view(rows, k).int()
            weights.copy_(chosen)
            expert_rows.copy_(parts[self.rank])
            slots.copy_(torch.where(owner == self.rank, order, -1))
            total = torch.zeros(rows, hidden, device=self.device)
            for rank, part in enumerate(parts):
                mine = torch.zeros_like(total)
                for j in range(k):
                    product = weights[:, j, None] * part[order[:, j].long()].float()
                    mine = torch.where(owner[:, j, None] == rank, mine + product, mine)
                total = total + mine if rank else mine
            expected.copy_(total)
            out.fill_(torch.nan)

        graph = captured(lambda: reduce.combine(expert_rows, slots, weights, out, tokens=rows))
        return self.replay(
            f"combine + all-reduce: {rows} x {hidden}", budget_s, refill, graph,
            functools.partial(differ, out, expected),
        )  # fmt: skip

    def check_special_values(self) -> None:
        """No bits of the data are taken for a flag: this would hang, and then say so."""
        for word in (0x80008000, 0x7F817F81, 0xFFFFFFFF, 0x7F80FF80, 0x00010001, 0x80018001, 0, 1, 2, 3):
            words = torch.full((8, 1440), word, dtype=torch.int64).to(torch.uint32).view(torch.int32).to(self.device)
            for kind in ("one shot", "two shots"):
                out = self.ours[2880, kind](words.view(BF16))
                expected = functools.reduce(lambda a, b: a + b, [words.view(BF16).float()] * self.ranks).to(BF16)
                torch.cuda.synchronize()
                if not torch.equal(out.nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16)):
                    raise RuntimeError(f"WRONG RESULT for words 0x{word:08x}")
        for one in self.ours.values():
            one.check()

    # --- Times --------------------------------------------------------------------------------------------------------

    def time(self, call: Callable[[], Any] | None, calls: int = 20) -> float | None:
        """The slowest rank's median; None if it fails on any rank."""
        try:
            mine = None if call is None else time_call(call, calls=calls, replays=40, meet=self.align)
        except Exception as error:
            print(f"rank {self.rank}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            mine = None
        values = self.control.all_gather_objects(mine)
        return None if None in values else max(values)

    def align(self) -> None:
        """On the stream: all GPUs get here at once, and then wait for as long as their hosts need to send the graph."""
        dist.all_reduce(self.token)
        torch.cuda._sleep(ALIGN_CYCLES)

    def meet(self) -> None:
        torch.cuda.synchronize()
        self.control.meet()

    def peers(self, x: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "NCCL us", lambda: dist.all_reduce(x)
        try:
            import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415

            name = dist.group.WORLD.group_name  # type: ignore[union-attr]
            buffer = symmetric.empty(x.numel(), dtype=x.dtype, device=self.device)
            symmetric.rendezvous(buffer, name)
        except Exception as error:
            print(f"no torch symmetric memory: {error}", flush=True)
            return
        operations = torch.ops.symm_mem
        yield "torch one-shot us", lambda: operations.one_shot_all_reduce(buffer, "sum", name)
        yield "torch two-shot us", lambda: operations.two_shot_all_reduce_(buffer, "sum", name)

    def sizes(self, budget_s: float) -> dict[str, Any]:
        del budget_s
        table = []
        for hidden, _ in SHAPES:
            for rows in (*ROWS, MOST_BYTES // (hidden * 2)):
                x, out = (torch.randn(rows, hidden, device=self.device).to(BF16) for _ in range(2))
                size = x.numel() * 2
                line: dict[str, Any] = {"rows": rows, "hidden": hidden, "KB": size / 1024}
                for kind in ("ours", "one shot", "two shots", "two shots, one round"):
                    reduce = self.ours[hidden, kind]
                    serves = kind != "one shot" or size <= 4 << 20
                    line[f"{kind} us"] = self.time(functools.partial(reduce, x, out) if serves else None)
                for name, call in self.peers(x):
                    line[name] = self.time(call)
                if line["ours us"]:
                    line["ours GB/s each way"] = 2 * size * (self.ranks - 1) / self.ranks / line["ours us"] / 1e3
                table.append(line)
                if self.rank == 0:
                    print(line, flush=True)
        return {"all_reduce": table, "copy TB/s": self.rate / 1e6}

    def fused(self, budget_s: float) -> dict[str, Any]:
        """One launch against the launches that it replaces, all of them ours."""
        del budget_s
        table = []
        for hidden, k in SHAPES:
            reduce, weight = self.ours[hidden, "ours"], torch.randn(hidden, device=self.device).to(BF16)
            for rows in (1, 8, 32, 64):
                x, residual, out = (torch.randn(rows, hidden, device=self.device).to(BF16) for _ in range(3))
                expert_rows = torch.randn(rows * k, hidden, device=self.device).to(BF16)
                slots = torch.randperm(rows * k, device=self.device).view(rows, k).int()
                slots = torch.where(torch.rand(slots.shape, device=self.device) < 0.5, slots, -1)
                weights, sums = torch.rand(rows, k, device=self.device), torch.empty(rows, hidden, device=self.device)

                def norm_apart(x: Any = x, residual: Any = residual, weight: Any = weight, reduce: Any = reduce) -> Any:
                    total = residual + reduce(x)
                    return torch.nn.functional.rms_norm(total, weight.shape, weight, EPS), total

                def norm_two(x: Any = x, residual: Any = residual, weight: Any = weight, reduce: Any = reduce) -> Any:
                    return add_rms_norm(reduce(x), residual, weight, EPS)

                def combine_apart(
                    args: Any = (expert_rows, slots, weights, out), reduce: Any = reduce, rows: int = rows
                ) -> None:
                    combine(*args, tokens=rows)
                    reduce(args[3], args[3])

                def combine_wide(
                    args: Any = (expert_rows, slots, weights), out: Any = out, wide: Any = self.wide[hidden],
                    rows: int = rows, sums: Any = sums,
                ) -> None:  # fmt: skip
                    combine(*args, sums, tokens=rows)
                    out.copy_(wide(sums, sums))

                fused_norm = functools.partial(reduce.add_rms_norm, x, residual, weight, EPS)
                fused_combine = functools.partial(reduce.combine, expert_rows, slots, weights, out, tokens=rows)
                table.append({
                    "rows": rows, "hidden": hidden, "all-reduce + residual + norm us": self.time(fused_norm),
                    "all-reduce, our norm us": self.time(norm_two),
                    "all-reduce, add, torch norm us": self.time(norm_apart),
                    "combine + all-reduce us": self.time(fused_combine),
                    "combine, all-reduce us": self.time(combine_apart),
                    "combine, all-reduce in fp32, round us": self.time(combine_wide),
                })  # fmt: skip
                if self.rank == 0:
                    print(table[-1], flush=True)
        return {"fused": table}

    def dead_peer(self, budget_s: float) -> dict[str, Any]:
        """The last rank misses a call: the others must say so, and soon. Nothing may follow on this all-reduce."""
        del budget_s
        region = self.memory.take(self.ours[2880, "ours"].sizes.region_bytes)
        reduce = AllReduce(
            self.ours[2880, "ours"].sizes, self.device, self.rank, region.addresses, limit_ns=300_000_000
        )
        x = torch.randn(4, 2880, device=self.device).to(BF16)
        reduce(x)
        self.meet()
        message, seconds = "", 0.0
        if self.rank < self.ranks - 1:
            start = time.perf_counter()
            reduce(x)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            try:
                reduce.check()
            except WaitExpiredError as error:
                message = str(error)
        said = self.control.all_gather_objects((message, seconds))
        if not all(text for text, _ in said[:-1]):
            raise RuntimeError(f"a rank did not notice the dead one: {said}")
        return {"a dead peer": f"{said[0][0]} (after {said[0][1]:.2f} s)"}


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Whether any bit of two bf16 tensors does, as a tensor."""
    return (a.view(torch.int16) != b.view(torch.int16)).any()


class _Fixed:
    """An `AllReduce` that keeps the choice between one and two shots which it was made with, or the rounds of two."""

    def __init__(self, reduce: Any, most: int, round_bytes: int = kernels_all_reduce.ROUND_BYTES) -> None:
        self.reduce, self._most, self._round_bytes = reduce, most, round_bytes
        self.check, self.sizes = reduce.check, reduce.sizes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        usual, ranks = kernels_all_reduce.ONE_SHOT_BYTES, self.sizes.ranks
        kernels_all_reduce.ONE_SHOT_BYTES = usual | {ranks: self._most}
        before, kernels_all_reduce.ROUND_BYTES = kernels_all_reduce.ROUND_BYTES, self._round_bytes
        try:
            return self.reduce(x, out)
        finally:
            kernels_all_reduce.ONE_SHOT_BYTES, kernels_all_reduce.ROUND_BYTES = usual, before
