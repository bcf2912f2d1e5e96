"""Two replicas of two real ranks each, under load: a rank is killed, another stopped, and the replicas join again."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.serve.server import START_SECONDS, Server
from tests.serve.test_faults import alive, cmdline

pytestmark = pytest.mark.mpi(2)

CLIENTS = 4
TOKENS = 100
PROMPTS = ["The capital of France is", "One, two, three,", "Once upon a time", "A B C D"]


class Load:
    """Clients that ask without pause, half of them for streams; what is not right is kept."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.right = {prompt: self._ask(prompt, stream=False)[0] for prompt in PROMPTS}
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._stopping = False

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._ask_on, args=(i,), daemon=True) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join(180)
        self.outcomes["hung"] = sum(thread.is_alive() for thread in self._threads)

    def _ask(self, prompt: str, *, stream: bool) -> tuple[str, str]:
        """The text, and what ended it early."""
        options = {
            "model": "scripted-model",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        text = ""
        try:
            completions = self._server.client(timeout=180).completions
            if not stream:
                return completions.create(**options).choices[0].text, ""
            for chunk in completions.create(**options, stream=True):
                text += "".join(choice.text for choice in chunk.choices)
        except openai.APIError as error:
            return text, error.message
        return text, ""

    def _ask_on(self, number: int) -> None:
        chooser = random.Random(number)
        while not self._stopping:
            prompt, stream = chooser.choice(PROMPTS), number % 2 == 0
            text, error = self._ask(prompt, stream=stream)
            self.outcomes["error" if error else "answered"] += 1
            if error and (not stream or "send the request again" not in error):
                self.wrong.append(f"{'stream' if stream else 'whole'}: {error}")
            if text != self.right[prompt] if not error else not self.right[prompt].startswith(text):
                self.wrong.append(f"{prompt!r}: {text!r}")

    def wait_for_answers(self, count: int) -> None:
        wanted, deadline = self.outcomes["answered"] + count, time.monotonic() + 180
        while self.outcomes["answered"] < wanted:
            assert time.monotonic() < deadline, self.outcomes
            time.sleep(0.05)


def ranks(server: Server) -> dict[tuple[int, int], int]:
    """Process ids by (replica, rank)."""
    found = {}
    for process in server.family():
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        rank = next((v.partition(b"=")[2] for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")), None)
        words = cmdline(process).split(b"\0")
        if rank is not None and words[1:4] == [b"-m", b"rose_dist", b"serve"]:
            replica = int(words[words.index(b"--log-dir", words.index(b"--announce")) + 1].rpartition(b"-")[2][:1])
            found[replica, int(rank)] = process
    return found


def wait_for_reason(server: Server, replica: int, reason: str) -> None:
    """The frontend may have noticed earlier that the replica can't be reached."""
    deadline = time.monotonic() + 60
    while (missing := server.status()["missing"]) != [{"replica": replica, "reason": reason}]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.05)


@pytest.fixture
def server(scripted: Path, tmp_path: Path) -> Iterator[Server]:
    options = ("--kv-tokens", "1024", "--log-dir", str(tmp_path / "logs"))
    with Server(scripted, 2, *options, folder=tmp_path, launch=("--replicas", "2")) as server:
        yield server


def test_a_lost_replica_costs_no_answer_and_joins_again(server: Server, tmp_path: Path) -> None:
    server.wait_for_status("ok", START_SECONDS)
    with Load(server) as load:
        for replica, rank, number, reason in (
            (1, 1, signal.SIGKILL, "rank 1, stage 'serve': the process is gone; it was killed, or crashed"),
            (0, 0, signal.SIGSTOP, "rank 0, stage 'serve': stopped for 5 s, as by SIGSTOP"),
        ):
            load.wait_for_answers(CLIENTS)
            os.kill(ranks(server)[replica, rank], number)
            server.wait_for_status("degraded", 60)
            wait_for_reason(server, replica, f"[{rank}@{os.uname().nodename}] {reason}")
            load.wait_for_answers(CLIENTS)
            server.wait_for_status("ok", START_SECONDS)
        load.wait_for_answers(CLIENTS)
    assert not load.wrong, load.wrong
    assert not load.outcomes["hung"], load.outcomes
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "replica-0.0", "replica-0.1", "replica-1.0", "replica-1.1"
    ]  # fmt: skip
    family = server.family()
    assert server.stop() == 0, server.log.read_text()
    assert not any(alive(process) for process in family)
    assert "Traceback" not in server.log.read_text()
