"""Start, keys, several leaders, drain and death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from rose_dist.frontend.config import FrontendConfig, hash_api_key
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.conftest import REPLY
from tests.frontend.running import Frontend, environment, running, start_frontend, wait_for
from tests.frontend.stub_engine import StubConfig

CHAT: dict[str, Any] = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def script(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(REPLY)


def test_not_healthy_until_every_leader_is_ready(config: FrontendConfig, script: list[int], tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    stubs = [StubConfig(script=script), StubConfig(script=script, loaded_when=str(loaded), dp_rank=1, dp_size=2)]
    with running(config, stubs, wait=False) as frontend:
        wait_for(lambda: frontend.get("/version")[0] == 200)
        status, body = frontend.get("/health")
        assert (status, json.loads(body)) == (503, {"status": "loading"})
        assert frontend.post("/v1/chat/completions", CHAT)[0] == 503
        loaded.touch()
        frontend.wait_until_ready()
        assert frontend.post("/v1/chat/completions", CHAT)[0] == 200


def test_both_leaders_work(config: FrontendConfig, script: list[int]) -> None:
    stubs = [StubConfig(script=script, step_s=0.01, dp_rank=rank, dp_size=2) for rank in range(2)]
    with running(config, stubs) as frontend:
        threads = [threading.Thread(target=frontend.post, args=("/v1/chat/completions", CHAT)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lines = frontend.get("/metrics")[1].decode().splitlines()
        steps = [float(line.split()[-1]) for line in lines if line.startswith("rose:engine_steps_total")]
        assert len(steps) == 2
        assert min(steps) > 0


def test_api_keys(config: FrontendConfig, script: list[int]) -> None:
    keyed = msgspec.structs.replace(config, api_key_hashes=[hash_api_key("one"), hash_api_key("two")])
    with running(keyed, [StubConfig(script=script)]) as frontend:
        for key in ("one", "two"):
            with frontend.client(api_key=key) as client:
                assert [model.id for model in client.models.list()] == ["tiny-chat"]
        with frontend.client(api_key="three") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        status, body, _ = frontend.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert frontend.get("/health")[0] == frontend.get("/metrics")[0] == 200
        command_line = Path(f"/proc/{frontend.process.pid}/cmdline").read_bytes()
        assert b"one" not in command_line.split(b"api_key_hashes")[1].split(b"]")[0]


def test_served_names(config: FrontendConfig, script: list[int]) -> None:
    named = msgspec.structs.replace(config, served_names=["team/model", "alias"])
    with running(named, [StubConfig(script=script)]) as frontend, frontend.client() as client:
        assert [model.id for model in client.models.list()] == ["team/model", "alias"]
        assert client.models.retrieve("team/model").id == "team/model"
        assert frontend.post("/v1/chat/completions", {**CHAT, "model": "alias"})[1]["model"] == "alias"


def stream_in_thread(frontend: Frontend) -> tuple[threading.Thread, list[bytes]]:
    result: list[bytes] = []
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 60, "ignore_eos": True}).encode()
    thread = threading.Thread(target=lambda: result.append(frontend.request("POST", "/v1/chat/completions", body)[1]))
    thread.start()
    wait_for(lambda: frontend.metric("num_requests_running") == 1)
    return thread, result


def test_drain_lets_running_requests_finish(config: FrontendConfig, script: list[int]) -> None:
    with running(config, [StubConfig(script=script, step_s=0.02)]) as frontend:
        thread, result = stream_in_thread(frontend)
        frontend.process.send_signal(signal.SIGTERM)
        wait_for(lambda: frontend.get("/health") == (503, b'{"status":"draining"}'))
        assert frontend.post("/v1/chat/completions", CHAT)[0] == 503
        thread.join(10)
        assert b'"finish_reason":"length"' in result[0]
        assert result[0].endswith(b"data: [DONE]\n\n")
        assert frontend.process.wait(5) == 0
        assert frontend.stubs[0].wait(5) == 0  # it had Shutdown


def test_drain_has_a_time_limit(config: FrontendConfig, script: list[int]) -> None:
    hasty = msgspec.structs.replace(config, drain_timeout_s=0.2)
    with running(hasty, [StubConfig(script=script, step_s=0.1)]) as frontend:
        thread, result = stream_in_thread(frontend)
        started = time.monotonic()
        frontend.process.send_signal(signal.SIGTERM)
        assert frontend.process.wait(5) == 0
        assert time.monotonic() - started < 3
        thread.join(5)
        assert b'"error":{"message":"The server is shutting down"' in result[0]
        assert frontend.stubs[0].wait(5) == 0


def test_idle_server_stops_at_once(config: FrontendConfig, script: list[int]) -> None:
    with running(config, [StubConfig(script=script)]) as frontend:
        frontend.process.send_signal(signal.SIGINT)
        assert frontend.process.wait(3) == 0


def test_a_frontend_dies_with_its_parent(config: FrontendConfig) -> None:
    code = (
        "import sys, time, msgspec; from tests.frontend.running import start_frontend;"
        "from rose_dist.frontend.config import FrontendConfig;"
        "process, port = start_frontend(msgspec.json.decode(sys.argv[1], type=FrontendConfig), ['tcp://127.0.0.1:1']);"
        "print(process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, msgspec.json.encode(config).decode()],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_for(lambda: b"rose_dist.frontend" in Path(f"/proc/{child}/cmdline").read_bytes())
    time.sleep(0.8)  # past the line that binds it to its parent
    assert is_alive(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(child), 2)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_frontend_whose_parent_is_already_gone_ends(config: FrontendConfig, tmp_path: Path) -> None:
    process, _ = start_frontend(config, ["tcp://127.0.0.1:1"])
    process.kill()
    process.wait()
    arguments = [a.decode() for a in msgspec.json.encode(config).splitlines()]
    spec = f'{{"config":{arguments[0]},"leaders":[],"listen_fd":0,"parent_pid":{os.getpid() + 100000}}}'
    ended = subprocess.run(
        [sys.executable, "-m", "rose_dist.frontend", spec],
        env=environment(),
        capture_output=True,
        timeout=10,
        check=False,
    )
    assert ended.returncode != 0
    assert b"is gone" in ended.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/nowhere"}, b"tokenizer.json"),
        ({"chat_format": "smoke-signals"}, b"smoke-signals"),
    ],
)
def test_a_wrong_configuration_is_one_clear_line(
    config: FrontendConfig, change: dict[str, Any], message: bytes, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        process, _ = start_frontend(msgspec.structs.replace(config, **change), ["tcp://127.0.0.1:1"], log=log)
        assert process.wait(10) == 1
    text = (tmp_path / "log").read_bytes()
    assert message in text
    assert b"Traceback" not in text
