"""The adapter for CollectiveX over CPU ranks, against what its oracle asks of this layout."""

from __future__ import annotations

import abc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rose_dist.comm.all_to_all.mpi import Mpi
from rose_dist.comm.world import World
from tests.ranks import run_ranks

EXPERTS, TOP_K, HIDDEN, TOKENS = 6, 3, 32, 7


class Base(abc.ABC):
    """The part of CollectiveX's base class that the adapter stands on."""

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        self.args, self.rank, self.world_size, self.local_rank, self.device = args, rank, world_size, local_rank, device
        self.precision = args.precision

    @abc.abstractmethod
    def create_buffer(self, spec: Any) -> None: ...

    @abc.abstractmethod
    def dispatch(self, problem: Any) -> Any: ...

    @abc.abstractmethod
    def stage(self, problem: Any, handle: Any) -> None: ...

    @abc.abstractmethod
    def combine(self, problem: Any, handle: Any) -> torch.Tensor: ...

    @abc.abstractmethod
    def recv_tokens(self, handle: Any) -> int: ...

    @abc.abstractmethod
    def inspect_dispatch(self, problem: Any, handle: Any) -> Any: ...

    @abc.abstractmethod
    def combine_transformed(self, problem: Any, handle: Any, transformed: torch.Tensor) -> torch.Tensor: ...


def problem(rank: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K, 1).indices.int()
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    return SimpleNamespace(dispatch_x=x, topk_idx=ids, topk_weights=weights)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To e4m3 with a scale a row, as these rows have but one block, and back."""
    scale = x.float().abs().amax(1, keepdim=True) / 448
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def transform(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return (rows.float() * (experts[:, None] % 5 + 1) / 4).to(rows.dtype)


def run(world: World, precision: str) -> None:
    module = ModuleType("ep_backend")
    module.EPBackend = Base  # type: ignore[attr-defined]
    sys.modules["ep_backend"] = module
    from benchmarks.collectivex_backend import RoseBackend  # noqa: PLC0415

    args = SimpleNamespace(experts=EXPERTS, topk=TOP_K, hidden=HIDDEN, precision=precision)
    assert precision in RoseBackend.SUPPORTED_PRECISIONS
    backend: Any = RoseBackend(args, world.rank, world.size, world.rank, torch.device("cpu"))
    backend.build = lambda config: Mpi(config, world.group)
    backend.create_buffer(SimpleNamespace(max_tokens_per_rank=TOKENS))
    mine, everybody = problem(world.rank), [problem(rank) for rank in range(world.size)]
    sent = (lambda x: x) if precision == "bf16" else rounded
    assert torch.equal(backend.semantic_payload(mine.dispatch_x), sent(mine.dispatch_x))

    handle = backend.dispatch(mine)
    view = backend.inspect_dispatch(mine, handle)
    local = range(world.rank * EXPERTS // world.size, (world.rank + 1) * EXPERTS // world.size)
    expected = [
        (expert, tuple(sent(one.dispatch_x)[token].tolist()))
        for expert in local
        for one in everybody
        for token in (one.topk_idx == expert).any(1).nonzero()[:, 0].tolist()
    ]
    assert list(zip(view.expert_ids.tolist(), map(tuple, view.payload.tolist()), strict=True)) == expected
    assert view.local_expert_counts.tolist() == [view.expert_ids.tolist().count(expert) for expert in local]
    assert backend.recv_tokens(handle) == len(expected)

    combined = backend.combine_transformed(mine, handle, transform(view.payload, view.expert_ids))
    total = torch.zeros(TOKENS, HIDDEN)
    for place in range(TOP_K):
        message = transform(sent(mine.dispatch_x), mine.topk_idx[:, place])
        total += mine.topk_weights[:, place, None] * message.float()
    assert torch.equal(combined, total.bfloat16())

    handle = backend.dispatch(mine)
    backend.stage(mine, handle)
    out = backend.combine(mine, handle).float()
    once = mine.topk_weights.sum(1)[:, None] * sent(mine.dispatch_x).float()
    torch.testing.assert_close(out, once, rtol=0.02, atol=0.02)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_what_the_oracle_asks_for(precision: str) -> None:
    run_ranks(2, run, precision)
