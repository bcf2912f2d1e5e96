"""One-shot all-reduce between emulated GPUs: right to the bit in every schedule, and wrong when weakened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import moe_combine
from rose_dist.kernels.arch import ARCHS, HOPPER
from rose_dist.kernels.cute.all_reduce_one_shot import OneShot
from rose_dist.kernels.cute.moe_combine import Combine
from rose_dist.kernels.peer_regions import ONE_SHOT_STAGE
from rose_dist.kernels.sync import WaitExpiredError, WaitReport
from tests.kernels.peers import Peers, sum_in_rank_order
from tests.ptx.errors import DataRace

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = 5


@dataclass
class Exchange:
    """One exchange's tensors on every rank."""

    peers: Peers
    kernel: OneShot
    rows: int = ROWS
    live: int | None = None
    blocks: int = 2
    values: list[torch.Tensor] | None = None
    in_place: bool = False
    """The sum takes x's place."""

    def __post_init__(self) -> None:
        kernel, peers = self.kernel, self.peers
        shape = (self.rows, kernel.hidden)
        self.x = self.values or peers.each(lambda _: torch.randn(shape).to(kernel.dtype))
        self.on_gpu = [peers.tensor(x, rank) for rank, x in enumerate(self.x)]
        self.outs = self.on_gpu
        if not self.in_place:
            self.outs = peers.each(lambda rank: peers.empty(*shape, dtype=kernel.dtype, rank=rank))

    def launch(self, rank: int, x: Any = None, *combine: Any) -> None:
        peers = self.peers
        bound = 0 if self.live is None else peers.tensor(torch.tensor([self.live], dtype=torch.int32), rank)
        peers.launch(
            self.kernel, rank, self.on_gpu[rank] if x is None else x, bound, self.outs[rank],
            *(combine or (0, 0, 0, 0, 0, 0)), *peers.addresses, peers.source_bytes, peers.states[rank],
            peers.reports[rank], peers.limit, rank, self.rows, self.blocks,
        )  # fmt: skip

    def launch_all(self) -> None:
        for rank in range(self.peers.ranks):
            self.launch(rank)

    def check(self) -> None:
        live = self.rows if self.live is None else self.live
        expected = sum_in_rank_order(self.x)[:live].to(self.kernel.dtype)
        for rank, out in enumerate(self.outs):
            assert torch.equal(out[:live].view(torch.uint8), expected.view(torch.uint8))
            dead = self.x[rank][live:].view(torch.uint8) if self.in_place else 0xA5
            assert (out[live:].view(torch.uint8) == dead).all(), "dead rows stay as they were"


def peers_for(kernel: OneShot, **options: Any) -> Peers:
    return Peers(kernel.ranks, ROWS * kernel.parts * kernel.part_stride, **options)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_ranks_and_dtypes(ranks: int, dtype: torch.dtype) -> None:
    kernel = OneShot(HOPPER, ranks, 64, dtype)
    exchange = Exchange(peers_for(kernel), kernel)
    exchange.launch_all()
    exchange.peers.run()
    exchange.check()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("hidden", [16, 2880, 7168])
def test_hidden_sizes(arch: str, hidden: int) -> None:
    kernel = OneShot(ARCHS[arch], 2, hidden, BF16)
    exchange = Exchange(peers_for(kernel), kernel, rows=3)
    exchange.launch_all()
    exchange.peers.run()
    exchange.check()


@pytest.mark.parametrize(("hidden", "ranks"), [(16, 2), (80, 3), (2880, 2), (7168, 2)])
def test_sums_take_the_place_of_what_is_added(hidden: int, ranks: int) -> None:
    kernel = OneShot(HOPPER, ranks, hidden, BF16)
    exchange = Exchange(peers_for(kernel), kernel, rows=3, live=2, in_place=True)
    exchange.launch_all()
    exchange.peers.run(seed=hidden)
    exchange.check()


@pytest.mark.parametrize(("hidden", "parts"), [(16, 1), (80, 1), (2880, 8), (7168, 8), (7168, 1), (12304, 1)])
def test_adds_to_what_is_there(hidden: int, parts: int) -> None:
    kernel = OneShot(HOPPER, 2, hidden, BF16, accumulate=True, parts=parts)
    exchange, before = Exchange(peers_for(kernel), kernel, rows=3), torch.randn(3, hidden).to(BF16)
    exchange.outs = exchange.peers.each(lambda rank: exchange.peers.tensor(before, rank))
    exchange.launch_all()
    exchange.peers.run(seed=hidden)
    wanted = (sum_in_rank_order(exchange.x) + before.float()).to(BF16)
    assert all(torch.equal(out, wanted) for out in exchange.outs)


@pytest.mark.parametrize(("hidden", "parts"), [(48, 2), (104, 4), (2880, 8)])
@pytest.mark.parametrize("blocks", [2, 7])
def test_rows_in_parts(hidden: int, parts: int, blocks: int) -> None:
    kernel = OneShot(HOPPER, 2, hidden, BF16, parts=parts)
    exchange = Exchange(peers_for(kernel), kernel, live=ROWS - 1, blocks=blocks)
    exchange.launch_all()
    exchange.peers.run()
    exchange.check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("epoch", [0, 2**32 - 3])
