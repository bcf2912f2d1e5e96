"""Things that must be the same on every rank, compared when the ranks join."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import rose_dist
from rose_dist.errors import RoseError

_SHOWN = 4
"""Ranks, and fields, that a message names."""


class AgreementError(RoseError):
    """Ranks of one job were started with different code or settings."""


def code_version() -> dict[str, str]:
    """What runs on this rank: rose's version and a hash of its source, Python's and torch's version."""
    digest = hashlib.sha256()
    package = Path(rose_dist.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "rose": f"{rose_dist.__version__}+{digest.hexdigest()[:12]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def check_agreement(fields: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """
    Args:
        fields: by rank, each rank's values by name.
        hosts: by rank.

    Raises:
        AgreementError: a value differs between ranks; says which, and who has what.
    """
    names = dict.fromkeys(name for values in fields for name in values)
    differences = [
        text for name in names if (text := _difference(name, [values.get(name, "-") for values in fields], hosts))
    ]
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise AgreementError(f"ranks differ in {'; in '.join(differences[:_SHOWN])}{more}: start all of them alike")


def _difference(name: str, values: Sequence[str], hosts: Sequence[str]) -> str:
    """The few ranks that have another value come first; empty if all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    *few, (common, _) = sorted(ranks.items(), key=lambda item: (len(item[1]), -item[1][0]))
    told = [f"{value} on {_name(having, hosts)}" for value, having in few]
    return f"{name}: {', '.join(told[:_SHOWN])}, but {common} on the others"


def _name(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    shown = [f"rank {rank} ({hosts[rank]})" for rank in ranks[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
