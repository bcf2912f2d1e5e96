"""`rose bench decode`: the engine's decode steps, against what the memory allows."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rose_dist.cli.bench.price import gpu_hour_usd, usd_per_mtok
from rose_dist.cli.bench.results import plot, table, write
from rose_dist.cli.engine_options import EngineOptions, engine_options
from rose_dist.cli.engine_start import joined, load_engine

if TYPE_CHECKING:
    from rose_dist.engine.engine import Engine

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128)
WARM_UP = 8
PROFILED = 8


@click.command("decode")
@engine_options
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    help="Requests of each replica. Default: 1, 2, 4 … 128, up to --max-running.",
)
@click.option("--context", type=click.IntRange(min=2), default=1024, show_default=True, help="Tokens before the first.")
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Timed steps a batch size.")
@click.option("--profile/--no-profile", "profiled", default=True, show_default=True, help="Kernel by kernel.")
@gpu_hour_usd
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), help="Folder for table, JSON and plot.")
def command(
    options: EngineOptions, *, batches: tuple[int, ...], context: int, steps: int, profiled: bool, gpu_hour_usd: float,
    results: Path | None,
) -> None:  # fmt: skip
    """Time decode steps of MODEL with requests whose context is random keys and values: no prefill is needed.

    ms_step, tokens a second and the share of the floor go by the median step; mean and longest stand beside it.
    Best with --load-format random. The floor is the time in which the bytes that a step must read on rank 0 are copied.
    Of several ranks each does all that is below, so that no replica of a data-parallel layout is idle.
    """
    started = time.perf_counter()
    with joined(options, logging.WARNING) as (world, groups, config):
        engine = load_engine(world, groups, config)
        from rose_dist.cli.bench.floor import copy_rate  # noqa: PLC0415  imports torch

        batches = batches or tuple(size for size in SWEEP if size <= config.max_running)
        if max(batches) > config.max_running:
            raise click.ClickException(f"batch {max(batches)} needs --max-running of at least as many")
        rate = copy_rate(config.device)
        about = {
            "model": str(options.model),
            "layout": str(groups.layout),
            "context": context,
            "start_to_ready_s": time.perf_counter() - started,
            "copy_rate_tb_s": rate / 1e12,
            "weights_gb": sum(parameter.nbytes for parameter in engine.runner.model.parameters()) / 1e9,
            "kv_tokens": engine.scheduler.kv.capacity,
        }
        say = click.echo if world.rank == 0 else _say_nothing
        say(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                      for key, value in about.items()))  # fmt: skip
        _fill_cache(engine)
        rows, texts = [], []
        for batch in batches:
            row, text = _measure(engine, batch, context, steps, profiled, rate, gpu_hour_usd)
            rows.append(row)
            texts.append(text)
            say(table([row]).splitlines()[2] if len(rows) > 1 else table([row]))
        more = "".join(f"\n## Batch {batch}\n\n```\n{text}\n```\n" for batch, text in zip(batches, texts, strict=True))
        if profiled:
            say(more)
        if results is not None and world.rank == 0:
            write(results, "decode", about, rows, more if profiled else "")
            plot(results, "decode", rows, "batch", ["ms_step", "floor_ms"])


def _say_nothing(text: str) -> None:
    """What other ranks than the first have found is what the first says."""


def _fill_cache(engine: Engine) -> None:
    import torch  # noqa: PLC0415

    with torch.inference_mode():
        for storage in engine.runner.storages:
            storage.keys.normal_()
            storage.values.normal_()


def _measure(
    engine: Engine, batch: int, context: int, steps: int, profiled: bool, copy_rate: float, gpu_hour_usd: float
) -> tuple[dict[str, Any], str]:
    from rose_dist.cli.bench.expert_spread import touched_share, uniform_share  # noqa: PLC0415  imports torch
    from rose_dist.cli.bench.floor import floor_bytes, synchronize  # noqa: PLC0415
    from rose_dist.cli.bench.profile import breakdown  # noqa: PLC0415

    device, model, idle, text = engine.config.device, engine.runner.model, 0.0, ""
    with _running(engine, batch, context, WARM_UP + steps + PROFILED + 5):
        for _ in range(WARM_UP):
            engine.step()
        gc.collect()  # the profile before leaves so much that collecting it in a timed step took 100 ms
        synchronize(device)
        ends = [time.perf_counter()]
        for _ in range(steps):
            engine.step()  # returns when the tokens of the step before are there
            ends.append(time.perf_counter())
        synchronize(device)
        times = [end - start for start, end in pairwise(ends)]
        seconds = statistics.median(times)
        touched = touched_share(engine, engine.step)
        if profiled:
            found = breakdown(engine.step, PROFILED)
            idle, text = found.idle, found.text()
    floor = floor_bytes(model, batch, context, touched) / copy_rate
    layout = engine.groups.layout
    tokens_per_s = batch * layout.dp / seconds
    row = {
        "batch": batch,
        "ms_step": seconds * 1e3,
        "ms_mean": statistics.mean(times) * 1e3,
        "ms_most": max(times) * 1e3,
        "tok_s": tokens_per_s,
        "usd_per_mtok": usd_per_mtok(tokens_per_s, layout.world, gpu_hour_usd),
        "floor_ms": floor * 1e3,
        "share_of_floor": floor / seconds,
        "experts_touched": touched,
        "touched_if_uniform": uniform_share(model, batch),
    }
    return row | ({"idle_share": idle} if profiled else {}), text


@contextmanager
def _running(engine: Engine, batch: int, context: int, tokens: int) -> Iterator[None]:
    """So many requests of each replica that decode, as if their prompts had been computed. Collective, as steps are."""
    from rose_dist.engine.engine import Outcome  # noqa: PLC0415
    from rose_dist.engine.protocol import Generate, SamplingParams  # noqa: PLC0415

    scheduler, first = engine.scheduler, engine.groups.place.dp_rank * batch
    numbers = range(first, first + batch) if engine.leader else ()
    for number in numbers:
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
    for number in numbers:
        scheduler.cancel(b"bench", f"{number}")
    while engine.step()[0] is Outcome.WORKED:
        pass
