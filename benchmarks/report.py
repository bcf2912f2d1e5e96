"""How a benchmark leaves its results: a table for people and the numbers for programs."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def markdown(header: list[str], rows: list[list[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write(machine: str, name: str, title: str, command: str, text: str, figures: Any) -> None:
    """`results/<machine>/<name>.md` and `.json`, with the command, the date and the load of the machine."""
    about = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 1),
    }
    folder = RESULTS / machine
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(about | {"figures": figures}, indent=1) + "\n")
    line = ", ".join(f"{key} {value}" for key, value in about.items() if key != "command")
    (folder / f"{name}.md").write_text(f"# {title}\n\n`{command}`; {line}\n\n{text}\n")
