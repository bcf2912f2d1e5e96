"""Where benchmark figures go: a table for people, numbers for programs, and a plot where matplotlib is there."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Markdown, a column a key of the first row."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(folder: Path, name: str, about: Mapping[str, Any], rows: Sequence[Row], more: str = "") -> None:
    """`folder`/`name`.json and .md, with the command, the date and what they ran on."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": " ".join(["rose", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "torch": torch.__version__,
        **about,
    }
    (folder / f"{name}.json").write_text(json.dumps(facts | {"figures": list(rows)}, indent=1) + "\n")
    line = ", ".join(f"{key} {_cell(value)}" for key, value in facts.items() if key != "command")
    (folder / f"{name}.md").write_text(f"# {name}\n\n`{facts['command']}`; {line}\n\n{table(rows)}\n{more}")


def plot(folder: Path, name: str, rows: Sequence[Row], x: str, series: Sequence[str]) -> None:
    """`folder`/`name`.png, both axes logarithmic; nothing without matplotlib."""
    try:
        from matplotlib import pyplot  # noqa: PLC0415  no dependency: plots are an extra
    except ImportError:
        return
    figure, axes = pyplot.subplots()
    for key in series:
        axes.plot([row[x] for row in rows], [row[key] for row in rows], marker="o", label=key)
    axes.set(xscale="log", yscale="log", xlabel=x, title=name)
    axes.legend()
    figure.savefig(folder / f"{name}.png", dpi=120)
    pyplot.close(figure)
