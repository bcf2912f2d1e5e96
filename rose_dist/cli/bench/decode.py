"""`rose bench decode`: the engine's decode steps, against what the memory allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rose_dist.cli.bench.results import plot, table, write
from rose_dist.cli.engine_options import EngineOptions, engine_options
from rose_dist.cli.offline import offline_session

if TYPE_CHECKING:
    from rose_dist.engine.engine import Engine

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128)
WARM_UP = 8
PROFILED = 8


@click.command("decode")
@engine_options
@click.option(
    "--batch", "batches", type=click.IntRange(min=1), multiple=True, help="Default: 1, 2, 4 … 128, up to --max-running."
)
@click.option("--context", type=click.IntRange(min=2), default=1024, show_default=True, help="Tokens before the first.")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Timed steps a batch size.")
@click.option("--profile/--no-profile", "profiled", default=True, show_default=True, help="Kernel by kernel.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), help="Folder for table, JSON and plot.")
def command(
    options: EngineOptions, *, batches: tuple[int, ...], context: int, steps: int, profiled: bool, results: Path | None
) -> None:
    """Time decode steps of MODEL with requests whose context is random keys and values: no prefill is needed.

    Best with --load-format random. The floor is the time in which the bytes that a step must read are copied.
    """
    started = time.perf_counter()
    with offline_session(options) as session:
        if session is None:
            return
        engine = session.engine
        from rose_dist.cli.bench.floor import copy_rate  # noqa: PLC0415  imports torch

        batches = batches or tuple(size for size in SWEEP if size <= engine.config.max_running)
        if max(batches) > engine.config.max_running:
            raise click.ClickException(f"batch {max(batches)} needs --max-running of at least as many")
        rate = copy_rate(engine.config.device)
        about = {
            "model": str(options.model),
            "layout": str(engine.groups.layout),
            "context": context,
            "start_to_ready_s": time.perf_counter() - started,
            "copy_rate_tb_s": rate / 1e12,
            "weights_gb": sum(parameter.nbytes for parameter in engine.runner.model.parameters()) / 1e9,
            "kv_tokens": engine.scheduler.kv.capacity,
        }
        click.echo(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                             for key, value in about.items()))  # fmt: skip
        _fill_cache(engine)
        session.bell.ring()
        rows, texts = [], []
        for batch in batches:
            row, text = _measure(engine, batch, context, steps, profiled, rate)
            rows.append(row)
            texts.append(text)
            click.echo(table([row]).splitlines()[2] if len(rows) > 1 else table([row]))
        more = "".join(f"\n## Batch {batch}\n\n```\n{text}\n```\n" for batch, text in zip(batches, texts, strict=True))
        if profiled:
            click.echo(more)
        if results is not None:
            write(results, "decode", about, rows, more if profiled else "")
            plot(results, "decode", rows, "batch", ["ms_step", "floor_ms"])
        engine.step()


def _fill_cache(engine: Engine) -> None:
    import torch  # noqa: PLC0415

    with torch.inference_mode():
        for storage in engine.runner.storages:
            storage.keys.normal_()
            storage.values.normal_()


def _measure(
    engine: Engine, batch: int, context: int, steps: int, profiled: bool, copy_rate: float
) -> tuple[dict[str, Any], str]:
    from rose_dist.cli.bench.expert_spread import touched_share, uniform_share  # noqa: PLC0415  imports torch
    from rose_dist.cli.bench.floor import floor_bytes, synchronize  # noqa: PLC0415
    from rose_dist.cli.bench.profile import breakdown  # noqa: PLC0415

    device, model, idle, text = engine.config.device, engine.runner.model, 0.0, ""
    with _running(engine, batch, context, WARM_UP + steps + PROFILED + 5):
        for _ in range(WARM_UP):
            engine.step()
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(steps):
            engine.step()
        synchronize(device)
        seconds = (time.perf_counter() - begun) / steps
        touched = touched_share(model, engine.step)
        if profiled:
            found = breakdown(engine.step, PROFILED)
            idle, text = found.idle, found.text()
    floor = floor_bytes(model, batch, context, touched) / copy_rate
    row = {
        "batch": batch,
        "ms_step": seconds * 1e3,
        "tok_s": batch / seconds,
        "floor_ms": floor * 1e3,
        "share_of_floor": floor / seconds,
        "experts_touched": touched,
        "touched_if_uniform": uniform_share(model, batch),
    }
    return row | ({"idle_share": idle} if profiled else {}), text


@contextmanager
def _running(engine: Engine, batch: int, context: int, tokens: int) -> Iterator[None]:
    """So many requests that decode, as if their prompts had been computed."""
    from rose_dist.engine.protocol import Generate, SamplingParams  # noqa: PLC0415

    scheduler = engine.scheduler
    for number in range(batch):
        # Different prompts and tokens drawn at random, or else the rows would come to take the same experts: greedy
        # decoding of random weights brings all requests to the same few tokens.
        prompt = [(7919 * (number + 1) + 31 * i) % scheduler.vocab_size for i in range(context)]
        scheduler.adopt(
            b"bench",
            Generate(
                request_id=f"{number}",
                prompt=prompt,
                sampling=SamplingParams(temperature=1, seed=number),
                max_tokens=tokens,
            ),
        )
    yield
    for number in range(batch):
        scheduler.cancel(b"bench", f"{number}")
    while engine.has_work:
        engine.step()
