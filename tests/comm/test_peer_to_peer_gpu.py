"""Experts over emulated GPUs of several emulated nodes: bit by bit against `oracle`, with messages in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.comm.all_to_all.create import region_bytes
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.peer_to_peer import PeerToPeer, network_layout
from rose_dist.comm.layout import Layout
from rose_dist.comm.symmetric_memory import Region
from rose_dist.comm.topology import Topology
from rose_dist.kernels import nvshmem
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.peer_regions import HEADER_STAGE, NETWORK_RECORD_STAGE, STAGES
from rose_dist.kernels.sync import WaitExpiredError
from tests.comm.echo import plain_rows_from
from tests.comm.emulated import SMS, Cluster
from tests.comm.oracle import Case
from tests.comm.test_all_to_all import BF16, same_bits
from tests.comm.test_nvlink_gpu import DEVICE, SMALL, Exchange, Job, One, once
from tests.comm.test_nvlink_schedules import report_of


class Nodes(Job):
    """An all-to-all on every rank of a cluster of nodes."""

    def __init__(
        self, case: Case, nodes: str, monkeypatch: pytest.MonkeyPatch, *, in_flight: int = 1, arch: str = "sm_90a",
        max_tokens: int = 0, rails: bool = False,
    ) -> None:  # fmt: skip
        """nodes: a letter a rank; rails: ranks forward."""
        ranks = len(nodes)
        self.config = replace(case.config, max_tokens=max_tokens or case.config.max_tokens, rail_forwarding=rails)
        self.layout = Layout(ranks, tp=1, dp=ranks, ep=ranks)
        network = network_layout(self.config, Topology.of(nodes, 0), in_flight)
        sizes = network.exchange
        monkeypatch.setattr(nvshmem, "bitcode", lambda arch: None)
        self.cluster = Cluster(ranks, sizes.region_bytes, monkeypatch, ARCHS[arch])
        machine = self.cluster.peers.machine
        size = network.region_bytes
        self.networks = [machine.zeros(size, torch.uint8, gpu=g, name=f"network region of {g}") for g in range(ranks)]
        machine.register_symmetric(self.networks)
        machine.register_symmetric(self.cluster.peers.inboxes)
        taken = [tuple(self.cluster.peers.addresses[:ranks]), tuple(t.data_ptr() for t in self.networks)]
        self.moes = []
        for rank in range(ranks):
            regions = iter(taken)
            with self.cluster.on(rank):
                self.moes.append(
                    PeerToPeer(
                        self.config,
                        One(rank, ranks),
                        Topology.of(nodes, rank),
                        GpuOptions(device=DEVICE, in_flight=in_flight, layout=PackedLayout()),
                        lambda size, regions=regions: Region(torch.empty(0), next(regions)),
                        SMS,
                    )
                )


PREFIXES = ("T-ZERO-B", "T-ZERO-R", "R-NEG1: some", "R-DUP", "R-NONDIV: fewer", "fp8", "quantised to mxfp8")
CHOSEN = [name for name in SMALL if name.startswith(PREFIXES) and not SMALL[name].partial_sums]


def test_sums_stay_within_a_node() -> None:
    with pytest.raises(KernelArgumentError, match="no partial sums"):
        region_bytes(Case(partial_sums=True).config, Topology.of("ab", 0))


def test_rails_need_nodes_that_are_alike() -> None:
    config = replace(Case().config, rail_forwarding=True)
    for nodes in ("aab", "abab"):
        with pytest.raises(ValueError, match="equally many ranks"):
            region_bytes(config, Topology.of(nodes, 0))
    assert region_bytes(config, Topology.of("aabb", 0))


@pytest.mark.parametrize("name", CHOSEN)
def test_matrix_over_two_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SMALL[name]
    job = Nodes(case, "ab", monkeypatch)
    for seed in range(2):
        once(job, replace(case, seed=seed), seed)


def seeds(nodes: str) -> int:
    """Of schedules and routing; of eight ranks, which interpret for seconds, one."""
    return 1 if len(nodes) == 8 else 2


SHAPES = [("aab", False), ("abcd", False), ("aaaabbbb", False), ("aabb", True), ("aaaabbbb", True), ("aabbccdd", True)]


@pytest.mark.parametrize(("nodes", "rails"), SHAPES)
def test_nodes_of_many_shapes(nodes: str, rails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=(5, 0, 18, 3), experts=len(nodes) * 2 + 1, top_k=3, hidden=16)
    job = Nodes(case, nodes, monkeypatch, rails=rails)
    for seed in range(seeds(nodes)):
        once(job, replace(case, seed=seed), seed)


def test_messages_of_many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """More records than a message holds, for one rank and for all; then few in the same buffers."""
    case = Case(tokens=(40, 33), experts=6, top_k=4, hidden=16)
    job = Nodes(case, "aab", monkeypatch, max_tokens=40)
    for seed, kind in enumerate(("last_expert", "uniform")):
        once(job, replace(case, routing=kind, seed=seed, tokens=(40, 33, 16, 17) if seed % 2 else (1, 0, 3)), seed)


@pytest.mark.parametrize(("nodes", "rails"), [("ab", False), ("aab", False), ("abcd", False), *SHAPES[3:5]])
def test_many_tokens_travel_as_rows(nodes: str, rails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with more than three tokens send plain rows here, the others packets; one rank has none for a while."""
    plain_rows_from(4, monkeypatch)
    case = Case(tokens=(18, 3, 33, 4), experts=7, top_k=3, hidden=16, scale_dim=3)
    job = Nodes(case, nodes, monkeypatch, max_tokens=40, rails=rails)
    for seed, kind in enumerate(("uniform", "last_expert", "skips")):
        tokens = (18, 3, 33, 4) if seed != 1 else (5, 40, 0, 17)
        once(job, replace(case, routing=kind, seed=seed, tokens=tokens), seed)