def test_exchanges_back_to_back(seed: int, epoch: int) -> None:
    """Ranks run ahead of one another, sizes and grids change, the epoch wraps around."""
    kernel = OneShot(HOPPER, 2, 32, BF16)
    peers = peers_for(kernel, epoch=epoch)
    sizes = ((5, None, 2), (1, None, 1), (5, 0, 2), (4, 3, 3), (5, None, 1), (2, None, 2))
    exchanges = [Exchange(peers, kernel, rows, live, blocks) for rows, live, blocks in sizes]
    for exchange in exchanges:
        exchange.launch_all()
    peers.run(seed=seed)
    for exchange in exchanges:
        exchange.check()
    used = sum(live != 0 for _, live, _ in sizes)
    counted = (epoch + used << 32) % (1 << 64)
    assert all(state.item() % (1 << 64) == counted for state in peers.states)


SPECIAL = {
    "negative zero": 0x80008000, "signalling NaN": 0x7F817F81, "all ones": 0xFFFFFFFF, "infinities": 0x7F80FF80,
    "subnormal": 0x00010001, "negative subnormal": 0x80018001, "the epoch": 0x00000001, "zero": 0x00000000,
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_no_value_looks_like_a_flag(name: str) -> None:
    words = torch.full((ROWS, 16), SPECIAL[name], dtype=torch.int64).to(torch.uint32).view(torch.int32)
    values = [words.view(BF16), torch.zeros(ROWS, 32, dtype=BF16) - 0.0]
    kernel = OneShot(HOPPER, 2, 32, BF16)
    exchange = Exchange(peers_for(kernel), kernel, values=values)
    exchange.launch_all()
    exchange.peers.run(seed=3)
    expected = sum_in_rank_order(values).to(BF16)
    for out in exchange.outs:
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))


@pytest.mark.parametrize(("parts", "blocks"), [(1, ROWS), (1, 2), (4, 4 * ROWS)])
@pytest.mark.parametrize(("hidden", "top_k", "ranks"), [(64, 4, 2), (64, 4, 3), (2880, 2, 2), (3104, 1, 2)])
def test_combine_and_all_reduce_in_one_launch(hidden: int, top_k: int, ranks: int, parts: int, blocks: int) -> None:
    experts = 6
    source = Combine(HOPPER, top_k, hidden, BF16, BF16, BF16, False, 16)
    kernel = OneShot(HOPPER, ranks, hidden, BF16, source, parts=parts)
    peers = peers_for(kernel)
    exchange = Exchange(peers, kernel, blocks=blocks)
    summands = []
    for rank in range(ranks):
        results, weights = torch.randn(ROWS * top_k, hidden).to(BF16), torch.rand(ROWS, top_k)
        slots = torch.randperm(ROWS * top_k).view(ROWS, top_k).int()
        slots[torch.rand(slots.shape) < 0.4] = -1
        ids, bias = torch.randint(experts, slots.shape).int() + 3, torch.randn(experts, hidden).to(BF16)
        summands.append(moe_combine.reference(results, slots, weights, ids - 3, bias))
        moved = [peers.tensor(t, rank) for t in (results, slots, weights, ids, bias)]
        exchange.launch(rank, moved[0], hidden, *moved[1:], 3)
    exchange.x = summands
    peers.run()
    exchange.check()


def test_packets_that_tear_are_caught() -> None:
    """Hardware writes 16 bytes at once; if it did not, this would go wrong."""
    kernel = OneShot(HOPPER, 2, 32, FP32)
    wrong = 0
    for seed in range(30):
        exchange = Exchange(peers_for(kernel), kernel)
        exchange.launch_all()
        exchange.peers.run(seed=seed, vector_atomic=False, races="off")
        expected = sum_in_rank_order(exchange.x)
        wrong += not all(torch.equal(out, expected) for out in exchange.outs)
    assert wrong > 0


@pytest.mark.parametrize("weaken", [("st.relaxed.sys", "st.relaxed.gpu"), ("ld.relaxed.sys", "ld.relaxed.gpu")])
def test_too_small_a_scope_is_a_race(weaken: tuple[str, str]) -> None:
    kernel = OneShot(HOPPER, 2, 32, FP32)
    exchange = Exchange(peers_for(kernel), kernel)
    exchange.peers.weaken = weaken
    exchange.launch_all()
    with pytest.raises(DataRace):
        exchange.peers.run()


def test_a_dead_peer_is_reported() -> None:
    kernel = OneShot(HOPPER, 3, 64, BF16)
    exchange = Exchange(peers_for(kernel, epoch=6), kernel)
    exchange.peers.limit = 30_000
    exchange.launch(0)
    exchange.launch(2)
    exchange.peers.run()
    for rank in (0, 2):
        report = WaitReport({ONE_SHOT_STAGE: "an all-reduce"})
        report._words.copy_(exchange.peers.reports[rank])
        with pytest.raises(
            WaitExpiredError, match=f"rank {rank} waited for rank 1 in an all-reduce .* wanted 7, saw 0"
        ):
            report.check()
