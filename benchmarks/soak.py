"""Random traffic against a running server: short and long requests, shared beginnings, clients that leave.

    python -m benchmarks.soak http://127.0.0.1:8000 [--seconds 60] [--clients 24]

Afterwards every request must have been answered, a sample of the greedy answers must be what the same request gets
alone, and the server's gauges must be back at zero. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

SAMPLE = 20
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
BEGINNINGS = [" ".join(f"word{(i * 7 + j) % 97}" for j in range(60 + 40 * i)) for i in range(6)]


@dataclass
class Tally:
    """Outcomes by kind, and the greedy answers with what asked for them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    greedy: list[tuple[dict[str, Any], str]] = field(default_factory=list)


def request(draw: random.Random, model: str) -> dict[str, Any]:
    prompt = draw.choice(BEGINNINGS) if draw.random() < 0.6 else ""
    prompt += " " + " ".join(str(draw.randrange(1000)) for _ in range(draw.randrange(1, 40)))
    greedy = draw.random() < 0.5
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": draw.choice([1, 4, 16, 48]),
        "ignore_eos": True,
        "temperature": 0 if greedy else 1.0,
        **({} if greedy else {"top_p": 0.9, "seed": draw.randrange(1000)}),
    }


async def ask(client: httpx2.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> tuple[str, str]:
    """The outcome and the text; with `leave_after`, the client is gone after that many events."""
    text, events = "", 0
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return f"status {answer.status_code}", ""
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return "answered", text
            if line.startswith("data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
                events += 1
                if events == leave_after:
                    return "left", text
    return "cut off", text


async def user(client: httpx2.AsyncClient, model: str, seed: int, until: float, tally: Tally) -> None:
    draw = random.Random(seed)
    while time.monotonic() < until:
        body = request(draw, model)
        leave = draw.randrange(1, 4) if draw.random() < 0.15 else None
        outcome, text = await ask(client, body, leave)
        tally.outcomes[outcome] += 1
        if outcome == "answered" and body["temperature"] == 0:
            tally.greedy.append((body, text))


async def gauges(client: httpx2.AsyncClient) -> dict[str, float]:
    page = (await client.get("/metrics")).text
    return {
        name: sum(float(value) for value in re.findall(rf"^rose:{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))
        for name in (*GAUGES, "num_preemptions_total", "prefix_cache_hits_total", "generation_tokens_total")
    }


async def run(url: str, seconds: float, clients: int) -> list[str]:
    """What went wrong."""
    limits = httpx2.Limits(max_connections=clients + 2)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        tally = Tally()
        until = time.monotonic() + seconds
        await asyncio.gather(*(user(client, model, seed, until, tally) for seed in range(clients)))
        problems = [f"{count} × {kind}" for kind, count in tally.outcomes.items() if kind not in ("answered", "left")]
        sample = random.Random(0).sample(tally.greedy, min(SAMPLE, len(tally.greedy)))
        different = [body["prompt"][-40:] for body, text in sample if (await ask(client, body))[1] != text]
        problems += [f"another answer alone: …{prompt}" for prompt in different]
        for _ in range(50):
            now = await gauges(client)
            if not any(now[name] for name in GAUGES):
                break
            await asyncio.sleep(0.1)
        problems += [f"{name} stays at {now[name]:g}" for name in GAUGES if now[name]]
    print(f"{dict(tally.outcomes)}, {len(sample)} greedy answers compared with the same request alone")
    print(", ".join(f"{name} {value:g}" for name, value in now.items()))
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=24)
    arguments = parser.parse_args()
    problems = asyncio.run(run(arguments.url, arguments.seconds, arguments.clients))
    print("\n".join(problems) or "all as it should be")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
