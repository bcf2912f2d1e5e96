"""A real server on real ranks, for tests: `rose launch`, mpirun, the engine and the HTTP frontend."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import openai

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 300


class Server:
    """`rose launch -n RANKS -- serve MODEL …` until the block is left."""

    def __init__(self, model: Path, ranks: int, *options: str, folder: Path, launch: Sequence[str] = ()) -> None:
        """`options` are those of `serve`, `launch` those of `rose launch`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        command = [sys.executable, "-m", "rose_dist", "launch", "-n", str(ranks), *launch]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--", "serve", str(model), "--port", str(self.port), *options],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while self.health() != 200:
            assert self.process.poll() is None, f"the server ended\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"the server is not ready\n{self.log.read_text()}"
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            assert self.stop() == 0, self.log.read_text()

    def stop(self) -> int:
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def health(self) -> int | None:
        """Status of /health, or None while nothing listens."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def status(self) -> Any:
        """What /health says."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
            return json.load(answer)

    def wait_for_status(self, status: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (now := self.status())["status"] != status:
            assert time.monotonic() < deadline, f"{now}\n{self.log.read_text()}"
            time.sleep(0.1)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def metric(self, name: str) -> float:
        """Summed over leaders."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            page = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^rose:{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))

    def wait_above(self, name: str, value: float, seconds: float = 60) -> None:
        """What engines tell of their experts comes some time after the answers."""
        deadline = time.monotonic() + seconds
        while self.metric(name) <= value:
            assert time.monotonic() < deadline, f"rose:{name} is {self.metric(name)}, not above {value}"
            time.sleep(0.1)

    def wait_for(self, name: str, value: float, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"rose:{name} is {self.metric(name)}, not {value}"
            time.sleep(0.05)

    def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def ranks(self) -> dict[int, int]:
        """Process id of each rank."""
        found = {}
        for process in self.family():
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            rank = next((v.partition(b"=")[2] for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")), None)
            if rank is not None and b"-m\0rose_dist\0serve" in Path(f"/proc/{process}/cmdline").read_bytes():
                found[int(rank)] = process
        return found

    def shared_memory(self) -> set[Path]:
        """Files in /dev/shm that the ranks have mapped."""
        maps = "".join(Path(f"/proc/{process}/maps").read_text() for process in self.ranks().values())
        return {Path(path) for path in re.findall(r"/dev/shm/\S+", maps)}

    def family(self) -> list[int]:
        """This server's processes, down to the last grandchild."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found, queue = [], [self.process.pid]
        while queue:
            found.append(process := queue.pop())
            queue += children.get(process, [])
        return found
