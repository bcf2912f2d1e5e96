"""Experts over emulated GPUs of several emulated nodes: bit by bit against `oracle`, with messages in any order."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.nvlink import exchange_layout
from rose_dist.comm.all_to_all.peer_to_peer import PeerToPeer
from rose_dist.comm.layout import Layout
from rose_dist.comm.symmetric_memory import Region
from rose_dist.comm.topology import Topology
from rose_dist.kernels import network_exchange, nvshmem
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.network_layout import NetworkLayout
from rose_dist.kernels.sync import WaitExpiredError
from tests.comm.emulated import SMS, Cluster
from tests.comm.oracle import Case
from tests.comm.test_nvlink_gpu import DEVICE, SMALL, Exchange, Job, One, once
from tests.ptx.cutedsl import compile_kernel
from tests.ptx.errors import PtxError


class Nodes(Job):
    """An all-to-all on every rank of a cluster of nodes."""

    def __init__(
        self, case: Case, nodes: str, monkeypatch: pytest.MonkeyPatch, *, in_flight: int = 1, arch: str = "sm_90a",
        max_tokens: int = 0,
    ) -> None:  # fmt: skip
        """nodes: a letter a rank."""
        ranks = len(nodes)
        self.config = replace(case.config, max_tokens=max_tokens or case.config.max_tokens)
        self.layout = Layout(ranks, tp=1, dp=ranks, ep=ranks)
        sizes = exchange_layout(self.config, ranks, in_flight)
        monkeypatch.setattr(nvshmem, "bitcode", lambda arch: None)
        network_exchange._load.cache_clear()
        self.cluster = Cluster(ranks, sizes.region_bytes, monkeypatch, ARCHS[arch])
        machine = self.cluster.peers.machine
        size = NetworkLayout(sizes).region_bytes
        self.networks = [machine.zeros(size, torch.uint8, gpu=g, name=f"network region of {g}") for g in range(ranks)]
        machine.register_symmetric(self.networks)
        taken = [tuple(self.cluster.peers.addresses[:ranks]), tuple(t.data_ptr() for t in self.networks)]
        self.moes = []
        for rank in range(ranks):
            regions = iter(taken)
            with self.cluster.on(rank):
                self.moes.append(
                    PeerToPeer(
                        self.config, One(rank, ranks), Topology.of(nodes, rank),
                        GpuOptions(device=DEVICE, in_flight=in_flight, layout=PackedLayout()),
                        lambda size, regions=regions: Region(torch.empty(0), next(regions)), SMS,
                    )  # fmt: skip
                )


@pytest.fixture(autouse=True)
def unlinked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that call NVSHMEM are compiled with the calls left open."""

    def compiled(kernel: Any) -> Any:
        if kernel not in _compiled:
            _compiled[kernel] = compile_kernel(
                kernel, *kernel.arguments(), arch=str(kernel.arch), linked=kernel.tvm_ffi
            )
        return _compiled[kernel]

    monkeypatch.setattr("tests.kernels.peers.compiled", compiled)


_compiled: dict[Any, Any] = {}


@pytest.mark.parametrize("name", SMALL)
def test_matrix_over_two_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SMALL[name]
    job = Nodes(case, "ab", monkeypatch)
    for seed in range(2):
        once(job, replace(case, seed=seed), seed)


@pytest.mark.parametrize("nodes", ["aab", "aabb", "abcd", "abab", "aabbc", "aaaabbbb"])
def test_nodes_of_many_shapes(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=(5, 0, 18, 3), experts=len(nodes) * 2 + 1, top_k=3, hidden=16)
    job = Nodes(case, nodes, monkeypatch)
    for seed in range(3):
        once(job, replace(case, seed=seed), seed)


def test_messages_of_many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """More records than a message holds, for one rank and for all; then few in the same buffers."""
    case = Case(tokens=(40, 33), experts=6, top_k=4, hidden=16)
    job = Nodes(case, "aab", monkeypatch, max_tokens=40)
    for seed, kind in enumerate(("last_expert", "uniform", "all_skipped", "one_expert")):
        once(job, replace(case, routing=kind, seed=seed, tokens=(40, 33, 16, 17) if seed % 2 else (1, 0, 3)), seed)


