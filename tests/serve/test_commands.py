"""The commands that need no server, as a person runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.server import REPOSITORY


def rose(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rose_dist", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=300, cwd=REPOSITORY, check=False
    )


def test_generate_continues_prompts_in_their_order(demo_model: Path) -> None:
    model = str(demo_model)
    prompts = ["One, two, three,", "The capital of France is Paris. The capital of Italy is"]
    both = rose("generate", model, *prompts, "--max-tokens", "4")
    assert both.returncode == 0, both.stderr
    alone = [rose("generate", model, "--max-tokens", "4", stdin=prompt).stdout for prompt in prompts]
    assert both.stdout == "".join(alone)
    assert "four" in alone[0]
    assert alone[1].strip()


@pytest.mark.mpi(2)
def test_generate_on_two_ranks_gives_the_same_text(demo_model: Path) -> None:
    arguments = ["generate", str(demo_model), "One, two, three,", "--max-tokens", "6"]
    two = rose("launch", "-n", "2", "--", *arguments, "--tp", "2")
    assert two.returncode == 0, two.stderr
    assert two.stdout == rose(*arguments).stdout


def test_chat_remembers_what_was_said(demo_model: Path) -> None:
    talk = rose("chat", str(demo_model), "--max-tokens", "24", stdin="What is the capital of France?\nAnd of Italy?\n")
    assert talk.returncode == 0, talk.stderr
    assert "Paris" in talk.stdout
    assert "Rome" in talk.stdout


def test_bench_prints_a_line_of_json_a_batch(demo_model: Path) -> None:
    arguments = ["--batch", "1", "--batch", "2", "--prompt-tokens", "8", "--output-tokens", "3", "--rounds", "1"]
    bench = rose("bench", "offline", str(demo_model), *arguments, "--json")
    lines = [json.loads(line) for line in bench.stdout.splitlines()]
    assert [line["batch"] for line in lines] == [1, 2]
    assert all(value > 0 for line in lines for value in line.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nowhere", "Hi"], "nowhere is not a folder"),
        (["serve", "MODEL", "--tp", "2"], "tp 2 does not divide 1 rank. More ranks are started by `rose launch"),
        (
            ["serve", "MODEL", "--max-running", "600"],
            "--max-running 600: so many requests need --max-step-tokens of at least as many",
        ),
        (["generate", "MODEL", "Hi", "--top-p", "0"], "--top-p"),
        (["bench", "offline", "MODEL", "--dtype", "float8"], "--dtype"),
    ],
)
def test_mistakes_are_one_line(demo_model: Path, arguments: list[str], message: str) -> None:
    told = rose(*(str(demo_model) if argument == "MODEL" else argument for argument in arguments))
    assert told.returncode != 0
    (line,) = [line for line in told.stderr.splitlines() if "INFO" not in line]
    assert line.startswith("error: ")
    assert message in line
