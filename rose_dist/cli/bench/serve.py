"""`rose bench serve`: clients at a running server."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click

from rose_dist.cli.bench.results import table, write


@dataclass(frozen=True)
class Answer:
    first_s: float
    whole_s: float
    tokens: int


@click.command("serve")
@click.argument("url")
@click.option("--model", required=True, help="Its name in requests.")
@click.option("--clients", type=click.IntRange(min=1), default=64, show_default=True, help="Each asks one at a time.")
@click.option("--requests", type=click.IntRange(min=1), default=4, show_default=True, help="Of each client.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--output-tokens", type=click.IntRange(min=2), default=256, show_default=True)
@click.option("--vocabulary", type=click.IntRange(min=2), default=199998, show_default=True, help="Ids are below.")
@click.option("--seed", default=0, show_default=True, help="Other prompts, which no prefix cache knows.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), help="Folder for table and JSON.")
def command(
    url: str, *, model: str, clients: int, requests: int, prompt_tokens: int, output_tokens: int, vocabulary: int,
    seed: int, results: Path | None,
) -> None:  # fmt: skip
    """Stream completions of random prompts from the server at URL, e.g. http://127.0.0.1:8000."""
    address = _address(url)
    answers: list[Answer] = []
    failures: list[Exception] = []

    def client(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        try:
            for _ in range(requests):
                prompt = [draw.randrange(vocabulary) for _ in range(prompt_tokens)]
                answers.append(_ask(address, model, prompt, output_tokens))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    if failures:
        raise click.ClickException(f"{url}: {len(failures)} of {clients} clients failed, the first with: {failures[0]}")
    row = {
        "clients": clients,
        "requests": len(answers),
        "tok_s": sum(answer.tokens for answer in answers) / seconds,
        "first_token_ms_median": statistics.median(answer.first_s for answer in answers) * 1e3,
        "first_token_ms_most": max(answer.first_s for answer in answers) * 1e3,
        "between_tokens_ms_median": statistics.median(
            (answer.whole_s - answer.first_s) / max(1, answer.tokens - 1) for answer in answers
        ) * 1e3,
    }  # fmt: skip
    click.echo(table([row]))
    if results is not None:
        write(results, "serve", {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}, [row])


def _address(url: str) -> tuple[str, int]:
    try:
        place = urlsplit(url)
        port = place.port or 80
    except ValueError:
        place, port = urlsplit(""), 0
    if place.scheme != "http" or not place.hostname or place.path.strip("/"):
        raise click.BadParameter(f"{url!r} is not of the form http://HOST:PORT", param_hint="URL")
    return place.hostname, port


def _ask(address: tuple[str, int], model: str, prompt: list[int], count: int) -> Answer:
    connection = http.client.HTTPConnection(*address, timeout=600)
    body = {
        "model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise click.ClickException(f"status {response.status}, {response.read(500).decode(errors='replace')}")
    first, tokens = 0.0, 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise click.ClickException(f"a stream ended with {event['error']}")
        if event.get("choices") and not first:
            first = time.perf_counter() - begun
        if usage := event.get("usage"):
            tokens = usage["completion_tokens"]
    connection.close()
    return Answer(first, time.perf_counter() - begun, tokens)
