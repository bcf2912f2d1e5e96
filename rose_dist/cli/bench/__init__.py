"""`rose bench`: how fast the engine is."""

from __future__ import annotations

import click

from rose_dist.cli.bench.decode import command as decode
from rose_dist.cli.bench.offline import command as offline
from rose_dist.cli.bench.prefill import command as prefill
from rose_dist.cli.bench.serve import command as serve


@click.group("bench")
def command() -> None:
    """Measure the engine's steps, whole requests, or a server."""


for subcommand in (decode, offline, prefill, serve):
    command.add_command(subcommand)
