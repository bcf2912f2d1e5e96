"""`--rail-forwarding`, from the command line to the exchange."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rose_dist.cli.engine_options import EngineOptions, engine_options
from rose_dist.cli.engine_start import joined, load_engine
from rose_dist.models.convert.random_weights import PRESETS
from tests.ranks import mpirun


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config.json and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["tiny"])))
    return tmp_path


@pytest.mark.parametrize("given", [(), ("--rail-forwarding",)])
def test_the_exchange_is_built_as_asked(folder: Path, given: tuple[str, ...]) -> None:
    found = []

    @click.command()
    @engine_options
    def build(options: EngineOptions) -> None:
        with joined(options) as (world, groups, config):
            found.append(load_engine(world, groups, config).runner.model.model.exchange.config.rail_forwarding)

    result = CliRunner().invoke(build, [str(folder), "--load-format", "random", "--device", "cpu", *given])
    assert result.exit_code == 0, result.output
    assert found == [bool(given)]


@pytest.mark.mpi(3)
@pytest.mark.parametrize(("force_remote", "served"), [("1", True), ("2", False)])
def test_nodes_must_be_alike(folder: Path, force_remote: str, served: bool) -> None:
    arguments = [str(folder), "--load-format", "random", "--context", "40", "--steps", "1", "--batch", "1"]
    arguments += ["--no-profile", "--results", str(folder), "--device", "cpu", "--force-remote", force_remote]
    command = (sys.executable, "-m", "rose_dist", "bench", "decode", *arguments, "--rail-forwarding")
    ranks = mpirun(3, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = ranks.communicate(timeout=120)
    assert (ranks.returncode == 0) == served, output
    assert ("rail forwarding needs nodes of equally many ranks" in output) != served
