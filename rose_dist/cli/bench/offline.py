"""`rose bench offline`: whole requests on this layout, without a server."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click

from rose_dist.cli.engine_options import EngineOptions, engine_options
from rose_dist.cli.offline import new_request, offline_session, raise_if_refused
from rose_dist.engine.offline import OfflineSession
from rose_dist.engine.protocol import SamplingParams


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds.

    first_token_ms: from the call to the last request's first token.
    step_ms: between the tokens of a request, after that, if all requests run at once.
    output_tokens_per_s: of whole requests, prefill and all: what a server can reach at most.
    expert_balance: of all tokens since start, under the present placement: mean over busiest rank's load.
    """

    batch: int
    first_token_ms: float
    prefill_tokens_per_s: float
    step_ms: float
    decode_tokens_per_s: float
    output_tokens_per_s: float
    expert_balance: float


@click.command("offline")
@engine_options
@click.option("--batch", "batches", type=click.IntRange(min=1), multiple=True, default=(1, 8), show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--output-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="After one that warms up.")
@click.option("--rebalance", is_flag=True, help="Rearrange the experts after each batch size's first round.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON a batch size.")
def command(
    options: EngineOptions,
    *,
    batches: tuple[int, ...],
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    rebalance: bool,
    as_json: bool,
) -> None:
    """Measure prefill and decode of MODEL with random prompts, requests all on rank 0's replica."""
    with offline_session(options) as session:
        if session is None:
            return
        if not as_json:
            engine = session.engine
            click.echo(f"{engine.groups.layout}, {engine.config.dtype}, {prompt_tokens} tokens in, {output_tokens} out")
            click.echo("batch  first token ms  prefill tok/s  step ms  decode tok/s  whole tok/s  expert balance")
        for batch in batches:
            figures = _measure(session, batch, prompt_tokens, output_tokens, rounds, rebalance)
            click.echo(json.dumps(asdict(figures)) if as_json else _line(figures))


def _line(figures: Figures) -> str:
    return (
        f"{figures.batch:5}  {figures.first_token_ms:14.1f}  {figures.prefill_tokens_per_s:13.0f}  "
        f"{figures.step_ms:7.2f}  {figures.decode_tokens_per_s:12.1f}  "
        f"{figures.output_tokens_per_s:11.1f}  {figures.expert_balance:14.2f}"
    )


def _measure(
    session: OfflineSession, batch: int, prompt_tokens: int, output_tokens: int, rounds: int, rebalance: bool
) -> Figures:
    vocabulary = session.engine.scheduler.vocab_size
    runs = []
    for seed in range(rounds + 1):
        draw = random.Random(seed)
        prompts = [[draw.randrange(vocabulary) for _ in range(prompt_tokens)] for _ in range(batch)]
        runs.append(_run(session, prompts, output_tokens))
        session.engine.rebalance_wanted = rebalance and seed == 0
    first = statistics.median(first for first, _ in runs[1:])
    step = statistics.median((whole - first) / (output_tokens - 1) for first, whole in runs[1:])
    whole = statistics.median(batch * output_tokens / whole for _, whole in runs[1:])
    balance = session.engine.scheduler.stats.expert_balance
    return Figures(batch, first * 1e3, batch * prompt_tokens / first, step * 1e3, batch / step, whole, balance)


def _run(session: OfflineSession, prompts: Sequence[list[int]], count: int) -> tuple[float, float]:
    """Seconds until every request has its first token, and until all have their last."""
    requests = [new_request(prompt, SamplingParams(temperature=0), count, frozenset()) for prompt in prompts]
    begun = time.perf_counter()
    waiting = {request.request_id for request in requests}
    first = 0.0
    for output in session.run(requests):
        raise_if_refused(output)
        if waiting:
            waiting.discard(output.request_id)
            first = time.perf_counter() - begun
    return first, time.perf_counter() - begun
