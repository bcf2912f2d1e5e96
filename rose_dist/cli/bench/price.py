"""What tokens cost."""

from __future__ import annotations

import click

gpu_hour_usd = click.option(
    "--gpu-hour-usd",
    type=click.FloatRange(min=0),
    default=3.0,
    show_default=True,
    help="Dollars for an hour of one rank's GPU, from which usd_per_mtok follows.",
)


def usd_per_mtok(tokens_per_s: float, ranks: int, gpu_hour_usd: float) -> float:
    """Dollars for a million tokens, where all ranks of the job together take in or give out `tokens_per_s`."""
    return ranks * gpu_hour_usd / 3600 / tokens_per_s * 1e6
