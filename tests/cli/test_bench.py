"""The arithmetic behind `rose bench`, and one run of it."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from rose_dist.cli.bench import command
from rose_dist.cli.bench.floor import floor_bytes
from rose_dist.cli.bench.profile import busy_and_gaps
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.convert.random_weights import PRESETS
from rose_dist.models.loader import random_model
from tests.ranks import mpirun


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config.json and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["tiny"])))
    return tmp_path


@pytest.mark.parametrize(
    ("spans", "busy", "idle"),
    [
        ([], 0, 0),
        ([(0, 5), (5, 9)], 9, 0),
        ([(0, 4), (6, 10)], 8, 2),
        ([(0, 8), (1, 2), (6, 9), (9, 10)], 10, 0),
        ([(5, 6), (0, 4), (26, 30)], 9, 1),
    ],
)
def test_gaps_count_once_and_not_between_calls(spans: list[tuple[float, float]], busy: float, idle: float) -> None:
    found, gaps = busy_and_gaps([(start, end, "") for start, end in spans], apart=20)
    assert (found, sum(gaps.values())) == (busy, idle)


def test_gaps_are_named_by_what_ends_and_what_begins() -> None:
    spans = [(0.0, 9.0, "long"), (1.0, 2.0, "inside"), (10.0, 11.0, "next"), (14.0, 15.0, "long"), (16.0, 17.0, "next")]
    assert list(busy_and_gaps(spans)[1].items()) == [(("next", "long"), 3.0), (("long", "next"), 2.0)]


def test_the_floor_counts_touched_experts_once(folder: Path) -> None:
    model = random_model(folder, BuildOptions(World.join().groups(Layout.of(1)), 16))
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    rest = sum(p.nbytes for p in model.parameters()) - experts - model.lm_head.weight.nbytes
    row = 64 * 4
    cache = 2 * 4 * 32 * 4 * 2  # keys and values of 4 heads of 32 in fp32, 2 layers of a kind
    for batch, share in ((1, 0.5), (2, 0.75)):
        expected = experts * share + rest + batch * row + batch * cache * (100 + 16)
        assert floor_bytes(model, batch, 100, share) == pytest.approx(expected)


def test_serve_tells_of_a_stream_that_ends_with_an_error() -> None:
    class Failing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"error": {"message": "The engine has failed"}}\n\ndata: [DONE]\n\n')

    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = CliRunner().invoke(command, ["serve", url, "--model", "m", "--clients", "2"])
        server.shutdown()
    assert found.exit_code == 1
    assert f"{url}: 2 of 2 clients failed, the first with: a stream ended with " in found.output
    assert "The engine has failed" in found.output


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "https://host", "http://host:8000/v1", "http://", "http://host:x", "http://[::1"]
)
def test_serve_wants_a_servers_url(url: str) -> None:
    found = CliRunner().invoke(command, ["serve", url, "--model", "m"])
    assert found.exit_code == 2
    assert "is not of the form http://HOST:PORT" in found.output


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_decode_runs_without_a_prefill_and_leaves_its_figures(folder: Path, kind: str) -> None:
    arguments = [str(folder), "--load-format", "random", "--batch", "2", "--context", "40", "--steps", "3"]
    arguments += ["--moe-weights", kind]
    found = CliRunner().invoke(command, ["decode", *arguments, "--no-profile", "--results", str(folder / "out")])
    assert found.exit_code == 0, found.output
    figures = json.loads((folder / "out" / "decode.json").read_text())
    (row,) = figures["figures"]
    assert row["batch"] == 2
    assert row["tok_s"] == pytest.approx(2e3 / row["ms_step"])
    assert row["usd_per_mtok"] == pytest.approx(3 / (row["tok_s"] * 3600) * 1e6)
    assert 0 < row["experts_touched"] <= 1
    assert figures["context"] == 40


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("layout", "replicas"), [("--dp 2 --ep 2", 2), ("--tp 2 --ep 1", 1)])
def test_decode_keeps_every_replica_at_work(folder: Path, layout: str, replicas: int) -> None:
    arguments = [str(folder), "--load-format", "random", "--context", "40", "--steps", "3", *layout.split()]
    arguments += ["--batch", "2", "--batch", "1", "--no-profile", "--results", str(folder / "out"), "--device", "cpu"]
    ranks = mpirun(2, sys.executable, "-m", "rose_dist", "bench", "decode", *arguments)
    assert ranks.wait(timeout=120) == 0
    for row, batch in zip(json.loads((folder / "out" / "decode.json").read_text())["figures"], (2, 1), strict=True):
        assert row["tok_s"] == pytest.approx(replicas * batch * 1e3 / row["ms_step"])
        assert row["usd_per_mtok"] * row["tok_s"] == pytest.approx(2 * 3 / 3600 * 1e6)
        if (replicas, batch) == (2, 1):
            assert row["experts_touched"] > 0.5  # 4 of 8 are one token's


def test_prefill_with_fp8_experts(folder: Path) -> None:
    arguments = [str(folder), "--load-format", "random", "--prompt-tokens", "9", "--rounds", "1", "--no-profile"]
    found = CliRunner().invoke(command, ["prefill", *arguments, "--moe-weights", "fp8", "--gpu-hour-usd", "7.2"])
    assert found.exit_code == 0, found.output
    names, _, cells = (line.strip("| ").split(" | ") for line in found.output.splitlines() if line.startswith("|"))
    row = dict(zip(names, map(float, cells), strict=True))
    assert row["usd_per_mtok"] == pytest.approx(7.2 / row["tok_s"] / 3600 * 1e6, rel=0.01)
