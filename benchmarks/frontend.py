"""What the frontend costs: 64-token streams from a stub engine, the frontend process pinned to one core.

`python -m benchmarks.frontend` needs `wrk` (Debian: apt-get install wrk). The stub engine, wrk and the probe share the
other cores. Requests are chat completions, streamed, one token a step.
Lengths are spread evenly over 32 to 96 tokens, 64 in the mean: with equal lengths all streams of a closed loop soon
begin and end together, and the first chunk would tell of that burst alone.

- step: the stub's pause between two steps; without one it steps as fast as it can, and the frontend is saturated.
- requests/s: wrk, closed loop, by number of connections.
- CPU: the frontend process's own time, from /proc; independent of what else the machine does.
- first chunk: a probe that is one of the connections, from sending a request to the first event with text.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.checkpoint import build_checkpoint
from tests.frontend.running import Frontend, running
from tests.frontend.stub_engine import StubConfig

SHORTEST, LONGEST = 32, 96
WORDS = "The capital of France is Paris and the capital of Italy is Rome, please answer in one sentence. " * 10
WRK_SCRIPT = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
local requests = {}
init = function(args)
  for n = {shortest}, {longest} do
    local body = string.gsub([[{body}]], '"max_tokens": %d+', '"max_tokens": ' .. n)
    requests[#requests + 1] = wrk.format(nil, nil, nil, body)
  end
end
request = function() return requests[math.random(#requests)] end
"""


@dataclass
class Row:
    step_ms: float
    connections: int
    requests_per_s: float
    tokens_per_s: float
    cpu_us_per_request: float
    cpu_us_per_token: float
    requests_per_cpu_s: float
    """What one core would serve if it had nothing else to do."""
    first_chunk_p50_ms: float
    first_chunk_p99_ms: float
    chunks_per_stream: float
    """Events with text; fewer than the tokens where several were ready at once."""
    errors: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}core", help="directory of the results")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32, 100])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0, 10])
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    with tempfile.TemporaryDirectory() as directory:
        rows = [
            row
            for step_ms in arguments.step_ms
            for row in measure(Path(directory), step_ms, arguments.connections, arguments.seconds)
        ]
    text = table(rows)
    print(text)
    write(Path("benchmarks/results") / arguments.machine, rows, text)


def measure(directory: Path, step_ms: float, connections: list[int], seconds: float) -> list[Row]:
    checkpoint = build_checkpoint(directory / "tiny-chat")
    tokenizer = Tokenizer(checkpoint)
    stub = StubConfig(script=tokenizer.encode(WORDS)[:LONGEST], step_s=step_ms / 1000)
    cores = sorted(os.sched_getaffinity(0))
    with (
        (directory / "log").open("wb") as log,
        running(FrontendConfig(model=str(checkpoint)), [stub], log=log) as frontend,
    ):
        pin(frontend, cores)
        body = json.dumps(
            {
                "model": "tiny-chat",
                "stream": True,
                "max_tokens": (SHORTEST + LONGEST) // 2,
                "ignore_eos": True,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
            }
        )
        script = WRK_SCRIPT.replace("{body}", body).replace("{shortest}", str(SHORTEST))
        (directory / "post.lua").write_text(script.replace("{longest}", str(LONGEST)))
        run_wrk(frontend, directory, 8, 1)  # warm-up
        return [one(frontend, directory, body, step_ms, count, seconds) for count in connections]


def pin(frontend: Frontend, cores: list[int]) -> None:
    """The frontend alone on the first core, everything else on the others."""
    others = set(cores[1:]) or set(cores)
    os.sched_setaffinity(frontend.process.pid, {cores[0]})
    for stub in frontend.stubs:
        os.sched_setaffinity(stub.pid, others)
    os.sched_setaffinity(0, others)