def test_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SMALL[next(iter(SMALL))]
    once(Nodes(case, "aab", monkeypatch, arch="sm_100a"), case, 0)


def test_two_exchanges_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=(5, 3, 4), experts=6, top_k=2, hidden=16)
    job = Nodes(case, "abb", monkeypatch, in_flight=2)
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


def test_many_exchanges_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits for the host between exchanges: buffers are used again while slow ranks are behind."""
    case = Case(tokens=(3, 2, 4), experts=5, top_k=2, hidden=16)
    job = Nodes(case, "aab", monkeypatch)
    for seed in range(3):
        exchanges = [Exchange(job, replace(case, seed=10 * seed + i)) for i in range(5)]
        for exchange in exchanges:
            exchange.dispatch()
            # The experts of this test need the rows on the host, so that only empty ones go without a stop.
            exchange.check_rows = None  # type: ignore[assignment]
            for handle in exchange.given:
                handle.handle.release()
        job.run(seed)


WEAK = [
    ("LandRecords", "ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64"),
    ("LandRecords", "ld.acquire.sys.global.u64", "ld.acquire.gpu.global.u64"),
    ("LandResults", "ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64"),
    ("LandResults", "ld.acquire.sys.global.u64", "ld.acquire.gpu.global.u64"),
]


@pytest.mark.parametrize(("kernel", "old", "new"), WEAK)
def test_a_weaker_wait_is_caught(kernel: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ptx.parser import parse  # noqa: PLC0415
    from tests.ptx.program import Program  # noqa: PLC0415

    case = Case(tokens=(5, 3), experts=4, top_k=2, hidden=64)
    job = Nodes(case, "ab", monkeypatch)
    launch, peers = job.cluster.peers.launch, job.cluster.peers

    def weakened(given: Any, rank: int, *arguments: Any) -> None:
        before = len(peers._launches[rank])
        launch(given, rank, *arguments)
        if type(given).__name__ == kernel:
            text = _compiled[given].ptx
            assert old in text
            module = parse(text.replace(old, new))
            (entry,) = module.kernels.values()
            mine = peers._launches[rank]
            mine[before:] = [dataclasses.replace(one, program=Program(module, entry)) for one in mine[before:]]

    monkeypatch.setattr(peers, "launch", weakened)
    with pytest.raises((PtxError, AssertionError)):
        for seed in range(6):
            once(job, replace(case, seed=seed), seed)


def test_a_peer_that_sends_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=(2, 2), experts=2, top_k=1, hidden=16)
    job = Nodes(case, "ab", monkeypatch)
    exchange = Exchange(job, case)
    with job.cluster.on(0):
        arguments, named = exchange.arguments(0)
        job.moes[0].dispatch(*arguments, **named)
    job.cluster.peers.run()
    with pytest.raises(WaitExpiredError, match="rank 0 waited for rank 1 in a dispatch, for a message from another"):
        job.moes[0].check()


def test_too_many_tokens_are_refused_at_construction() -> None:
    sizes = ExchangeLayout(ranks=2, experts=4, top_k=2, max_tokens=300, row_bytes=16, scale_bytes=0, result_bytes=16)
    with pytest.raises(KernelArgumentError, match="max_tokens: is 300; between nodes at most 256"):
        NetworkLayout(sizes)


def test_random_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    for seed in range(4):
        nodes = "".join(draw.choice("abcd") for _ in range(draw.randrange(2, 8)))
        if len(set(nodes)) == 1:
            continue
        case = Case(
            tokens=tuple(draw.randrange(0, 20) for _ in nodes), experts=draw.randrange(1, 20), top_k=draw.choice((1, 3, 5)),
            hidden=16 * draw.choice((1, 3)), dtype=torch.bfloat16, seed=seed,
        )  # fmt: skip
        once(Nodes(case, nodes, monkeypatch), case, seed)
