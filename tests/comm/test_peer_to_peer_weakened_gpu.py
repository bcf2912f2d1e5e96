"""Exchanges of emulated nodes in which one wait or flag of the network's kernels is weakened: each is noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from tests.comm.echo import plain_rows_from
from tests.comm.oracle import Case
from tests.comm.test_nvlink_gpu import Exchange, once
from tests.comm.test_nvlink_weakened import ordering
from tests.comm.test_peer_to_peer_gpu import Nodes
from tests.ptx.errors import PtxError
from tests.ptx.launch import Launch
from tests.ptx.program import Program


@pytest.mark.parametrize("kernel", ["LandRecords", "LandResults", "LandResultRows"])
@pytest.mark.parametrize("new", ["ld.relaxed.sys.global.u64", "ld.acquire.gpu.global.u64"])
def test_a_weaker_wait_is_caught(kernel: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the waits for signals: made relaxed, or of a scope that excludes the network."""
    if kernel == "LandResultRows":
        plain_rows_from(3, monkeypatch)
    case = Case(tokens=(5, 3), experts=4, top_k=2, hidden=64)
    job = Nodes(case, "ab", monkeypatch)

    def weakened(launch: Launch) -> Launch:
        if f"{kernel}arch" not in launch.program.kernel.name:
            return launch
        program = launch.program
        for index, one in enumerate(program.kernel.instructions):
            if one.parts == ("ld", "acquire", "sys", "global", "u64"):
                program = program.replaced(index, replace(one, parts=tuple(new.split("."))))
        assert program is not launch.program
        return replace(launch, program=program)

    job.cluster.peers.change = weakened

    with pytest.raises((PtxError, AssertionError)):
        several(job, case)


def test_weakened_flags_of_results_to_be_summed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends: by whoever returns them, and by the rank that adds them up. Signals that it waits for again have
    been acquired by the launch that landed them.
    """
    plain_rows_from(2, monkeypatch)
    case = Case(tokens=(3, 2), experts=4, top_k=2, hidden=16, partial_sums=True, sum_ranks=2)
    job = Nodes(case, "aabb", monkeypatch, rails=True)
    exchange = Exchange(job, case)
    exchange.dispatch()
    job.run()
    exchange.combine_send()
    tried = set()
    for name, program in programs_of(job).items():
        for weakening in ordering(program):
            if ".u64" in weakening.text or ("SumNode" in name and weakening.text.startswith("st")):
                continue
            tried.add(weakening.text.split(".")[0])

            def change(launch: Launch, weakening: Any = weakening, name: str = name) -> Launch:
                return weakening.apply(launch) if launch.program.kernel.name == name else launch

            job = Nodes(case, "aabb", monkeypatch, rails=True)
            job.cluster.peers.change = change
            with pytest.raises((PtxError, AssertionError)):
                several(job, case)
    assert tried == {"st", "ld"}


def test_every_weakened_flag_of_forwarded_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for the signals of messages, headers and chunks, and the release of the members' flags. One rank sends two
    messages of packets; three chunks of the other node's ranks, which are slower, are forwarded by three blocks.
    """
    plain_rows_from(25, monkeypatch)
    case = Case(tokens=(2, 24, 33, 33), experts=4, top_k=2, hidden=16)
    job = Nodes(case, "aabb", monkeypatch, rails=True)
    Exchange(job, case).dispatch()
    program, tried = next(one for name, one in programs_of(job).items() if "LandRecords" in name), set()
    for weakening in ordering(program):
        tried.add(weakening.text.split(".")[0])

        def change(launch: Launch, weakening: Any = weakening) -> Launch:
            return weakening.apply(launch) if launch.program.kernel.name == program.kernel.name else launch

        job = Nodes(case, "aabb", monkeypatch, rails=True)
        job.cluster.peers.change = change
        with pytest.raises((PtxError, AssertionError)):
            several(job, case)
    assert tried == {"st", "ld"}


def programs_of(job: Nodes) -> dict[str, Program]:
    """Of the launches that wait to be run, by name."""
    return {one.program.kernel.name: one.program for queue in job.cluster.peers._launches for one in queue}


def several(job: Nodes, case: Case) -> None:
    for seed in range(20):
        once(job, replace(case, seed=seed), seed)
