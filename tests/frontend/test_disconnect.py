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


def send_request(
    frontend: Frontend,
    *,
    stream: bool,
    path: str = "/v1/chat/completions",
    receive_buffer: int | None = None,
    **more: object,
) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(10)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", frontend.port))
    fields = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
    body = json.dumps(
        {"model": "tiny-chat", "max_tokens": 4000, "ignore_eos": True, "stream": stream, **fields, **more}
    )
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


def test_a_client_that_leaves_while_its_request_is_read(slow: Frontend) -> None:
    padding = {"metadata": {"note": "x" * 100_000}}  # so long that a thread renders it
    for _ in range(20):
        send_request(slow, stream=True, **padding).close()
    with slow.client() as client:  # comes after them
        client.chat.completions.create(model="tiny-chat", messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
    wait_for(lambda: slow.metric("num_requests_running") + slow.metric("num_requests_waiting") == 0, 1)


def test_a_client_that_reads_slowly_gets_everything(config: FrontendConfig, tokenizer: Tokenizer) -> None:
    """About 10 MB, more than the sockets hold, read once the engine has long ended."""
    script = tokenizer.encode(REPLY) * 400
    with running(config, [StubConfig(script=script, step_s=0.0002)]) as frontend:
        connection = send_request(
            frontend, stream=True, receive_buffer=4096, n=8, max_tokens=3000, logprobs=True, top_logprobs=2
        )
        wait_for(lambda: frontend.metric("num_requests_running") == 8)
        wait_for(lambda: frontend.metric("num_requests_running") == 0)
        assert frontend.metric("request_success_total") == 0, "all was written: the client was not slow enough"
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 20)
        connection.close()
        assert frontend.metric("generation_tokens_total") == 8 * 3000
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    for index in range(8):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == tokenizer.decode(script[:3000])
        assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == 3000


def test_a_client_that_stops_reading_holds_up_nobody(slow: Frontend) -> None:
    idle = send_request(slow, stream=True)
    with slow.client() as client:
        answer = client.chat.completions.create(
            model="tiny-chat", messages=[{"role": "user", "content": "Hi"}], max_tokens=20
        )
    assert answer.choices[0].finish_reason in ("stop", "length")
    idle.close()
    wait_for(lambda: slow.metric("num_requests_running") == 0, 1)
