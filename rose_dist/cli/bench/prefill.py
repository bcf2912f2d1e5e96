"""`rose bench prefill`: the time from a prompt to its first token."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import click

from rose_dist.cli.bench.price import gpu_hour_usd, usd_per_mtok
from rose_dist.cli.bench.results import plot, table, write
from rose_dist.cli.engine_options import EngineOptions, engine_options
from rose_dist.cli.offline import new_request, offline_session, raise_if_refused
from rose_dist.engine.offline import OfflineSession
from rose_dist.engine.protocol import SamplingParams

PROFILED = 2
APART_S = 0.02
"""Between profiled prompts, more than the device ever waits within one."""
REST_S = 0.1
"""Before a prompt that finds the device rested."""


@click.command("prefill")
@engine_options
@click.option("--prompt-tokens", "lengths", type=click.IntRange(min=1), multiple=True, default=(128, 1024, 4000))
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="After two that warm up.")
@click.option("--profile/--no-profile", "profiled", default=True, show_default=True, help="Kernel by kernel.")
@gpu_hour_usd
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), help="Folder for table, JSON and plot.")
def command(
    options: EngineOptions, *, lengths: tuple[int, ...], rounds: int, profiled: bool, gpu_hour_usd: float,
    results: Path | None,
) -> None:  # fmt: skip
    """Time single random prompts of MODEL up to their first token; the median of some.

    usd_per_mtok pays for all ranks, though of several replicas one has the prompt.
    Of `ms` prompts come one behind the other, of `ms_rested` 0.1 s apart: under load a GPU's clock falls within a tenth
    of a second.
    device_ms and idle_share are of the time from a prompt's first to its last kernel, profiled.
    """
    with offline_session(options) as session:
        if session is None:
            return
        from rose_dist.cli.bench.expert_spread import touched_share, uniform_share  # noqa: PLC0415  imports torch
        from rose_dist.cli.bench.profile import breakdown  # noqa: PLC0415

        model = session.engine.runner.model
        rows: list[dict[str, Any]] = []
        more = ""
        for length in lengths:
            times = [_run(session, length) for _ in range(rounds + 2)][2:]
            seconds = statistics.median(times)
            row = {
                "prompt_tokens": length,
                "ms": seconds * 1e3,
                "tok_s": length / seconds,
                "usd_per_mtok": usd_per_mtok(length / seconds, session.engine.groups.layout.world, gpu_hour_usd),
                "ms_most": max(times) * 1e3,
                "ms_rested": statistics.median(_run(session, length, REST_S) for _ in range(rounds)) * 1e3,
                "experts_touched": touched_share(session.engine, lambda length=length: _run(session, length)),  # type: ignore[misc]
                "touched_if_uniform": uniform_share(model, length),
            }
            if profiled:
                found = breakdown(lambda length=length: _run(session, length, 1.2 * APART_S), PROFILED, APART_S)  # type: ignore[misc]
                row |= {"device_ms": found.micros / 1e3, "idle_share": found.idle}
                more += f"\n## {length} tokens\n\n```\n{found.text()}\n```\n"
            rows.append(row)
        click.echo(table(rows))
        click.echo(more)
        if results is not None:
            about = {"model": str(options.model), "layout": str(session.engine.groups.layout)}
            write(results, "prefill", about, rows, more)
            plot(results, "prefill", rows, "prompt_tokens", ["ms"])


def _run(session: OfflineSession, length: int, apart_s: float = 0.0) -> float:
    """Seconds until the token is there. Prompts are drawn anew, so that none is found in the prefix cache.

    apart_s: how long to wait before, and before the engine does what it does when it falls idle.
    """
    vocabulary = session.engine.scheduler.vocab_size
    prompt = [random.randrange(vocabulary) for _ in range(length)]
    request = new_request(prompt, SamplingParams(temperature=0), 1, frozenset())
    time.sleep(apart_s)
    begun = time.perf_counter()
    seconds = 0.0
    for output in session.run([request]):
        seconds = time.perf_counter() - begun
        raise_if_refused(output)
        time.sleep(apart_s)
    return seconds
