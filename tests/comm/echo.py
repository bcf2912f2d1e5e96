"""Exchanges of emulated GPUs with nothing between them: experts give rows back, in every form and order of calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rose_dist.comm.all_to_all import nvlink
from rose_dist.comm.all_to_all.protocol import Routing
from tests.comm.oracle import Case, make_ids
from tests.comm.test_all_to_all import BF16, same_bits
from tests.comm.test_nvlink_gpu import Job
from tests.ptx.launch import Launch

CASE = Case(tokens=(3,), hidden=16, experts=5, top_k=2, dtype=BF16)
SUMMED = dataclasses.replace(CASE, partial_sums=True)
CASES = pytest.mark.parametrize("case", [CASE, SUMMED], ids=["results", "partial sums"])


class Echo:
    """One exchange whose experts give their rows back, on every rank; nothing waits for the host."""

    def __init__(self, job: Job, tokens: tuple[int, ...], seed: int) -> None:
        self.job, self.inputs = job, []
        generator = torch.Generator().manual_seed(seed)
        for rank in range(len(job.moes)):
            count = tokens[(rank + seed) % len(tokens)]
            kind = ("uniform", "skips", "duplicates", "last_expert")[seed % 4]
            ids = make_ids(dataclasses.replace(CASE, routing=kind), count, generator)
            x = torch.randn(count, CASE.hidden, generator=generator).to(BF16)
            self.inputs.append((x, Routing(ids, torch.rand(count, CASE.top_k, generator=generator))))
        self.given: list[Any] = [None] * len(job.moes)
        self.outs: list[Any] = [None] * len(job.moes)

    def call(self, step: str) -> None:
        self.job.each(getattr(self, step))

    def dispatch(self, rank: int, half: str = "dispatch") -> None:
        x, routing = self.inputs[rank]
        tensor = self.job.cluster.tensor
        routing = Routing(tensor(routing.ids), tensor(routing.weights))
        self.given[rank] = getattr(self.job.moes[rank], half)(tensor(x), routing)

    def dispatch_send(self, rank: int) -> None:
        self.dispatch(rank, "dispatch_send")

    def dispatch_recv(self, rank: int) -> None:
        self.given[rank] = self.job.moes[rank].dispatch_recv(self.given[rank])

    def combine(self, rank: int) -> None:
        self.outs[rank] = self.job.cluster.tensor(torch.zeros_like(self.inputs[rank][0]))
        self.job.moes[rank].combine(self.given[rank].x, self.given[rank], out=self.outs[rank])

    def combine_send(self, rank: int) -> None:
        self.job.moes[rank].combine_send(self.given[rank].x, self.given[rank])

    def combine_recv(self, rank: int) -> None:
        self.outs[rank] = self.job.cluster.tensor(torch.zeros_like(self.inputs[rank][0]))
        self.job.moes[rank].combine_recv(self.given[rank], out=self.outs[rank])

    def right(self) -> bool:
        expected = self.summed if self.job.config.partial_sums else self.sum
        for out, (x, routing) in zip(self.outs, self.inputs, strict=True):
            if not same_bits(out, expected(x.float(), routing).to(BF16)):
                return False
        return True

    def sum(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        total = torch.zeros(x.shape)
        for j in range(CASE.top_k):
            valid = routing.ids[:, j, None] >= 0
            total = torch.where(valid, total + routing.weights[:, j, None] * x, total)
        return total

    def summed(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """With each rank's sum rounded, in the order in which a token names the ranks."""
        ranks = [moe.local_experts for moe in self.job.moes]
        total = torch.zeros(x.shape)
        for token, ids in enumerate(routing.ids.tolist()):
            named = [next(r for r, held in enumerate(ranks) if n in held) if n >= 0 else -1 for n in ids]
            for rank in dict.fromkeys(r for r in named if r >= 0):
                share = torch.zeros(x.shape[1])
                for j in (j for j, r in enumerate(named) if r == rank):
                    share = share + routing.weights[token, j] * x[token]
                total[token] += share.to(BF16).float()
        return total


def chain(job: Job, tokens: tuple[int, ...], count: int) -> list[Echo]:
    echoes = [Echo(job, tokens, seed) for seed in range(count)]
    for echo in echoes:
        echo.call("dispatch")
        echo.call("combine")
    return echoes


def halves(job: Job, tokens: tuple[int, ...], count: int) -> list[Echo]:
    echoes = [Echo(job, tokens, seed) for seed in range(count)]
    for echo in echoes:
        for step in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
            echo.call(step)
    return echoes


def plain_rows_from(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "PACKET_TOKENS", tokens - 1)


def plain_results_from(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "RESULT_PACKET_BYTES", (tokens - 1) * CASE.top_k * CASE.hidden * BF16.itemsize)


def choose_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "plain rows":
        plain_rows_from(2, monkeypatch)
    elif form == "plain results":
        plain_results_from(2, monkeypatch)


FORMS = ("packets", "plain results", "plain rows")


def dropped(launch: Launch, *lines: int) -> Launch:
    program = launch.program
    for at, one in enumerate(launch.program.kernel.instructions):
        if one.line in lines:
            program = program.replaced(at, dataclasses.replace(one, parts=("pmevent",), operands=()))
    return dataclasses.replace(launch, program=program)
