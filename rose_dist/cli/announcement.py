"""How a replica's rank 0 tells `rose launch`, through its launcher's standard output, that it is ready."""

from __future__ import annotations

import json
import os
import re

_MARK = "rose leaders: "


def announce(leaders: list[str]) -> None:
    """Once the model is loaded. `leaders`: ZMQ addresses, by data-parallel rank."""
    os.write(1, f"{_MARK}{json.dumps(leaders)}\n".encode())


def announced(line: str) -> list[str] | None:
    """The addresses, if `line` is such an announcement; srun may have put a rank's number before it."""
    found = re.fullmatch(rf"(?:\d+: )?{_MARK}(\[.*\])\s*", line)
    return None if found is None else list(json.loads(found[1]))
