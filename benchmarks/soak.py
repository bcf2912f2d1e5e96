"""Random traffic against a running server: short and long requests, shared beginnings, clients that leave.

    python -m benchmarks.soak http://127.0.0.1:8000 [--seconds 60] [--clients 24] [--server PID] [--tie NATS]

Afterwards every request must have been answered, a sample of the greedy answers must be what the same request gets
alone, the server's gauges must be back at zero and, with `--server`, the memory of that process, its descendants and
their GPU must have stayed what it was. Exit code 1 if not.

In bf16 a token's logits depend on the batch in their last bits. `--tie`: an answer may part from the one alone where
its token is at most so many nats less likely there than the likeliest; what follows is another text and not compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai

SAMPLE = 20
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
COUNTERS = ("num_preemptions_total", "prefix_cache_hits_total", "generation_tokens_total")
BEGINNINGS = [" ".join(f"word{(i * 7 + j) % 97}" for j in range(60 + 40 * i)) for i in range(6)]
MAY_GROW = 64e6
"""Bytes, and 2 %, by which the memory of the last quarter may exceed that of the second."""


@dataclass
class Tally:
    """Outcomes by kind, and the greedy answers with what asked for them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    greedy: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)


@dataclass
class Answer:
    """Tokens and, of each, the likeliest at its place; only where log probabilities were asked for."""

    outcome: str = "cut off"
    tokens: list[str] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)


def request(draw: random.Random, model: str) -> dict[str, Any]:
    prompt = draw.choice(BEGINNINGS) if draw.random() < 0.6 else ""
    prompt += " " + " ".join(str(draw.randrange(1000)) for _ in range(draw.randrange(1, 40)))
    shape = {
        "model": model,
        "prompt": prompt,
        "max_tokens": draw.choice([1, 4, 16, 48]),
        "extra_body": {"ignore_eos": True},
    }
    if draw.random() < 0.5:
        return shape | {"temperature": 0, "logprobs": 1}
    return shape | {"temperature": 1.0, "top_p": 0.9, "seed": draw.randrange(1000)}


async def ask(client: openai.AsyncOpenAI, body: dict[str, Any], leave_after: int | None = None) -> Answer:
    """With `leave_after`, the client is gone after that many events."""
    answer, events = Answer(), 0
    try:
        async with await client.completions.create(**body, stream=True) as stream:
            async for event in stream:
                choice = event.choices[0]
                if choice.logprobs is not None:
                    answer.tokens += choice.logprobs.tokens or []
                    answer.top += choice.logprobs.top_logprobs or []
                if choice.finish_reason is not None:
                    answer.outcome = "answered"
                events += 1
                if events == leave_after and choice.finish_reason is None:
                    answer.outcome = "left"
                    break
    except openai.APIStatusError as error:
        answer.outcome = f"status {error.status_code}"
    except openai.APIConnectionError as error:
        answer.outcome = f"connection: {error}"
    return answer


async def user(client: openai.AsyncOpenAI, model: str, seed: int, until: float, tally: Tally) -> None:
    draw = random.Random(seed)
    while time.monotonic() < until:
        body = request(draw, model)
        leave = draw.randrange(1, 4) if draw.random() < 0.15 else None
        answer = await ask(client, body, leave)
        tally.outcomes[answer.outcome] += 1
        if answer.outcome == "answered" and "logprobs" in body:
            tally.greedy.append((body, answer.tokens))


def parting(tokens: list[str], alone: Answer) -> float | None:
    """Nats between the likeliest token and the one taken in traffic where an answer first parts from the one alone;
    None if it does not.
    """
    for token, likeliest, top in zip(tokens, alone.tokens, alone.top, strict=True):
        if token != likeliest:
            return max(top.values()) - top.get(token, float("-inf"))
    return None