def one(frontend: Frontend, directory: Path, body: str, step_ms: float, connections: int, seconds: float) -> Row:
    probe = Probe(frontend.port, body)
    probe.start()
    cpu, started, before = cpu_seconds(frontend), time.monotonic(), served(frontend)
    errors = run_wrk(frontend, directory, connections - 1, seconds) if connections > 1 else wait(seconds)
    elapsed, cpu = time.monotonic() - started, cpu_seconds(frontend) - cpu
    requests, tokens = (after - earlier for after, earlier in zip(served(frontend), before, strict=True))
    probe.stop()
    return Row(
        step_ms=step_ms,
        connections=connections,
        requests_per_s=requests / elapsed,
        tokens_per_s=tokens / elapsed,
        cpu_us_per_request=cpu / requests * 1e6,
        cpu_us_per_token=cpu / tokens * 1e6,
        requests_per_cpu_s=requests / cpu,
        first_chunk_p50_ms=statistics.median(probe.first_chunk_s) * 1e3,
        first_chunk_p99_ms=statistics.quantiles(probe.first_chunk_s, n=100)[98] * 1e3,
        chunks_per_stream=statistics.mean(probe.chunks),
        errors=errors,
    )


def wait(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def run_wrk(frontend: Frontend, directory: Path, connections: int, seconds: float) -> int:
    """Returns: responses that were errors."""
    output = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "-s", str(directory / "post.lua"),
         f"{frontend.url}/v1/chat/completions"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    failed = re.findall(r"(?:connect|read|write|timeout|responses:) (\d+)", output)
    return sum(map(int, failed))


def cpu_seconds(frontend: Frontend) -> float:
    fields = Path(f"/proc/{frontend.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def served(frontend: Frontend) -> tuple[float, float]:
    """(requests, tokens) since the start."""
    return frontend.metric("request_success_total"), frontend.metric("generation_tokens_total")


class Probe(threading.Thread):
    """One request after another on one connection."""

    def __init__(self, port: int, body: str) -> None:
        super().__init__(daemon=True)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self._request = (head + body).encode()
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._stopped = False
        self.first_chunk_s: list[float] = []
        self.chunks: list[int] = []

    def run(self) -> None:
        while not self._stopped:
            started = time.perf_counter()
            self._connection.sendall(self._request)
            received, first = b"", 0.0
            while not received.endswith(b"0\r\n\r\n"):
                received += self._connection.recv(1 << 20)
                if not first and b'"content":' in received:
                    first = time.perf_counter() - started
            self.first_chunk_s.append(first)
            self.chunks.append(received.count(b'"delta":{"content":"'))

    def stop(self) -> None:
        self._stopped = True
        self.join()
        self._connection.close()


def table(rows: list[Row]) -> str:
    lines = [
        "| step ms | connections | requests/s | tokens/s | CPU us/request | CPU us/token | requests per CPU second "
        "| first chunk p50 ms | p99 ms | chunks/stream | errors |",
        "| --- " * 11 + "|",
    ]
    lines += [
        f"| {r.step_ms:g} | {r.connections} | {r.requests_per_s:.0f} | {r.tokens_per_s:.0f} "
        f"| {r.cpu_us_per_request:.0f} | {r.cpu_us_per_token:.1f} | {r.requests_per_cpu_s:.0f} "
        f"| {r.first_chunk_p50_ms:.2f} | {r.first_chunk_p99_ms:.2f} | {r.chunks_per_stream:.1f} | {r.errors} |"
        for r in rows
    ]
    return "\n".join(lines)


def write(directory: Path, rows: list[Row], text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    about = {
        "command": "python -m benchmarks.frontend",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "tokens_per_stream": [SHORTEST, LONGEST],
        "rows": [asdict(row) for row in rows],
    }
    (directory / "frontend.json").write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    heading = (
        "# Frontend: 64-token chat streams from a stub engine\n\n"
        f"`{about['command']}`, Python {about['python']}, {about['cores']} cores, the frontend on one of them; "
        f"load average {about['load_average_1min']:.1f} (other work ran on the machine if it is above 2).\n\n"
    )
    (directory / "frontend.md").write_text(heading + text + "\n")


if __name__ == "__main__":
    main()
