"""What goes wrong around a running server: clients that leave, too many of them, ranks that die, ports in use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import openai
import pytest

from tests.serve.server import Server

pytestmark = pytest.mark.mpi(2)

LIMIT_SECONDS = 60
"""On a slow and loaded machine; how long it really takes, `python -m tests.slurm.faults` shows."""
LONG = {"model": "demo-model", "prompt": "Count: 1, 2, 3,", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def test_a_client_gone_mid_stream_frees_its_blocks(server: Server) -> None:
    stream = server.client().completions.create(
        model="demo-model", prompt="Count: 1, 2, 3,", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.metric("kv_blocks_used") > 0
    stream.close()
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_blocks_used"):
        server.wait_for(gauge, 0)


def test_500_requests_at_once_are_answered_or_turned_away(server: Server) -> None:
    """8 run and 46 wait on each of two replicas."""

    async def ask_all() -> list[tuple[int, str | None]]:
        limits = httpx2.Limits(max_connections=500)
        async with httpx2.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            body = {"model": "demo-model", "prompt": "Hello", "max_tokens": 2, "temperature": 0}

            async def ask() -> tuple[int, str | None]:
                answer = await client.post("/v1/completions", json=body)
                return answer.status_code, answer.headers.get("retry-after")

            return await asyncio.gather(*(ask() for _ in range(500)))

    answers = asyncio.run(ask_all())
    answered = [retry for status, retry in answers if status == 200]
    refused = [retry for status, retry in answers if status == 429]
    assert len(answered) + len(refused) == 500
    assert len(answered) >= 100
    assert all(retry is not None and int(retry) > 0 for retry in refused)
    server.wait_for("num_requests_running", 0)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"prompt": "word " * 2600}, 400, "context_length_exceeded"),
        ({"max_tokens": 1_000_000}, 400, "context_length_exceeded"),
        ({"max_tokens": 0}, 400, None),
        ({"max_tokens": -1}, 400, None),
        ({"temperature": -1}, 400, None),
        ({"top_p": 0}, 400, None),
        ({"model": "gpt-5"}, 404, "model_not_found"),
        ({"prompt": []}, 400, None),
        ({"stop_token_ids": [1_000_000]}, 400, None),
    ],
)
def test_bad_requests_are_told_why_and_the_server_goes_on(
    server: Server, change: dict[str, object], status: int, code: str | None
) -> None:
    good = {"model": "demo-model", "prompt": "Hi", "max_tokens": 1}
    got, body = server.post("/v1/completions", good | change)
    assert got == status, body
    assert body["error"]["message"]
    if code:
        assert body["error"]["code"] == code
    assert server.post("/v1/completions", good)[0] == 200


def test_bodies_that_are_no_requests(server: Server) -> None:
    for body, status in (
        (b'{"model": "demo-model", "prompt": "Hi", "temperature": NaN}', 400),
        (b'{"model": "demo-model", "prompt": "\xff\xfe"}', 400),
        (b"x" * 10_000_000, 413),
    ):
        assert server.post("/v1/completions", body)[0] == status
    assert server.health() == 200


def test_a_stream_that_runs_when_sigterm_comes_is_finished(demo_model: Path, tmp_path: Path) -> None:
    with Server(demo_model, 2, folder=tmp_path) as server:
        stream = server.client().completions.create(
            model="demo-model", prompt="One", max_tokens=24, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        time.sleep(0.3)
        with pytest.raises(openai.APIStatusError) as refused:
            server.client().completions.create(model="demo-model", prompt="Two", max_tokens=2)
        assert refused.value.status_code == 503
        assert sum(len(chunk.choices) for chunk in chunks) >= 20
        stopping.join(120)
        assert server.process.returncode == 0, server.log.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job(demo_model: Path, tmp_path: Path, rank: int) -> None:
    with Server(demo_model, 2, folder=tmp_path) as server:
        family = server.family()
        os.kill(server.ranks()[rank], signal.SIGKILL)
        begun = time.monotonic()
        assert server.process.wait(LIMIT_SECONDS) != 0
        while any(alive(process) for process in family):
            assert time.monotonic() - begun < LIMIT_SECONDS, server.log.read_text()
            time.sleep(0.05)
        assert f"rank {rank}" in server.log.read_text()


def test_a_killed_frontend_ends_the_job_and_says_so(demo_model: Path, tmp_path: Path) -> None:
    endpoint = tmp_path / "endpoint"
    with Server(demo_model, 1, "--endpoint-file", str(endpoint), folder=tmp_path) as server:
        begun = time.monotonic()
        while not endpoint.exists():
            assert time.monotonic() - begun < LIMIT_SECONDS
            time.sleep(0.05)
        assert endpoint.read_text() == f"{server.url}/v1\n"
        frontend = next(p for p in server.family() if b"rose_dist.frontend" in cmdline(p))
        os.kill(frontend, signal.SIGKILL)
        assert server.process.wait(LIMIT_SECONDS) != 0
        assert not endpoint.exists()
        assert "the frontend process ended by itself with exit code -9" in server.log.read_text()


@pytest.mark.parametrize("launch", [[], ["launch", "-n", "2", "--"]], ids=["one rank", "two ranks"])
def test_a_stop_while_the_model_is_loaded(demo_model: Path, launch: list[str]) -> None:
    """The frontend, which has hardly begun, drains too. A rank alone does not load first."""
    command = [sys.executable, "-m", "rose_dist", *launch, "serve", str(demo_model), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "weights take" in line)
        process.send_signal(signal.SIGTERM)
        if not launch:  # as a shell and a scheduler do; a launcher takes a second signal for impatience
            time.sleep(0.2)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(LIMIT_SECONDS) == 0, rest
    assert "ended by itself" not in rest
    assert "is gone" not in rest
    assert ("load the model: done" in rest) == bool(launch), rest


def test_a_port_in_use_is_named(demo_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(demo_model, 2, "--port", str(port), folder=tmp_path)
        assert server.process.wait(LIMIT_SECONDS) != 0
    log = server.log.read_text()
    assert f"port {port} on 127.0.0.1 is in use" in log
    assert "Traceback" not in log


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def cmdline(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()
