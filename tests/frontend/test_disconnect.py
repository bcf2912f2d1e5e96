"""Clients that go away: the engine hears of it at once, and its gauges return to zero."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.conftest import REPLY
from tests.frontend.running import Frontend, running, wait_for
from tests.frontend.stub_engine import StubConfig


@pytest.fixture(scope="module")
def slow(config: FrontendConfig, tokenizer: Tokenizer) -> Iterator[Frontend]:
    """An answer would take minutes; one request runs at a time, a second one waits."""
    with running(config, [StubConfig(script=tokenizer.encode(REPLY), step_s=0.005, max_running=2)]) as started:
        yield started


def send_request(frontend: Frontend, *, stream: bool, path: str = "/v1/chat/completions") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", frontend.port), timeout=10)
    fields = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
    body = json.dumps({"model": "tiny-chat", "max_tokens": 100_000, "ignore_eos": True, "stream": stream, **fields})
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    return connection


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_running_request_is_cancelled(slow: Frontend, path: str, stream: bool, how: str) -> None:
    aborts = slow.metric("request_success_total")
    connection = send_request(slow, stream=stream, path=path)
    if stream:
        assert connection.recv(100_000).startswith(b"HTTP/1.1 200")
    wait_for(lambda: slow.metric("num_requests_running") == 1)
    assert slow.metric("kv_blocks_used") == 1
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait_for(lambda: slow.metric("num_requests_running") == 0, 1)
    assert slow.metric("kv_blocks_used") == 0
    assert slow.metric("request_success_total") == aborts + 1


def test_a_waiting_request_is_cancelled(slow: Frontend) -> None:
    connections = [send_request(slow, stream=True) for _ in range(3)]
    wait_for(lambda: slow.metric("num_requests_waiting") == 1)
    connections[2].close()
    wait_for(lambda: slow.metric("num_requests_waiting") == 0, 1)
    assert slow.metric("num_requests_running") == 2
    for connection in connections:
        connection.close()
    wait_for(lambda: slow.metric("num_requests_running") == 0, 1)


def test_a_client_that_stops_reading_holds_up_nobody(slow: Frontend) -> None:
    idle = send_request(slow, stream=True)
    with slow.client() as client:
        answer = client.chat.completions.create(
            model="tiny-chat", messages=[{"role": "user", "content": "Hi"}], max_tokens=20
        )
    assert answer.choices[0].finish_reason in ("stop", "length")
    idle.close()
    wait_for(lambda: slow.metric("num_requests_running") == 0, 1)
