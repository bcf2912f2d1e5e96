"""Two-shot all-reduce between emulated GPUs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels.all_reduce import Sizes
from rose_dist.kernels.arch import ARCHS, HOPPER
from rose_dist.kernels.cute.all_reduce_two_shot import VECTOR_BYTES, TwoShot
from rose_dist.kernels.peer_regions import ADD_STAGE, LINE_BYTES, PACKET_BYTES, two_shot_bytes
from rose_dist.kernels.sync import WaitExpiredError, WaitReport
from tests.kernels.peers import Peers, sum_in_rank_order
from tests.ptx.errors import PtxError

BF16, FP32 = torch.bfloat16, torch.float32
SLICE = 4096


def peers_for(ranks: int) -> Peers:
    inbox_for_region = two_shot_bytes(ranks, SLICE) // (2 * ranks * PACKET_BYTES) + 1
    return Peers(ranks, inbox_for_region)


class Exchange:
    """One exchange's tensors on every rank."""

    def __init__(
        self, peers: Peers, kernel: TwoShot, rows: int, hidden: int = 64, blocks: int = 2, live: int | None = None,
        in_place: bool = False, rounds: int = 1,
    ) -> None:  # fmt: skip
        self.peers, self.kernel, self.blocks, self.live = peers, kernel, blocks, rows if live is None else live
        self.rounds = rounds
        self.x = peers.each(lambda _: torch.randn(rows, hidden).to(kernel.dtype))
        self.on_gpu = [peers.tensor(x, rank) for rank, x in enumerate(self.x)]
        self.outs = self.on_gpu
        if not in_place:
            self.outs = peers.each(lambda rank: peers.empty(rows, hidden, dtype=kernel.dtype, rank=rank))

    def launch(self, rank: int) -> None:
        peers, (rows, hidden) = self.peers, self.x[0].shape
        bound = peers.tensor(torch.tensor([self.live], dtype=torch.int32), rank)
        peers.launch(
            self.kernel, rank, self.on_gpu[rank], bound, self.outs[rank], hidden // self.kernel.count, *peers.addresses,
            SLICE, peers.states[rank], peers.reports[rank], peers.limit, rank, rows, self.rounds, self.blocks,
        )  # fmt: skip

    def launch_all(self) -> None:
        for rank in range(self.peers.ranks):
            self.launch(rank)

    def right(self) -> bool:
        expected = sum_in_rank_order(self.x)[: self.live].to(self.kernel.dtype)
        return all(torch.equal(out[: self.live], expected) for out in self.outs)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("ranks", "rows"), [(2, 7), (3, 7), (8, 5), (4, 1)])
def test_ranks_and_dtypes(arch: str, ranks: int, rows: int, dtype: torch.dtype) -> None:
    exchange = Exchange(peers_for(ranks), TwoShot(ARCHS[arch], ranks, dtype, threads=32), rows)
    exchange.launch_all()
    exchange.peers.run()
    assert exchange.right()


@pytest.mark.parametrize(("ranks", "rows", "rounds"), [(2, 40, 2), (3, 33, 4), (2, 1, 4), (2, 40, 3)])
def test_rounds(ranks: int, rows: int, rounds: int) -> None:
    kernel = TwoShot(HOPPER, ranks, BF16, threads=32)
    exchange = Exchange(peers_for(ranks), kernel, rows, rounds=rounds)
    exchange.launch_all()
    exchange.peers.run()
    assert exchange.right()


@pytest.mark.parametrize(("ranks", "rows", "hidden"), [(2, 11650, 2880), (2, 4681, 7168), (3, 1025, 2880), (8, 33, 64)])
def test_pieces_begin_on_lines_and_fit_into_slices(ranks: int, rows: int, hidden: int) -> None:
    """64 MB were once cut into parts of 15,887 vectors: each warp's 512 bytes met five lines and two half sectors."""
    kernel, sizes = TwoShot.of(HOPPER, ranks, FP32), Sizes(ranks, hidden, BF16, rows, 132)
    vectors = rows * hidden * FP32.itemsize // VECTOR_BYTES
    share = kernel.cut(vectors, ranks)
    part = kernel.cut(share, 132)
    for whole, shares, each in ((vectors, ranks, share), (share, 132, part), (part, 3, kernel.cut(part, 3))):
        assert each * VECTOR_BYTES % LINE_BYTES == 0
        assert 0 <= each * shares - whole < shares * LINE_BYTES // VECTOR_BYTES
    assert share * VECTOR_BYTES <= sizes.slice_bytes
    assert sizes.slice_bytes % LINE_BYTES == sizes.inbox_bytes % LINE_BYTES == 0


@pytest.mark.parametrize("seed", range(4))
def test_exchanges_back_to_back(seed: int) -> None:
    """Sizes and grids change, ranks run ahead of one another, some exchanges are in place."""
    peers, kernel = peers_for(2), TwoShot(HOPPER, 2, BF16, threads=32)
    exchanges = [
        Exchange(peers, kernel, 9), Exchange(peers, kernel, 1, blocks=3), Exchange(peers, kernel, 9, live=0),
        Exchange(peers, kernel, 12, blocks=1, in_place=True), Exchange(peers, kernel, 40, rounds=3),
        Exchange(peers, kernel, 9, live=4, rounds=4), Exchange(peers, kernel, 3),
    ]  # fmt: skip
    for exchange in exchanges:
        exchange.launch_all()
    peers.run(seed=seed)
    assert all(exchange.right() for exchange in exchanges)


@pytest.mark.parametrize(
    "weaken",
    [("st.release.sys", "st.relaxed.sys"), ("ld.acquire.sys", "ld.relaxed.sys"), ("st.release.sys", "st.release.gpu")],
)
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_weakened_flag_is_caught(weaken: tuple[str, str], rounds: int) -> None:
    peers = peers_for(2)
    peers.weaken = weaken
    exchange = Exchange(peers, TwoShot(HOPPER, 2, BF16, threads=32), 40, rounds=rounds)
    exchange.launch_all()
    with pytest.raises(PtxError):
        peers.run()


def test_stale_reads_without_race_checks() -> None:
    """The relaxed flag does not only break a rule, it brings wrong sums."""
    wrong = 0
    for seed in range(15):
        peers = peers_for(2)
        peers.weaken = ("st.release.sys", "st.relaxed.sys")
        exchange = Exchange(peers, TwoShot(HOPPER, 2, BF16, threads=32), 9)
        exchange.launch_all()
        peers.run(seed=seed, races="off")
        wrong += not exchange.right()
    assert wrong > 0


def test_a_dead_peer_is_reported() -> None:
    peers = peers_for(3)
    peers.limit = 30_000
    exchange = Exchange(peers, TwoShot(HOPPER, 3, BF16, threads=32), 9)
    exchange.launch(0)
    exchange.launch(1)
    peers.run(races="off")
    report = WaitReport({ADD_STAGE: "parts of an all-reduce"})
    report._words.copy_(peers.reports[0])
    with pytest.raises(
        WaitExpiredError, match=r"rank 0 waited for rank 2 in parts of an all-reduce .* wanted 1, saw 0"
    ):
        report.check()