async def gauges(metrics: httpx2.AsyncClient) -> dict[str, float]:
    page = (await metrics.get("/metrics")).text
    return {
        name: sum(float(value) for value in re.findall(rf"^rose:{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))
        for name in (*GAUGES, *COUNTERS)
    }


def host_bytes(process: int) -> int:
    """Resident memory of a process and its descendants; 0 if it is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    return (int(resident.group(1)) << 10 if resident else 0) + sum(host_bytes(int(child)) for child in children)


async def gpu_bytes() -> int | None:
    """Taken of the GPUs that CUDA_VISIBLE_DEVICES names, or of all; None without any."""
    chosen = [f"--id={seen}"] if (seen := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    try:
        tool = await asyncio.create_subprocess_exec(
            "nvidia-smi",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
            *chosen,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return None
    said, _ = await tool.communicate()
    return sum(int(line) << 20 for line in said.split()) if tool.returncode == 0 else None


async def watch(process: int, samples: dict[str, list[int]]) -> None:
    while True:
        samples["host"].append(host_bytes(process))
        taken = await gpu_bytes()
        if taken is not None:
            samples["GPU"].append(taken)
        await asyncio.sleep(0.5)


def growth(samples: dict[str, list[int]]) -> tuple[str, list[str]]:
    """What the memory was, and what grew."""
    texts, problems = [], []
    for kind, values in samples.items():
        if quarter := len(values) // 4:
            before, after = (statistics.median(values[part * quarter :][:quarter]) for part in (1, 3))
            texts.append(f"{kind} memory {before / 1e6:.0f} MB in the second quarter, {after / 1e6:.0f} MB in the last")
            if after > 1.02 * before + MAY_GROW:
                problems.append(f"the server's {kind} memory grew")
    return "; ".join(texts), problems


async def run(arguments: argparse.Namespace) -> list[str]:
    """What went wrong."""
    clients, url = arguments.clients, arguments.url
    limits = httpx2.Limits(max_connections=clients + 2)
    async with (
        httpx2.AsyncClient(base_url=url, timeout=120) as metrics,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120,
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
        ) as client,
    ):  # fmt: skip
        model = (await client.models.list()).data[0].id
        tally, samples = Tally(), dict[str, list[int]](host=[], GPU=[])
        watching = asyncio.create_task(watch(arguments.server, samples)) if arguments.server else None
        until = time.monotonic() + arguments.seconds
        await asyncio.gather(*(user(client, model, seed, until, tally) for seed in range(clients)))
        if watching is not None:
            watching.cancel()
        problems = [f"{count} × {kind}" for kind, count in tally.outcomes.items() if kind not in ("answered", "left")]
        sample = random.Random(0).sample(tally.greedy, min(SAMPLE, len(tally.greedy)))
        gaps = [parting(tokens, await ask(client, body | {"logprobs": 5})) for body, tokens in sample]
        parted = [gap for gap in gaps if gap is not None]
        if wrong := [gap for gap in parted if gap > arguments.tie]:
            problems.append(
                f"{len(wrong)} of {len(sample)} greedy answers are others alone, by up to {max(wrong):g} nats"
            )
        for _ in range(50):
            now = await gauges(metrics)
            if not any(now[name] for name in GAUGES):
                break
            await asyncio.sleep(0.1)
        problems += [f"{name} stays at {now[name]:g}" for name in GAUGES if now[name]]
    memory, grown = growth(samples)
    print(
        f"{dict(tally.outcomes)}; of {len(sample)} greedy answers {len(parted)} part from the same request alone,",
        end=" ",
    )
    print(f"by at most {max(parted, default=0):.3g} nats")
    print(", ".join(f"{name} {value:g}" for name, value in now.items()), memory, sep="\n")
    return problems + grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--server", type=int, metavar="PID", help="watch the memory of this process and its GPU")
    parser.add_argument("--tie", type=float, default=0.0, metavar="NATS", help="what counts as a tie")
    problems = asyncio.run(run(parser.parse_args()))
    print("\n".join(problems) or "all as it should be")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
