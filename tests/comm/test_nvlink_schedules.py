"""Many exchanges between emulated GPUs with nothing between them: any schedule is right, a dead peer is reported."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from rose_dist.kernels.peer_regions import CHUNK_STAGE, HEADER_STAGE, STAGES
from rose_dist.kernels.sync import WaitExpiredError, WaitReport
from tests.comm.echo import (
    CASE,
    CASES,
    FORMS,
    Echo,
    chain,
    choose_form,
    dropped,
    plain_results_from,
    plain_rows_from,
)
from tests.comm.oracle import Case
from tests.comm.test_nvlink_gpu import Job
from tests.ptx.launch import Launch
from tests.ptx.weaken import weakenings


@pytest.mark.parametrize("seed", range(3))
def test_exchanges_back_to_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets: ranks run ahead of one another over several rounds of all copies."""
    job = Job(CASE, 2, monkeypatch)
    echoes = chain(job, (3, 0, 2), 7)
    job.run(seed)
    assert all(echo.right() for echo in echoes)


@CASES
def test_all_forms_by_turns(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets, packets with plain results, and plain rows, each beside each."""
    plain_results_from(2, monkeypatch)
    plain_rows_from(4, monkeypatch)
    job = Job(case, 2, monkeypatch, max_tokens=18)
    echoes = chain(job, (18, 2, 3, 1, 0), 5)
    job.run(1)
    assert all(echo.right() for echo in echoes)


@CASES
@pytest.mark.parametrize(("ranks", "tokens"), [(3, (3, 0, 1)), (8, (1, 2))])
def test_ranks(ranks: int, tokens: tuple[int, ...], case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also more ranks than experts."""
    job = Job(case, ranks, monkeypatch)
    echoes = chain(job, tokens, 2)
    job.run(ranks)
    assert all(echo.right() for echo in echoes)


@CASES
@pytest.mark.parametrize("form", FORMS)
def test_two_in_flight(form: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_form(form, monkeypatch)
    job = Job(case, 2, monkeypatch, in_flight=2)
    echoes = [Echo(job, (3, 1), seed) for seed in range(6)]
    for pair in zip(echoes[::2], echoes[1::2], strict=True):
        for step in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
            for echo in pair:
                echo.call(step)
    job.run(3)
    assert all(echo.right() for echo in echoes)


# --- A dead peer ------------------------------------------------------------------------------------------------------


def report_of(job: Job, rank: int) -> WaitReport:
    report = WaitReport(STAGES)
    report._words.copy_(job.cluster.peers.reports[rank])
    return report


def test_a_rank_that_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(CASE, 3, monkeypatch)
    echo = Echo(job, (3,), 0)
    for rank in (0, 2):
        job.moes[rank].exchange._wait = (job.cluster.peers.reports[rank].data_ptr(), 30_000, rank)
        with job.cluster.on(rank):
            echo.dispatch(rank)
    job.cluster.peers.run()
    for rank in (0, 2):
        with pytest.raises(WaitExpiredError, match=f"rank {rank} waited for rank 1 in {STAGES[HEADER_STAGE]}"):
            report_of(job, rank).check()
        assert not echo.given[rank].counts.any()


def test_a_rank_that_dies_after_its_headers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's flags never come."""
    plain_rows_from(2, monkeypatch)
    job = Job(CASE, 2, monkeypatch)
    echo = Echo(job, (3,), 0)
    for rank in range(2):
        job.moes[rank].exchange._wait = (job.cluster.peers.reports[rank].data_ptr(), 40_000, rank)
        with job.cluster.on(rank):
            (echo.dispatch if rank == 0 else echo.dispatch_send)(rank)
    job.cluster.peers.change = lambda launch: without_release(launch) if launch.gpu == 1 else launch
    job.cluster.peers.run(races="off")
    with pytest.raises(WaitExpiredError, match=f"rank 0 waited for rank 1 in {STAGES[CHUNK_STAGE]}"):
        report_of(job, 0).check()


def without_release(launch: Launch) -> Launch:
    """The launch with its flag stores dropped."""
    for weakening in weakenings(launch.program, scopes=False, barriers=False):
        if weakening.text.startswith("st.release") and "DispatchRows" in launch.program.kernel.name:
            return dropped(launch, weakening.line)
    return launch
