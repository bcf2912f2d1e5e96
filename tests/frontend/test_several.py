"""Several frontend processes of one server: one port, one set of metrics, one store of responses."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator

import pytest

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.conftest import REPLY
from tests.frontend.running import Frontend, running, wait_for
from tests.frontend.stub_engine import StubConfig

PROCESSES = 3


@contextlib.contextmanager
def started(config: FrontendConfig, tokenizer: Tokenizer) -> Iterator[Frontend]:
    with running(config, [StubConfig(script=tokenizer.encode(REPLY), step_s=0.001)], count=PROCESSES) as frontend:
        for _ in range(30):  # until chance has asked each of them
            frontend.wait_until_ready()
        yield frontend


@pytest.fixture(scope="module")
def several(config: FrontendConfig, tokenizer: Tokenizer) -> Iterator[Frontend]:
    with started(config, tokenizer) as frontend:
        yield frontend


def test_metrics_are_those_of_all(several: Frontend) -> None:
    for _ in range(30):
        several.post("/v1/completions", {"model": "tiny-chat", "prompt": "Hi", "max_tokens": 2})
    wait_for(lambda: [several.metric("generation_tokens_total") for _ in range(15)] == [60] * 15)  # whoever answers
    assert several.metric("time_to_first_token_seconds_count") == 30
    assert several.metric("num_requests_running") == 0


def test_a_response_is_found_whoever_made_it(several: Frontend) -> None:
    status, response, _ = several.post("/v1/responses", {"model": "tiny-chat", "input": "Hi"})
    assert status == 200
    for _ in range(20):
        status, body = several.get(f"/v1/responses/{response['id']}")
        assert (status, json.loads(body)["id"]) == (200, response["id"])
    body = {"model": "tiny-chat", "input": "And?", "previous_response_id": response["id"]}
    assert [several.post("/v1/responses", body)[0] for _ in range(10)] == [200] * 10


def test_a_background_response_is_cancelled_whoever_runs_it(several: Frontend) -> None:
    endless = {"model": "tiny-chat", "input": "Hi", "background": True, "ignore_eos": True, "max_output_tokens": 3500}
    ids = [several.post("/v1/responses", endless)[1]["id"] for _ in range(4)]
    wait_for(lambda: several.metric("num_requests_running") == 4)
    for response_id in ids:
        assert several.post(f"/v1/responses/{response_id}/cancel", b"")[1]["status"] == "cancelled"
    wait_for(lambda: several.metric("num_requests_running") == 0)


def test_all_drain(config: FrontendConfig, tokenizer: Tokenizer) -> None:
    body = json.dumps({"model": "tiny-chat", "prompt": "Hi", "max_tokens": 300, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with started(config, tokenizer) as frontend:
        connections = [socket.create_connection(("127.0.0.1", frontend.port), timeout=10) for _ in range(12)]
        for connection in connections:
            connection.sendall((head + body).encode())
        wait_for(lambda: frontend.metric("num_requests_running") == 12)
        for process in frontend.processes:
            process.send_signal(signal.SIGTERM)
        for connection in connections:
            answer = b""
            while part := connection.recv(65536):
                answer += part
            assert b"[DONE]" in answer
            connection.close()
        assert [process.wait(5) for process in frontend.processes] == [0] * PROCESSES
        assert frontend.stubs[0].wait(5) == 0
