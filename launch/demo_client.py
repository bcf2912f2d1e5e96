"""Waits for a rose server, asks it one question through the openai client, and says what its ranks did.

Needs nothing of rose: any OpenAI-compatible client does the same.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import urllib.error
import urllib.request

import openai

QUESTION = "What is the capital of France?"
ANSWER = "Paris"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="the server's address, as http://127.0.0.1:8000")
    parser.add_argument("--server-pid", type=int, help="stop waiting when this process has ended")
    parser.add_argument("--timeout", type=float, default=120, help="seconds to wait for the server")
    arguments = parser.parse_args()

    begun = time.monotonic()
    if not wait_until_healthy(arguments.url, arguments.server_pid, arguments.timeout):
        return 1
    print(f"ready after {time.monotonic() - begun:.1f} s\n\n> {QUESTION}")
    answer = ask(f"{arguments.url}/v1")
    print_metrics(arguments.url)
    if ANSWER not in answer:
        print(f"error: the answer does not contain {ANSWER}", file=sys.stderr)
        return 1
    return 0


def wait_until_healthy(url: str, pid: int | None, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
        if pid is not None and not is_running(pid):
            print("error: the server ended before it was ready", file=sys.stderr)
            return False
    print(f"error: the server was not ready after {timeout:.0f} s", file=sys.stderr)
    return False


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ask(base_url: str) -> str:
    """Print the answer as it arrives, and its speed."""
    client = openai.OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    begun = time.monotonic()
    first = begun
    answer, tokens = "", 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                first = first if answer else time.monotonic()
                answer += choice.delta.content
                print(choice.delta.content, end="", flush=True)
    ended = time.monotonic()
    print(f"\n\nfirst token after {first - begun:.2f} s, {tokens} tokens", end="")
    print(f", {(tokens - 1) / (ended - first):.0f} tokens/s after the first" if tokens > 1 else "")
    return answer


def print_metrics(url: str) -> None:
    """The layout and the rows exchanged between ranks, from the Prometheus page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        page = response.read().decode()
    layout = re.search(r'^rose:engine_info\{.*?layout="(tp(\d+) dp(\d+) [^"]*)"', page, re.MULTILINE)
    rows = [float(value) for value in re.findall(r"^rose:moe_rows_sent_total\{[^}]*\} (\S+)$", page, re.MULTILINE)]
    if layout is not None:
        print(f"ranks: {int(layout[2]) * int(layout[3])}, layout: {layout[1]}")
    print(f"rows sent between ranks: {sum(rows):.0f}")


if __name__ == "__main__":
    sys.exit(main())
