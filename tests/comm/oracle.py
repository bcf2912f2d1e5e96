"""The MoE all-to-all as a plain loop over tokens and places in the top k, and data that every rank can make again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from rose_dist.comm.all_to_all.protocol import AllToAllConfig, Dispatched, Routing
from rose_dist.comm.layout import Layout
from rose_dist.kernels.formats import BlockFormat
from rose_dist.kernels.quantize import reference

RoutingKind = Literal["uniform", "one_expert", "last_expert", "same", "skips", "all_skipped", "duplicates"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One dispatch and combine. `tokens` are by data-parallel replica, repeated as needed."""

    tokens: tuple[int, ...] = (5, 3)
    experts: int = 8
    top_k: int = 4
    hidden: int = 16
    routing: RoutingKind = "uniform"
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None
    scale_dim: int = 0
    scale_dtype: torch.dtype = torch.float32
    quantized: BlockFormat | None = None
    """By dispatch, of bf16 rows; then `dtype` and the scales' fields say nothing."""
    accumulate: bool = False
    partial_sums: bool = False
    sum_ranks: int = 1
    """Neighbours whose results are added up together, with `partial_sums`."""
    rows: tuple[int, ...] | None = None
    """Live rows, by replica."""
    seed: int = 0

    @property
    def config(self) -> AllToAllConfig:
        config = AllToAllConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=max(1, *self.tokens),
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            scale_dim=self.scale_dim,
            scale_dtype=self.scale_dtype,
            partial_sums=self.partial_sums,
        )
        return config if self.quantized is None else replace(config, dtype=torch.bfloat16).in_format(self.quantized)


@dataclass(frozen=True)
class Batch:
    """One replica's tokens."""

    given: torch.Tensor
    """What dispatch is given, with `given_scales`."""
    given_scales: torch.Tensor | None
    x: torch.Tensor
    """What travels, with `scales`."""
    scales: torch.Tensor | None
    routing: Routing
    before: torch.Tensor
    """What stands in `out` before combine."""
    live: int

    @classmethod
    def of(cls, case: Case, replica: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * case.seed + replica)
        tokens = case.tokens[replica % len(case.tokens)]
        ids = make_ids(case, tokens, generator)
        live = tokens if case.rows is None else case.rows[replica % len(case.rows)]
        scales: torch.Tensor | None = (
            torch.randn(tokens, case.scale_dim, generator=generator).mul(50).to(case.scale_dtype)
        )
        weights = torch.rand(tokens, case.top_k, generator=generator).masked_fill(ids < 0, torch.nan)
        given = torch.randn(tokens, case.hidden, generator=generator).to(case.config.given_dtype)
        given_scales = scales if case.scale_dim else None
        x, scales = (given, given_scales) if case.quantized is None else reference(given, case.quantized)
        return cls(
            given, given_scales, x, scales,
            routing=Routing(ids, weights),
            before=torch.randn(tokens, case.hidden, generator=generator).to(case.config.expert_dtype),
            live=live,
        )  # fmt: skip


def make_ids(case: Case, tokens: int, generator: torch.Generator) -> torch.Tensor:
    shape = (tokens, case.top_k)
    match case.routing:
        case "one_expert":
            ids = torch.zeros(shape)
        case "last_expert":
            ids = torch.full(shape, case.experts - 1)
        case "same":
            ids = torch.arange(case.top_k).remainder(case.experts).expand(shape)
        case "skips":
            ids = torch.randint(-1, min(2, case.experts), shape, generator=generator)
        case "all_skipped":
            ids = torch.full(shape, -1)
        case "duplicates":
            ids = torch.randint(0, case.experts, (tokens, 1), generator=generator).expand(shape)
        case "uniform":
            scores = torch.rand(tokens, max(case.experts, case.top_k), generator=generator)
            ids = scores.argsort(1)[:, : case.top_k].remainder(case.experts)
    return ids.int().contiguous()


def expert(rows: torch.Tensor, number: int, piece: int, dtype: torch.dtype) -> torch.Tensor:
    """What expert `number` makes of rows; with sliced experts, piece `piece` of the sum."""
    return (rows.float() * (number % 7 + 1.25) + (piece + 0.5)).to(dtype)


