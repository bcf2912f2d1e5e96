"""One rank's MoE layer for exchange.py: static tensors, data that every rank can make again, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.nvlink import NvLink, exchange_layout
from rose_dist.comm.all_to_all.protocol import AllToAllConfig, Dispatched, Routing
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.formats import FP8 as BLOCKS_FP8
from rose_dist.kernels.quantize import reference

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Model:
    """A model's MoE sizes."""

    name: str
    hidden: int
    top_k: int
    experts: int
    fp8: bool = False
    fused: bool = False
    """With `fp8`: rows are given in bf16 and dispatch quantises them."""

    def config(self, max_tokens: int) -> AllToAllConfig:
        config = AllToAllConfig(
            num_experts=self.experts, top_k=self.top_k, hidden=self.hidden, max_tokens=max_tokens, dtype=BF16
        )
        if not self.fp8:
            return config
        if self.fused:
            return config.in_format(BLOCKS_FP8)
        return replace(config, dtype=FP8, out_dtype=BF16, scale_dim=-(-self.hidden // 128))


MODELS = (
    Model("gpt-oss-120b", 2880, 4, 128),
    Model("deepseek-v3 fp8", 7168, 8, 256, fp8=True),
    Model("deepseek-v3 bf16 to fp8", 7168, 8, 256, fp8=True, fused=True),
    Model("deepseek-v3 bf16", 7168, 8, 256),
)


@dataclass
class Inputs:
    """Of one rank."""

    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    live: Tensor
    """int32 [1]."""

    def travelling(self, model: Model) -> tuple[Tensor, Tensor | None]:
        """Rows and scales as they arrive."""
        return reference(self.x, BLOCKS_FP8) if model.fused else (self.x, self.scales)

    @classmethod
    def of(
        cls, model: Model, tokens: int, rank: int, seed: int, device: torch.device, *, whole: bool = False
    ) -> Inputs:
        """Fresh routing: distinct experts, some −1, all −1, duplicates or one hot rank, by seed. whole: distinct, none
        skipped, all rows live.
        """
        generator = torch.Generator(device).manual_seed(7919 * seed + rank)

        def rand(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        config, k = model.config(tokens), model.top_k
        ids = rand(tokens, model.experts).topk(k, dim=1).indices.int()
        kind = 0 if whole else seed % 6
        if kind == 1:
            ids = torch.where(rand(tokens, k) < 0.2, -1, ids)
        elif kind == 2:
            ids = torch.full_like(ids, -1)
        elif kind == 3:
            ids = (rand(tokens, k) * (model.experts + 1)).int() - 1
        elif kind == 4:
            ids = ids % max(1, model.experts // 8)
        x = (rand(tokens, model.hidden) - 0.5).to(config.given_dtype)
        scales = rand(tokens, config.given_scales) if config.given_scales else None
        live = tokens if whole or seed % 5 == 0 else int(rand(1).item() * (tokens + 1))
        weights = rand(tokens, k)
        return cls(x, scales, ids, weights, torch.tensor([live], dtype=torch.int32, device=device))


def expected_rows(model: Model, inputs: list[Inputs], local: range) -> tuple[Tensor, Tensor, Tensor | None]:
    """Counts [experts here], and the packed rows and scales, experts following one another."""
    ids = torch.cat([
        torch.where(torch.arange(len(one.ids), device=one.ids.device)[:, None] < one.live, one.ids, -1)
        for one in inputs
    ])  # fmt: skip
    keys = torch.where((ids >= local.start) & (ids < local.stop), ids - local.start, len(local)).flatten().long()
    counts = torch.bincount(keys, minlength=len(local) + 1)[: len(local)]
    order = keys.argsort(stable=True)[: int(counts.sum())] // model.top_k
    sent = [one.travelling(model) for one in inputs]
    x = torch.cat([rows.view(torch.uint8) for rows, _ in sent])[order]
    scales = torch.cat([scales for _, scales in sent if scales is not None])[order] if model.fp8 else None
    return counts, x, scales


def expected_out(model: Model, one: Inputs, owners: Tensor, partial_sums: bool) -> Tensor:
    """Of experts that give their rows back, in bf16; dead rows are zero. owners: [tokens, top_k], the ranks of the
    experts, −1 for none.
    """
    x = one.travelling(model)[0].to(BF16).float()
    if partial_sums:
        total = torch.zeros(x.shape, device=x.device)
        for j in range(model.top_k):
            rank = owners[:, j, None]
            first = (rank >= 0) & (owners[:, :j] != rank).all(1, keepdim=True)
            total = torch.where(first, total + weighted_sum(x, one.weights, owners == rank).to(BF16).float(), total)
    else:
        total = weighted_sum(x, one.weights, owners >= 0)
    total[int(one.live) :] = 0
    return total.to(BF16)


def weighted_sum(x: Tensor, weights: Tensor, counted: Tensor) -> Tensor:
    """fp32, over the places that are `counted`, in their order."""
    total = torch.zeros(x.shape, device=x.device)
    for j in range(weights.shape[1]):
        total = torch.where(counted[:, j, None], total + weights[:, j, None] * x, total)
    return total


class Varied(NvLink):
    """With another layout, for example `chunk` or `most_result_packet_bytes`."""

    changes: ClassVar[dict[str, Any]] = {}

    def lay_out(self, config: AllToAllConfig, ranks: int, in_flight: int) -> ExchangeLayout:
        return varied(config, ranks, in_flight, self.changes)


def varied(config: AllToAllConfig, ranks: int, in_flight: int, changes: dict[str, Any]) -> ExchangeLayout:
    return replace(exchange_layout(config, ranks, in_flight), **changes)


class Layer:
    """Dispatch, experts that give their rows back, combine; fit to be captured."""

    def __init__(
        self, model: Model, tokens: int, group: Any, device: torch.device, take: Callable[[int], Any], sms: int,
        changes: dict[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.tokens, self.group, self.device = model, tokens, group, device
        options = GpuOptions(device=device, rank=group.rank)
        kind = type("Varied", (Varied,), {"changes": changes})
        self.moe = kind(model.config(tokens), group, options, take, sms)
        self.inputs = Inputs.of(model, tokens, group.rank, 0, device, whole=True)
        self.out = torch.zeros(tokens, model.hidden, dtype=BF16, device=device)
        self.expert_out = torch.zeros(self.moe._free[0].x.shape[0], model.hidden, dtype=BF16, device=device)

    def resized(self, tokens: int) -> Layer:
        """The same all-to-all for another number of tokens."""
        other = object.__new__(Layer)
        other.__dict__ |= self.__dict__
        other.tokens = tokens
        other.inputs = Inputs.of(self.model, tokens, self.group.rank, 0, self.device, whole=True)
        other.out = torch.zeros(tokens, self.model.hidden, dtype=BF16, device=self.device)
        return other

    def dispatch(self) -> Dispatched:
        one = self.inputs
        return self.moe.dispatch(one.x, Routing(one.ids, one.weights), scales=one.scales, rows=one.live)

    def halves(self) -> Dispatched:
        one = self.inputs
        handle = self.moe.dispatch_send(one.x, Routing(one.ids, one.weights), scales=one.scales, rows=one.live)
        return self.moe.dispatch_recv(handle)

    def exchange(self) -> None:
        """Dispatch and combine of results that are there already."""
        self.moe.combine(self.expert_out, self.dispatch(), out=self.out)

    def __call__(self) -> None:
        self.dispatched = self.dispatch()
        self.expert_out.copy_(self.dispatched.x)
        self.moe.combine(self.expert_out, self.dispatched, out=self.out)

    def apart(self) -> None:
        """By halves."""
        self.dispatched = self.halves()
        self.expert_out.copy_(self.dispatched.x)
        self.moe.combine_send(self.expert_out, self.dispatched)
        self.moe.combine_recv(self.dispatched, out=self.out)

    def refill(self, seed: int) -> list[Inputs]:
        """Fresh data into the static tensors; every rank's."""
        everyone = [Inputs.of(self.model, self.tokens, rank, seed, self.device) for rank in range(self.group.size)]
        mine = everyone[self.group.rank]
        for name in ("x", "scales", "ids", "weights", "live"):
            target = getattr(self.inputs, name)
            if target is not None:
                target.copy_(getattr(mine, name))
        self.out.zero_()
        return everyone

    def wrong(self, everyone: list[Inputs]) -> str:
        """What is wrong after a replay, or nothing."""
        counts, x, scales = expected_rows(self.model, everyone, self.moe.local_experts)
        got = self.dispatched
        if not torch.equal(got.counts.long(), counts):
            return "counts"
        if not torch.equal(got.x.view(torch.uint8)[: len(x)], x):
            return "rows"
        if scales is not None and got.scales is not None and not torch.equal(got.scales[: len(x)], scales):
            return "scales"
        mine = everyone[self.group.rank]
        expected = expected_out(self.model, mine, self.owners(mine.ids), self.moe.layout.partial_sums)
        if not torch.equal(self.out.view(torch.int16), expected.view(torch.int16)):
            return "sums"
        return ""

    @property
    def back(self) -> str:
        """What comes back of a token."""
        return "a sum a rank" if self.moe.layout.partial_sums else "all results"

    def owners(self, ids: Tensor) -> Tensor:
        """The rank of each expert, −1 for none."""
        ends = [self.moe.layout.first_expert(rank + 1) for rank in range(self.group.size)]
        ranks = torch.bucketize(ids.long(), torch.tensor(ends, device=self.device), right=True)
        return torch.where(ids >= 0, ranks, -1)

    def moved(self) -> tuple[int, int]:
        """Bytes that this rank must send to others in a dispatch, one copy a rank, and gets back in a combine."""
        layout, owners = self.moe.layout, self.owners(self.inputs.ids)
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        records = sum(int(((owners == rank).any(1)).sum()) for rank in others)
        pairs = sum(int((owners == rank).sum()) for rank in others)
        back = records if layout.partial_sums else pairs
        return records * (layout.row_bytes + layout.scale_bytes), back * layout.result_bytes
