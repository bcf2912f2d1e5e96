"""What all_to_all.py checks on several GPUs before it times anything."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.all_to_all_ranks import BF16, CHECK_SPIN, EPS, LINEAR, SHAPES, Bench
from benchmarks.graphs import captured
from rose_dist.comm.layout import even_split
from rose_dist.kernels.linear_add import linear_add
from rose_dist.kernels.rms_norm import rms_norm

REPLAYS = 2000


class CheckedBench(Bench):
    """Replays of captured graphs with fresh data, to the bit."""

    def checks(self, budget_s: float) -> dict[str, Any]:
        rows = []
        cases = [(hidden, k, n) for hidden, k in SHAPES for n in (1, 8, 64, 512)]
        for hidden, k, n in cases:
            for kind in ("ours", "two shots"):
                rows.append(self.check_sums(hidden, n, kind, budget_s / len(cases) / 4))
            rows.append(self.check_combine(hidden, k, n, budget_s / len(cases) / 4))
            if n <= 8:
                rows.append(self.check_layer_ends(hidden, k, n, budget_s / len(cases) / 4))
        for n in (1, 40):
            rows.append(self.check_gather(n, budget_s / len(cases) / 4))
        self.check_special_values()
        return {"checks": rows, "symmetric memory": self.heap}

    def replay(
        self, name: str, budget_s: float, refill: Callable[[int], None], graph: Any,
        errors: dict[str, Callable[[], Tensor]],
    ) -> dict[str, Any]:  # fmt: skip
        """Fresh data and a random delay before each replay. All ranks replay as often. `errors`: how far each result is
        from what it should be.
        """
        worst = {result: torch.zeros((), device=self.device) for result in errors}
        start, count = time.perf_counter(), 0
        while count < REPLAYS:
            for _ in range(50):
                refill(count)
                torch.cuda._sleep(int(torch.randint(CHECK_SPIN, ())))
                graph.replay()
                for result, error in errors.items():
                    worst[result].copy_(torch.maximum(worst[result], error()))
                count += 1
            if any(self.control.all_gather_objects(time.perf_counter() - start > budget_s)):
                break
        torch.cuda.synchronize()
        for one in self.ours.values():
            one.check()
        bad = {result: error.item() for result, error in worst.items() if error.item()}
        if bad:
            raise RuntimeError(f"WRONG RESULT: {name} within {count} replays, by at most {bad}")
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
            {"sum": functools.partial(bits_apart, out, expected)},
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
            {"sum": functools.partial(bits_apart, out, expected)},
        )  # fmt: skip

    def check_layer_ends(self, hidden: int, k: int, rows: int, budget_s: float) -> dict[str, Any]:
        """What both halves of a decoder layer add to the residual, and its norm; each rank has its experts' weights."""
        reduce, shape = self.ours[hidden, "ours"], (rows, hidden)
        x, total, moe_total, wanted, moe_wanted = (torch.zeros(shape, dtype=BF16, device=self.device) for _ in range(5))
        expert_rows = torch.zeros(rows * k, hidden, dtype=BF16, device=self.device)
        slots = torch.arange(rows * k, dtype=torch.int32, device=self.device).view(rows, k)
        weights = torch.zeros(rows, k, device=self.device)
        projection = torch.randn(hidden, LINEAR[1] // self.ranks, device=self.device).to(BF16) / 64
        attended = torch.zeros(rows, projection.shape[1], dtype=BF16, device=self.device)
        projected, apart, end, normed = (torch.zeros(shape, dtype=BF16, device=self.device) for _ in range(4))
        scale = torch.ones(hidden, dtype=BF16, device=self.device)
        errors = {
            "after attention": functools.partial(bits_apart, total, wanted),
            "after the experts": functools.partial(bits_apart, moe_total, moe_wanted),
            "at the layer's end": functools.partial(bits_apart, end, moe_wanted),
            "the norm": lambda: beyond_rounding(normed, torch.nn.functional.rms_norm(end.float(), (hidden,), eps=EPS)),
        }
        if reduce.takes_linear(projection):
            errors["after a projection"] = functools.partial(bits_apart, projected, apart)

        def refill(count: int) -> None:
            parts = self.values((rows * (k + 1), hidden), count)
            residual = self.values(shape, count + REPLAYS)[0]
            chosen = [factor.float() for factor in self.values((rows, k), count + 2 * REPLAYS)]
            for target in (total, moe_total, projected, apart, end):
                target.copy_(residual)
            attended.normal_()
            x.copy_(parts[self.rank][:rows])
            expert_rows.copy_(parts[self.rank][rows:])
            weights.copy_(chosen[self.rank])
            wanted.copy_(sum(part[:rows].float() for part in parts) + residual.float())
            sums = []
            for part, factor in zip(parts, chosen, strict=True):
                values = part[rows:].view(rows, k, hidden).float()
                sums.append(functools.reduce(lambda a, b: a + b, [factor[:, j, None] * values[:, j] for j in range(k)]))
            moe_wanted.copy_(functools.reduce(lambda a, b: a + b, sums) + residual.float())

        def call() -> None:
            reduce.add(x, total)
            if reduce.takes_linear(projection):
                reduce.add_linear(attended, projection, None, projected)
                reduce.add(linear_add(attended, projection, None, None), apart)
            reduce.combine(expert_rows, slots, weights, moe_total, tokens=rows, accumulate=True)
            rms_norm(x, scale, EPS, ends_chain=True)  # in the place of the experts' launch
            normed.copy_(reduce.combine_norm(expert_rows, slots, weights, end, scale, EPS))

        return self.replay(f"ends of a layer: {rows} x {hidden}", budget_s, refill, captured(call), errors)

    def check_gather(self, rows: int, budget_s: float) -> dict[str, Any]:
        """Logits, in one exchange and in several."""
        reduce, columns = self.ours[2880, "ours"], 201089
        widths = [len(even_split(columns, self.ranks, rank)) for rank in range(self.ranks)]
        part = torch.zeros(rows, widths[self.rank], device=self.device)
        found, wanted = (torch.zeros(rows, columns, dtype=BF16, device=self.device) for _ in range(2))

        def refill(count: int) -> None:
            whole = self.values((rows, columns), count)[0]
            part.copy_(whole.split(widths, 1)[self.rank])
            if self.rank == 0:
                wanted.copy_(whole)

        def call() -> None:
            gathered = reduce.gather_columns(part, columns)
            if gathered is not None:
                found.copy_(gathered)

        return self.replay(
            f"gather: {rows} x {columns}", budget_s, refill, captured(call),
            {"logits": functools.partial(bits_apart, found, wanted)},
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


def beyond_rounding(found: Tensor, exact: Tensor) -> Tensor:
    """By how much values in bf16 are further from exact ones than two roundings bring them."""
    return ((found.float() - exact).abs() - exact.abs() * 2**-7).clamp(min=0).max()


def bits_apart(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference of two bf16 tensors, of those elements whose bits differ; 0 if none do."""
    apart = (a.float() - b.float()).abs().nan_to_num(nan=torch.inf).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(a.view(torch.int16) == b.view(torch.int16), 0.0, apart).max()
