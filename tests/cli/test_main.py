"""The `rose` command's frame: what it loads, and how it speaks to a user who errs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rose_dist.cli.main import COMMANDS, main

HEAVY = ("torch", "numpy", "mpi4py", "transformers", "starlette", "tokenizers", "safetensors")

PROBE = f"""
import sys
from rose_dist.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("loaded:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


@dataclass(frozen=True)
class Ended:
    """How a run of `rose` ended."""

    code: object
    stdout: str
    stderr: str


@pytest.fixture
def rose(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`rose` in this process: the same as a run of its own, less the two seconds of importing torch."""

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return Ended(ended.value.code, *capsys.readouterr())

    return run


Rose = Callable[..., Ended]


@pytest.mark.parametrize("arguments", [("--help",), ("launch", "--help"), ("convert", "--help"), ("nonsense",)])
def test_light_commands_load_no_heavy_library(arguments: tuple[str, ...]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stderr.rstrip().endswith("loaded:")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(rose: Rose, name: str) -> None:
    result = rose(name, "--help")
    assert result.code == 0, result.stderr
    assert result.stdout.startswith(f"Usage: rose {name}")


def test_help_lists_every_command(rose: Rose) -> None:
    result = rose("--help")
    assert result.code == 0
    for name, text in COMMANDS.items():
        assert f"{name} " in result.stdout
        assert text in result.stdout


def error_of(result: Ended) -> str:
    """The one line that a user sees."""
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "No such command 'nonsense'; see `rose --help`"),
        (("--nonsense",), "No such option '--nonsense'"),
        (("convert", "random"), "Missing argument 'TARGET'"),
        (("convert", "random", "x", "--weights", "fp8"), "'fp8' is not one of 'mxfp4', 'bf16'"),
        (("convert", "random", "x", "--shard-size", "-1GB"), "bytes above 0"),
        (("convert", "random", "x", "--shard-size", "big"), "KB, MB, GB"),
        (("convert", "random", "x", "--seed", "-1"), "x>=0"),
        (("convert", "random", "x", "--set", "hidden=64"), "hidden_size"),
        (("convert", "random", "x", "--set", "hidden_size=wide"), "not a JSON value"),
        (("convert", "layout", "x"), "Missing argument 'TARGET'"),
        (("convert", "smollm2", "x", "--gguf", "none.gguf"), "does not exist"),
        (("serve", ".", "--chat-template", "none.jinja"), "there is no file 'none.jinja' on this host"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(rose: Rose, arguments: tuple[str, ...], message: str) -> None:
    result = rose(*arguments)
    assert message in error_of(result)
    assert result.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("layout", "none", "out"), "none is not a folder"),
        (("layout", "empty", "out"), "empty has no config.json"),
        (("layout", "broken", "out"), "is not JSON"),
        (("random", "out", "--config", "30b"), "give tiny, 20b, 120b, a config.json"),
        (("random", "empty/x", "--set", "hidden_size=40"), "multiples of 32"),
        (("random", "broken"), "broken exists"),
        (("random", "out", "--layout", "openai", "--weights", "bf16"), "MXFP4 only"),
        (("smollm2", "out", "--slices", "5"), "needs one of 1, 2, 3, 4, 6"),
        (("smollm2", "out", "--copies", "3"), "1 or 2"),
        (("smollm2", "out", "--gguf", "broken/config.json"), "GGUF"),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(
    rose: Rose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    result = rose("convert", *arguments)
    assert message in error_of(result)
    assert result.code == 1
    assert not (tmp_path / "out").exists()


def test_a_full_conversion_through_the_command_line(rose: Rose, tmp_path: Path) -> None:
    first = rose("convert", "random", str(tmp_path / "a"), "--set", "num_hidden_layers=1", "--shard-size", "50KB")
    assert first.code == 0, first.stderr
    second = rose("convert", "layout", str(tmp_path / "a"), str(tmp_path / "b"), "--layout", "openai")
    assert second.code == 0, second.stderr
    assert (tmp_path / "a/model.safetensors.index.json").exists()
    assert (tmp_path / "b/model.safetensors").exists()
    again = rose("convert", "random", str(tmp_path / "c"), "--config", str(tmp_path / "b/config.json"))
    assert again.code == 0, again.stderr


def test_python_m_rose_dist_is_the_same_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rose_dist", "nonsense"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert result.stderr == "error: No such command 'nonsense'; see `rose --help`\n"


def test_output_that_nobody_reads_is_no_error() -> None:
    result = subprocess.run(
        f"{sys.executable} -m rose_dist --help | true", shell=True, capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
