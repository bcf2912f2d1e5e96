"""Starts real processes: stub leaders and a frontend before them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openai

from rose_dist.frontend.config import FrontendConfig, LaunchSpec
from rose_dist.frontend.sockets import listening_sockets
from tests.frontend.stub_engine import StubConfig

STUB = Path(__file__).with_name("stub_engine.py")
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Frontend:
    processes: list[subprocess.Popen[bytes]]
    stubs: list[subprocess.Popen[str]]
    port: int

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.processes[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **settings})

    def get(self, path: str) -> tuple[int, bytes]:
        return self.request("GET", path)[:2]

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(self.url + path, body, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read(), {k.lower(): v for k, v in answer.headers.items()}
        except urllib.error.HTTPError as error:
            return error.code, error.read(), {k.lower(): v for k, v in error.headers.items()}

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer, answer_headers = self.request("POST", path, data, headers)
        return status, json.loads(answer), answer_headers

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over its labels."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == f"rose:{name}"
        )

    def wait_until_ready(self, seconds: float = 60) -> None:
        wait_for(lambda: self.get("/health")[0] == 200, seconds)


def wait_for(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def start_stub(config: StubConfig) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, str(STUB), msgspec.json.encode(config).decode()],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def start_frontend(
    config: FrontendConfig, leaders: list[str], *, log: Any = None
) -> tuple[subprocess.Popen[bytes], int]:
    (process,), port = start_frontends(config, leaders, count=1, log=log)
    return process, port


def start_frontends(
    config: FrontendConfig,
    leaders: list[str],
    *,
    count: int,
    log: Any = None,
    shared: Path | None = None,
    replicas: int = 0,
) -> tuple[list[subprocess.Popen[bytes]], int]:
    processes = []
    listeners = listening_sockets("127.0.0.1", 0, count)
    port = listeners[0].getsockname()[1]
    for listener in listeners:
        spec = LaunchSpec(
            config=config,
            leaders=leaders,
            replicas=replicas,
            listen_fd=listener.fileno(),
            parent_pid=os.getpid(),
            shared=str(shared) if shared else None,
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "rose_dist.frontend", msgspec.json.encode(spec).decode()],
                pass_fds=[listener.fileno()],
                env=environment(),
                stdin=subprocess.PIPE if replicas else None,
                stderr=log,
            )
        )
        listener.close()
    return processes, port


@contextlib.contextmanager
def running(
    config: FrontendConfig, stubs: Sequence[StubConfig], *, log: Any = None, wait: bool = True, count: int = 1
) -> Iterator[Frontend]:
    started = [start_stub(stub) for stub in stubs]
    leaders = [address for _, address in started]
    with tempfile.TemporaryDirectory() as directory:
        shared = Path(directory) if count > 1 else None
        processes, port = start_frontends(config, leaders, count=count, log=log, shared=shared)
        frontend = Frontend(processes, [stub for stub, _ in started], port)
        try:
            if wait:
                frontend.wait_until_ready()
            yield frontend
        finally:
            for child in [*processes, *frontend.stubs]:
                child.kill()
                child.wait()
