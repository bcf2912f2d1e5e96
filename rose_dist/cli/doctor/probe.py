"""Reading a machine: files under a root, and what programs say. Nothing here raises for what is absent."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_PATIENCE = 10.0
"""Seconds that a program gets to answer; nvidia-smi is slow where no process holds the GPUs."""


@dataclass(frozen=True)
class Probe:
    """A machine whose files lie under `root`; for any other root than `/`, its programs do too, in usr/bin."""

    root: Path

    def read(self, path: str) -> str:
        """A file's text without outer space; empty if it can't be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def entries(self, path: str) -> list[Path]:
        """A folder's entries in order; none if it is absent."""
        try:
            return sorted((self.root / path).iterdir())
        except OSError:
            return []

    def which(self, program: str) -> str | None:
        """The program's path; one beside this Python comes first, because it belongs to the same environment."""
        if self.root != Path("/"):
            return shutil.which(program, path=str(self.root / "usr/bin"))
        beside = Path(sys.executable).with_name(program)
        return str(beside) if beside.exists() else shutil.which(program)

    def run(self, program: str, *arguments: str) -> str | None:
        """What the program prints; None if it is absent, fails or does not answer in time."""
        path = self.which(program)
        if path is None:
            return None
        try:
            result = subprocess.run(
                [path, *arguments], capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout if result.returncode == 0 else None
