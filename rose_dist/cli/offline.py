"""Generation without a server, for `rose generate` and `rose chat`: rank 0 asks, the other ranks take part."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import click
import zmq

from rose_dist.cli.engine_options import Command, EngineOptions
from rose_dist.cli.engine_start import joined, load_engine
from rose_dist.comm.addresses import reachable_address
from rose_dist.engine.doorbell import Doorbell
from rose_dist.engine.loop import serve
from rose_dist.engine.offline import OfflineSession
from rose_dist.engine.protocol import Generate, Output, SamplingParams

_SAMPLING = (
    click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=click.IntRange(min=0), default=0, help="0 keeps all."),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True),
    click.option("--seed", type=click.IntRange(min=0), help="Same seed, same text."),
)


def sampling_options(function: Command) -> Command:
    """Give a command `--temperature` and the like, as its argument `sampling`."""

    @wraps(function)
    def wrapped(*positional: Any, temperature: float, top_k: int, top_p: float, seed: int | None, **rest: Any) -> Any:
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        return function(*positional, sampling=sampling, **rest)

    decorated: Callable[..., Any] = wrapped
    for option in reversed(_SAMPLING):
        decorated = option(decorated)
    return decorated  # type: ignore[return-value]


@contextmanager
def offline_session(options: EngineOptions) -> Iterator[OfflineSession | None]:
    """On rank 0 a session to generate with; on other ranks None, after they have served it to its end."""
    with joined(options, logging.WARNING) as (world, groups, config):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        bell = Doorbell(context, reachable_address(world.hosts), groups.lockstep)
        engine = load_engine(world, groups, config)
        if world.rank == 0:
            with OfflineSession(engine, bell) as session:
                yield session
        else:
            serve(engine, bell, None, lambda: None)
            yield None
        context.destroy(linger=0)


def new_request(
    prompt: list[int], sampling: SamplingParams, max_tokens: int | None, stop_ids: frozenset[int]
) -> Generate:
    return Generate(
        request_id=secrets.token_hex(8),
        prompt=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        stop_ids=sorted(stop_ids),
    )


def raise_if_refused(output: Output) -> None:
    if output.finish in ("error", "overloaded"):
        raise click.ClickException(output.error or "too many prompts at once; raise --max-waiting")
