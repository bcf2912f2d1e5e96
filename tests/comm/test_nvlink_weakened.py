"""Exchanges between emulated GPUs whose orderings are weakened, one at a time: every one is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cutlass")

from tests.comm.echo import CASE, CASES, SUMMED, Echo, chain, choose_form, dropped, halves, plain_rows_from
from tests.comm.oracle import Case
from tests.comm.test_nvlink_gpu import Job
from tests.ptx.errors import PtxError
from tests.ptx.launch import Launch
from tests.ptx.weaken import Weakening, weakenings


def ordering(program: Any) -> Iterator[Weakening]:
    """Every release and acquire of a flag, made relaxed or its scope narrower; not those of a report, which only a wait
    that expired writes.
    """
    reporting = False
    for weakening in weakenings(program, barriers=False):
        if ".cas." in weakening.text:
            reporting = True
        elif weakening.text.startswith("st.release") and reporting:
            reporting = weakening.change.startswith("release")  # its scope comes next
        elif weakening.text.startswith(("st.release", "ld.acquire")):
            yield weakening


Build = Callable[[pytest.MonkeyPatch], tuple[Job, list[Echo]]]


def caught(build: Build, change: Callable[[Launch], Launch], seeds: int) -> bool:
    for seed in range(seeds):
        with pytest.MonkeyPatch.context() as patch:
            job, echoes = build(patch)
            job.cluster.peers.change = change
            try:
                job.cluster.peers.run(seed=seed)
            except PtxError:
                return True
            if not all(echo.right() for echo in echoes):
                return True
    return False


WEAKENINGS = {
    ("plain rows", chain): 8,
    ("plain rows", halves): 8,
    ("plain results", chain): 4,
    ("plain results", halves): 4,
}
"""What there is to weaken, at least: the flag of a chunk and the flag of results, the latter by chunk or by token, each
at both ends, each in its order and in its scope."""


@CASES
@pytest.mark.parametrize(("form", "calls"), WEAKENINGS)
def test_every_weakened_flag_is_caught(form: str, calls: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_form(form, monkeypatch)

    def build(patch: pytest.MonkeyPatch) -> tuple[Job, list[Echo]]:
        job = Job(case, 2, patch)
        return job, calls(job, (3,), 2)

    job, echoes = build(monkeypatch)
    programs: dict[str, Any] = {}
    for launches in job.cluster.peers._launches:
        for launch in launches:
            programs.setdefault(launch.program.kernel.name, launch.program)
    job.run()
    assert all(echo.right() for echo in echoes)
    tried = 0
    for name, program in programs.items():
        if "AssignSlots" in name:
            continue  # test_phase_barrier
        for weakening in ordering(program):
            tried += 1

            def change(launch: Launch, weakening: Weakening = weakening, name: str = name) -> Launch:
                return weakening.apply(launch) if launch.program.kernel.name == name else launch

            assert caught(build, change, 12), f"{name}: {weakening}"
    assert tried >= WEAKENINGS[form, calls]


NUMBERS, COPIES = ("griddepcontrol", "wait"), ("cp", "async", "bulk", "wait_group")
AWAITED = [("DispatchRows", NUMBERS, CASE), ("DispatchRows", COPIES, CASE), ("CombineRows", COPIES, CASE)]
AWAITED += [("DispatchRows", waits, SUMMED) for waits in (NUMBERS, COPIES)]


@pytest.mark.parametrize(("kernel", "waits", "case"), AWAITED)
def test_what_is_not_awaited_is_caught(
    kernel: str, waits: tuple[str, ...], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of pairs, by the blocks that send and those that take; rows that are under way by bulk copies."""
    plain_rows_from(2, monkeypatch)

    def build(patch: pytest.MonkeyPatch) -> tuple[Job, list[Echo]]:
        job = Job(case, 2, patch)
        return job, chain(job, (3,), 2)

    job, _ = build(monkeypatch)
    rows = next(one for one in job.cluster.peers._launches[0] if kernel in one.program.kernel.name)
    lines = [one.line for one in rows.program.kernel.instructions if one.parts[: len(waits)] == waits]
    assert lines
    # Of many waits for copies none may matter alone.
    for some in [[line] for line in lines] if waits == NUMBERS else [lines]:

        def change(launch: Launch, some: list[int] = some) -> Launch:
            return dropped(launch, *some) if launch.program.kernel.name == rows.program.kernel.name else launch

        assert caught(build, change, 12), some


@pytest.mark.parametrize("kind", ["st", "ld"])
def test_too_small_a_scope_of_packets_is_a_race(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(patch: pytest.MonkeyPatch) -> tuple[Job, list[Echo]]:
        job = Job(CASE, 2, patch)
        job.cluster.peers.weaken = (f"{kind}.relaxed.sys.global.v4", f"{kind}.relaxed.gpu.global.v4")
        return job, chain(job, (3,), 1)

    assert caught(build, lambda launch: launch, 3)


def test_packets_that_tear_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = False
    for seed in range(20):
        job = Job(CASE, 2, monkeypatch)
        echoes = chain(job, (3,), 1)
        try:
            job.cluster.peers.run(seed=seed, vector_atomic=False, races="off")
        except PtxError:
            wrong = True
        wrong |= not all(echo.right() for echo in echoes)
        if wrong:
            return
    raise AssertionError("nobody noticed")
