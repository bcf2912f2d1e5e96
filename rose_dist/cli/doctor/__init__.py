"""`rose doctor`: what this machine has, what that allows, and how to get what is missing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from rose_dist.cli.doctor.abilities import Ability, abilities_of
from rose_dist.cli.doctor.machine import Machine, inspect_machine
from rose_dist.cli.doctor.report import Line, lines_of

_WIDTH = 21


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
def command(*, as_json: bool) -> None:
    """Say what this machine has, what that allows, and how to get what is missing.

    It reads files and asks programs for their version; it starts nothing and changes nothing.
    """
    machine = inspect_machine(Path("/"))
    abilities = abilities_of(machine)
    if as_json:
        click.echo(json.dumps(as_object(machine, abilities), indent=2))
    else:
        click.echo(render(lines_of(machine), abilities))


def as_object(machine: Machine, abilities: list[Ability]) -> dict[str, object]:
    return {
        "machine": dataclasses.asdict(machine),
        "lines": [dataclasses.asdict(line) for line in lines_of(machine)],
        "abilities": [dataclasses.asdict(ability) for ability in abilities],
    }


def render(lines: list[Line], abilities: list[Ability]) -> str:
    """Two lists: what there is, with `!` before what could be better, and what can be run."""
    text = ["This machine has"]
    for line in lines:
        text.append(f"  {'!' if line.fix else ' '} {line.topic:<{_WIDTH}} {line.text}")
        text += [f"    {'':<{_WIDTH}} fix: {line.fix}"] if line.fix else []
    text += ["", "It can run"]
    for ability in abilities:
        text.append(f"  {'yes' if ability.possible else 'no ':<3} {ability.name:<{_WIDTH - 2}} {ability.reason}")
        text += [f"      {'':<{_WIDTH - 2}} fix: {ability.fix}"] if ability.fix else []
    return "\n".join(text)