SUMMED = {
    "some": Case(tokens=(5, 0, 18, 3), experts=9, top_k=4, dtype=BF16),
    "duplicates": Case(tokens=(4, 3), experts=8, top_k=3, routing="duplicates"),
    "top 12": Case(tokens=(3, 2), experts=17, top_k=12, dtype=BF16, accumulate=True),
    "skips": Case(tokens=(5, 4), experts=5, top_k=3, routing="skips", rows=(4, 4, 0, 2)),
}


@pytest.mark.parametrize("most", [256, 3], ids=["packets", "plain rows"])
@pytest.mark.parametrize(
    ("name", "nodes"), [*((name, "aabb") for name in SUMMED), ("some", "aabbccdd"), ("some", "aaaabbbb")]
)
def test_nodes_add_up(name: str, nodes: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_rows_from(most + 1, monkeypatch)
    case = replace(SUMMED[name], partial_sums=True, sum_ranks=nodes.count("a"))
    job = Nodes(case, nodes, monkeypatch, rails=True)
    for seed in range(seeds(nodes)):
        once(job, replace(case, seed=seed), seed)


def test_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SMALL[next(iter(SMALL))]
    once(Nodes(case, "aab", monkeypatch, arch="sm_100a"), case, 0)


ODD_OR_RAILS = pytest.mark.parametrize(("nodes", "rails"), [("abb", False), ("aabb", True)])


@ODD_OR_RAILS
def test_two_exchanges_in_flight(nodes: str, rails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=(5, 3, 4), experts=6, top_k=2, hidden=16)
    job = Nodes(case, nodes, monkeypatch, in_flight=2, rails=rails)
    for seed in range(3):
        first, second = (Exchange(job, replace(case, seed=2 * seed + i)) for i in range(2))
        first.dispatch("dispatch_send")
        second.dispatch("dispatch_send")
        first.receive()
        second.receive()
        job.run(seed)
        for exchange in (first, second):
            exchange.check_rows()
        first.combine_send()
        second.combine_send()
        first.combine_receive()
        second.combine_receive()
        job.run(seed)
        for exchange in (first, second):
            exchange.check_out()


@pytest.mark.parametrize("most", [256, 2], ids=["packets", "plain rows"])
@pytest.mark.parametrize(
    ("nodes", "rails", "sums"), [("abb", False, False), ("aabb", True, False), ("aabb", True, True)]
)
def test_exchanges_that_nobody_waits_for(
    nodes: str, rails: bool, sums: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are used again while slow ranks are behind: five exchanges of one launch queue a GPU, whose experts give
    rows back as they came; only the last one's rows and results can be looked at.
    """
    plain_rows_from(most + 1, monkeypatch)
    case = Case(tokens=(3, 2, 4), experts=5, top_k=2, hidden=16, partial_sums=sums)
    job = Nodes(case, nodes, monkeypatch, rails=rails)
    for seed in range(2):
        for number in range(5):
            exchange = Exchange(job, replace(case, seed=10 * seed + number))
            exchange.dispatch()
            outs = job.each(lambda rank: echo(job, exchange, rank))  # noqa: B023 - called at once
        job.run(seed)
        exchange.check_rows()
        for out, batch in zip(outs, exchange.batches, strict=True):
            total = torch.zeros(batch.x.shape)  # in either order of summing, as there are two fp32 addends
            for place in range(case.top_k):
                total += batch.routing.weights[:, place, None] * batch.x
            assert same_bits(out, total)


def echo(job: Nodes, exchange: Exchange, rank: int) -> torch.Tensor:
    out = job.cluster.tensor(exchange.batches[rank].before)
    job.moes[rank].combine(exchange.given[rank].x, exchange.given[rank], out=out)
    return out


@pytest.mark.parametrize("most", [256, 2], ids=["packets", "plain rows"])
def test_a_row_crosses_once_a_node(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the counts in the signals: three tokens for both ranks of the other node are three records at one of them."""
    plain_rows_from(most + 1, monkeypatch)
    case = Case(tokens=(3,), experts=4, top_k=4, hidden=16, routing="same")
    job = Nodes(case, "aabb", monkeypatch, rails=True)
    once(job, case, 0)
    layout = job.moes[0].exchange.network
    for rank, memory in enumerate(job.networks):
        words = memory.view(torch.int32).tolist()
        kind = "record" if most >= 3 else "row"
        signals = words[layout.start(f"{kind}_signals") // 4 :]
        sent = [signals[2 * (layout.groups + group)] & 255 for group in range(layout.groups)]  # exchange 1: copy 1
        assert sent == [3 if group != rank // 2 else 0 for group in range(2)]


PAIRS = pytest.mark.parametrize(("nodes", "rails"), [("ab", False), ("aabb", True)])


@PAIRS
def test_a_peer_that_sends_nothing_is_named(nodes: str, rails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=(2, 2), experts=2, top_k=1, hidden=16)
    job = Nodes(case, nodes, monkeypatch, rails=rails)
    exchange = Exchange(job, case)
    alone(job, exchange, 0)
    job.cluster.peers.run()
    far = len(nodes) // 2
    with pytest.raises(WaitExpiredError, match=f"rank 0 waited for rank {far} in {STAGES[NETWORK_RECORD_STAGE]}"):
        report_of(job, 0).check()


def test_a_forwarder_that_is_missing_shows_in_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 brings rank 1's rows to rank 2: that one waits for rank 1 or 3 and says so."""
    case = Case(tokens=(2, 2), experts=4, top_k=1, hidden=16)
    job = Nodes(case, "aabb", monkeypatch, rails=True)
    exchange = Exchange(job, case)
    for rank in (0, 1, 2):
        alone(job, exchange, rank)
    job.cluster.peers.run()
    with pytest.raises(WaitExpiredError, match=f"rank 2 waited for rank [13] in {STAGES[HEADER_STAGE]}"):
        report_of(job, 2).check()


def alone(job: Nodes, exchange: Exchange, rank: int) -> None:
    """A dispatch with a short limit."""
    job.moes[rank].exchange._wait = (job.cluster.peers.reports[rank].data_ptr(), 30_000, rank)
    with job.cluster.on(rank):
        arguments, named = exchange.arguments(rank)
        job.moes[rank].dispatch(*arguments, **named)
