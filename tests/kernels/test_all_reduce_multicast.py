"""All-reduce by multicast, on an emulated multicast object only."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import jit
from rose_dist.kernels.arch import ARCHS, HOPPER
from rose_dist.kernels.cute.all_reduce_multicast import Multicast
from rose_dist.kernels.peer_regions import MAX_BLOCKS, MULTICAST_ADD_STAGE, PACKET_BYTES, multicast_bytes
from rose_dist.kernels.sync import WaitExpiredError, WaitReport
from tests.kernels.peers import Peers, sum_in_rank_order
from tests.ptx.errors import PtxError

BF16 = torch.bfloat16
SIZE = 4096


class Switch:
    """GPUs behind one switch."""

    def __init__(self, ranks: int) -> None:
        self.peers = Peers(ranks, multicast_bytes(SIZE) // (2 * ranks * PACKET_BYTES) + 1)
        self.address = self.peers.machine.multicast(self.peers.inboxes)
        self.uses = self.peers.each(lambda rank: self.peers.machine.zeros(MAX_BLOCKS, torch.int32, gpu=rank))


class Exchange:
    """One exchange's tensors on every rank."""

    def __init__(self, switch: Switch, kernel: Multicast, rows: int, blocks: int = 2, live: int | None = None) -> None:
        self.switch, self.kernel, self.blocks, self.live = switch, kernel, blocks, rows if live is None else live
        peers = switch.peers
        # Small integers, so that the order in which a switch adds makes no difference.
        self.x = peers.each(lambda _: torch.randint(-8, 8, (rows, 64)).to(BF16))
        self.on_gpu = [peers.tensor(x, rank) for rank, x in enumerate(self.x)]
        self.outs = peers.each(lambda rank: peers.empty(rows, 64, dtype=BF16, rank=rank))

    def launch(self, rank: int) -> None:
        peers, rows = self.switch.peers, self.x[0].shape[0]
        bound = peers.tensor(torch.tensor([self.live], dtype=torch.int32), rank)
        peers.launch(
            self.kernel, rank, self.on_gpu[rank], bound, self.outs[rank], 8, peers.addresses[rank], self.switch.address,
            SIZE, self.switch.uses[rank], peers.reports[rank], peers.limit, rank, rows, self.blocks,
        )  # fmt: skip

    def launch_all(self) -> None:
        for rank in range(self.switch.peers.ranks):
            self.launch(rank)

    def right(self) -> bool:
        expected = sum_in_rank_order(self.x)[: self.live].to(BF16)
        return all(torch.equal(out[: self.live], expected) for out in self.outs)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 7), (4, 9), (8, 1)])
def test_ranks(arch: str, ranks: int, rows: int) -> None:
    switch = Switch(ranks)
    exchange = Exchange(switch, Multicast(ARCHS[arch], ranks, threads=32), rows)
    exchange.launch_all()
    switch.peers.run()
    assert exchange.right()


@pytest.mark.parametrize("seed", range(3))
def test_exchanges_back_to_back(seed: int) -> None:
    switch, kernel = Switch(3), Multicast(HOPPER, 3, threads=32)
    sizes = ((9, 2, None), (1, 3, None), (9, 2, 0), (12, 1, None), (9, 3, 4), (3, 2, None))
    exchanges = [Exchange(switch, kernel, rows, blocks, live) for rows, blocks, live in sizes]
    for exchange in exchanges:
        exchange.launch_all()
    switch.peers.run(seed=seed)
    assert all(exchange.right() for exchange in exchanges)


@pytest.mark.parametrize("weaken", [("red.release.sys", "red.relaxed.sys"), ("ld.acquire.sys", "ld.relaxed.sys")])
def test_a_weakened_counter_is_caught(weaken: tuple[str, str]) -> None:
    switch = Switch(2)
    switch.peers.weaken = weaken
    exchange = Exchange(switch, Multicast(HOPPER, 2, threads=32), 9)
    exchange.launch_all()
    with pytest.raises(PtxError):
        switch.peers.run()


def test_a_dead_peer_is_reported() -> None:
    switch = Switch(2)
    switch.peers.limit = 30_000
    Exchange(switch, Multicast(HOPPER, 2, threads=32), 9).launch(0)
    switch.peers.run(races="off")
    report = WaitReport({MULTICAST_ADD_STAGE: "an all-reduce by multicast"})
    report._words.copy_(switch.peers.reports[0])
    with pytest.raises(WaitExpiredError, match=r"rank 0 waited .* in an all-reduce by multicast .* wanted 2, saw 1"):
        report.check()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_ptx(arch: str) -> None:
    ptx = jit.compile_binary(Multicast(ARCHS[arch], 8)).ptx
    assert "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2" in ptx
    assert "multimem.st.relaxed.sys.global.v4.f32" in ptx
    assert ptx.count("multimem.red.release.sys.global.add.u32") == 2
    assert "fence" not in ptx
