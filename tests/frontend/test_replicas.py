"""Replicas that are lost, and what becomes of their requests: real frontends before stub leaders that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose_dist.frontend.config import FrontendConfig, ReplicaNews
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.conftest import REPLY
from tests.frontend.running import Frontend, start_frontends, start_stub, wait_for
from tests.frontend.stub_engine import StubConfig

BODY: dict[str, Any] = {"model": "tiny-chat", "prompt": "Hi", "max_tokens": 30, "ignore_eos": True}


class Replicated(Frontend):
    """A frontend before two replicas of one leader each."""

    def start(self, number: int, stub: StubConfig) -> subprocess.Popen[str]:
        process, address = start_stub(stub)
        self.stubs.append(process)
        self.tell(ReplicaNews(number=number, leaders=[address]))
        return process

    def tell(self, news: ReplicaNews) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(news) + b"\n")
        self.process.stdin.flush()

    def health(self) -> tuple[int, Any]:
        status, body = self.get("/health")
        return status, json.loads(body)

    def wait_for_health(self, status: str, seconds: float = 60) -> None:
        wait_for(lambda: self.health()[1]["status"] == status, seconds)

    def running(self) -> list[float]:
        """Requests in each replica's batch."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith("rose:num_requests_running{")]


@pytest.fixture
def front(config: FrontendConfig) -> Iterator[Replicated]:
    (process,), port = start_frontends(config, [], count=1, replicas=2)
    front = Replicated([process], [], port)
    try:
        wait_for(lambda: front.get("/version")[0] == 200, 20)
        yield front
    finally:
        for child in [process, *front.stubs]:
            child.kill()
            child.wait()


@pytest.fixture
def stub(tokenizer: Tokenizer) -> StubConfig:
    return StubConfig(script=tokenizer.encode(REPLY), step_s=0.05)


class Asked:
    """Requests in threads, and what they got."""

    def __init__(self, front: Frontend, count: int, **change: Any) -> None:
        self.answers: list[tuple[int, bytes]] = []
        body = json.dumps(BODY | change).encode()
        self._threads = [threading.Thread(target=self._ask, args=(front, body)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, front: Frontend, body: bytes) -> None:
        status, answer, _ = front.request("POST", "/v1/completions", body)
        self.answers.append((status, answer))

    def wait(self) -> list[tuple[int, bytes]]:
        for thread in self._threads:
            thread.join(120)
        assert len(self.answers) == len(self._threads), "some got neither an answer nor an error"
        return self.answers


def test_health_says_what_is_gone(front: Replicated, stub: StubConfig) -> None:
    loading = [{"replica": number, "reason": "it is loading the model"} for number in range(2)]
    assert front.health() == (503, {"status": "loading", "missing": loading})
    assert front.post("/v1/completions", BODY)[0] == 503
    front.start(0, stub)
    front.wait_for_health("degraded")
    assert front.health() == (200, {"status": "degraded", "missing": loading[1:]})
    assert front.post("/v1/completions", BODY)[0] == 200
    front.start(1, stub)
    front.wait_for_health("ok")
    front.tell(ReplicaNews(number=0, reason="rank 3: the process is gone"))
    front.wait_for_health("degraded")
    assert front.health()[1]["missing"] == [{"replica": 0, "reason": "rank 3: the process is gone"}]
    assert front.metric("replica_up") == 1
    front.tell(ReplicaNews(number=1, reason="rank 0: the process is gone"))
    wait_for(lambda: front.health()[0] == 503)
    status, body, headers = front.post("/v1/completions", BODY)
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert "started again" in body["error"]["message"]
    assert int(headers["retry-after"]) > 0


@pytest.mark.parametrize("by", ["kill", "news"])
def test_answers_of_which_nothing_was_sent_come_from_another_replica(
    front: Replicated, stub: StubConfig, by: str
) -> None:
    """Whole answers, after some of their tokens were there."""
    expected = None
    stubs = [front.start(number, stub) for number in range(2)]
    front.wait_for_health("ok")
    expected = front.post("/v1/completions", BODY)[1]["choices"]
    asked = Asked(front, 6)
    wait_for(lambda: min(front.running()) > 0)
    if by == "kill":
        stubs[1].kill()
    else:
        front.tell(ReplicaNews(number=1, reason="lost"))
    for status, answer in asked.wait():
        assert status == 200, answer
        assert json.loads(answer)["choices"] == expected
    assert front.metric("request_success_total") >= 7
    lines = front.get("/metrics")[1].decode().splitlines()
    assert any('finished_reason="lost"' in line for line in lines)


def test_a_stream_that_has_begun_ends_with_a_clear_error_and_one_that_has_not_is_retried(
    front: Replicated, stub: StubConfig
) -> None:
    slow = msgspec.structs.replace(stub, max_running=1)  # the second request at a replica waits
    stubs = [front.start(number, slow) for number in range(2)]
    front.wait_for_health("ok")
    asked = Asked(front, 4, stream=True, max_tokens=20)
    wait_for(lambda: front.metric("generation_tokens_total") > 3)
    assert front.metric("num_requests_waiting") == 2
    stubs[0].kill()
    answers = [answer.decode() for _, answer in asked.wait()]
    broken = [answer for answer in answers if '"error"' in answer]
    assert len(broken) == 1
    assert "The replica that worked on this request was lost; send the request again" in broken[0]
    assert '"code":"replica_lost"' in broken[0]
    assert broken[0].endswith("data: [DONE]\n\n")
    assert sum('"finish_reason":"length"' in answer for answer in answers) == 3


def test_a_request_that_brings_down_replicas_is_tried_on_two(front: Replicated, stub: StubConfig) -> None:
    stubs = [front.start(number, stub) for number in range(2)]
    front.wait_for_health("ok")
    asked = Asked(front, 1)
    for _ in range(2):
        wait_for(lambda: max(front.running()) == 1)
        victim = front.running().index(1) if len(front.running()) == 2 else 1
        stubs[victim].kill()
        front.tell(ReplicaNews(number=victim, reason="killed"))
        wait_for(lambda: len(front.running()) < 2)
        front.stubs.remove(stubs[victim])
        if len(front.stubs) == 1:
            stubs[victim] = front.start(victim, msgspec.structs.replace(stub, max_running=0))
    ((status, answer),) = asked.wait()
    assert (status, json.loads(answer)["error"]["code"]) == (503, "replica_lost")


def test_a_stopped_leader_is_left_and_joins_again(front: Replicated, stub: StubConfig, tmp_path: Path) -> None:
    """As where the network is cut, and comes back: what the leader had been asked for is void."""
    report = tmp_path / "report"
    stubs = [front.start(number, msgspec.structs.replace(stub, report=f"{report}{number}")) for number in range(2)]
    front.wait_for_health("ok")
    asked = Asked(front, 4, max_tokens=60)
    wait_for(lambda: min(front.running()) > 0)
    os.kill(stubs[0].pid, signal.SIGSTOP)
    front.wait_for_health("degraded")
    assert front.health()[1]["missing"] == [{"replica": 0, "reason": "it can't be reached"}]
    assert [status for status, _ in asked.wait()] == [200] * 4
    os.kill(stubs[0].pid, signal.SIGCONT)
    front.wait_for_health("ok")
    hellos = [line for line in Path(f"{report}0").read_text().splitlines() if '"hello"' in line]
    assert len(hellos) == 2
    front.process.send_signal(signal.SIGTERM)
    assert front.process.wait(60) == 0
    for one in stubs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert one.wait(60) == 0