def run_experts(case: Case, dispatched: Dispatched, local: range, piece: int) -> torch.Tensor:
    """The experts over the packed rows; rows of no expert stay NaN, which must never come out."""
    result = torch.full((dispatched.x.shape[0], case.hidden), torch.nan).to(case.config.expert_dtype)
    for number, start, count in zip(local, dispatched.offsets.tolist(), dispatched.counts.tolist(), strict=False):
        rows = dispatched.x[start : start + count]
        result[start : start + count] = expert(rows, number, piece, case.config.expert_dtype)
    return result


def expected_sum(case: Case, batch: Batch, numbers: range, piece: int) -> torch.Tensor:
    """[tokens, hidden] fp32, over the experts `numbers`."""
    total = torch.zeros(batch.x.shape[0], case.hidden)
    for token in range(batch.live):
        for place, number in enumerate(batch.routing.ids[token].tolist()):
            if number in numbers:
                result = expert(batch.x[token], number, piece, case.config.expert_dtype).float()
                total[token] = total[token] + batch.routing.weights[token, place] * result
    return total


def expected_sum_by_rank(case: Case, batch: Batch, layout: Layout) -> torch.Tensor:
    """[tokens, hidden] fp32: every rank's (or node's) sum rounded, then added, each where the token first names it."""
    total, shares = torch.zeros(batch.x.shape[0], case.hidden), {}
    for rank in range(0, layout.ep, case.sum_ranks):
        ends = (layout.at(one).expert_range(case.experts) for one in (rank, rank + case.sum_ranks - 1))
        held = range(next(ends).start, next(ends).stop)
        shares[held] = expected_sum(case, batch, held, 0).to(case.config.expert_dtype).float()
    for token in range(batch.live):
        named = [next(held for held in shares if n in held) for n in batch.routing.ids[token].tolist() if n >= 0]
        for held in dict.fromkeys(named):
            total[token] = total[token] + shares[held][token]
    return total


def expected_out(case: Case, batch: Batch, layout: Layout) -> torch.Tensor:
    """[tokens, hidden] of the experts' dtype: what combine must leave in `out`, bit by bit."""
    if layout.moe_mode == "data_parallel":
        total = expected_sum(case, batch, range(case.experts), 0)
        if case.partial_sums:
            total = expected_sum_by_rank(case, batch, layout)
    else:
        shares = []
        for rank in range(layout.tp):
            place = layout.at(rank)
            shares.append(expected_sum(case, batch, place.expert_range(case.experts), place.expert_slice))
        total = shares[0]
        for share in shares[1:]:
            total = total + share
    if case.accumulate:
        total = batch.before.float() + total
    expected = batch.before.clone()
    expected[: batch.live] = total[: batch.live].to(expected.dtype)
    return expected


def expected_rows(case: Case, layout: Layout, rank: int) -> list[list[tuple[int, int]]]:
    """For each expert of `rank`, the (replica, token) pairs it must receive, in order."""
    place = layout.at(rank)
    if layout.moe_mode == "tensor_parallel":
        replicas = [place.dp_rank]
    else:
        replicas = sorted({layout.at(member).dp_rank for member in place.ep_members})
    received: list[list[tuple[int, int]]] = [[] for _ in place.expert_range(case.experts)]
    for replica in replicas:
        batch = Batch.of(case, replica)
        for token in tokens_sent(layout, replica, batch.live, place.ep_members):
            for number in batch.routing.ids[token].tolist():
                if number in place.expert_range(case.experts):
                    received[number - place.expert_range(case.experts).start].append((replica, token))
    return received


def tokens_sent(layout: Layout, replica: int, live: int, senders: range) -> list[int]:
    """The tokens of a replica that `senders` dispatch. Data-parallel experts: the TP ranks have contiguous shares, the
    first ones longer; else every rank has them all.
    """
    if layout.moe_mode == "tensor_parallel":
        return list(range(live))
    shares = torch.tensor_split(torch.arange(live), layout.tp)
    return [t for index, share in enumerate(shares) if replica * layout.tp + index in senders for t in share.tolist()]
