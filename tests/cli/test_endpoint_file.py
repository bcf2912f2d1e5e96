"""Whose the endpoint file is."""

from __future__ import annotations

from pathlib import Path

from rose_dist.cli.endpoint_file import EndpointFile

NOWHERE = "http://127.0.0.1:9"


def test_a_server_that_never_answered_leaves_anothers_file(tmp_path: Path) -> None:
    path = tmp_path / "endpoint"
    path.write_text("http://127.0.0.1:8000/v1\n")
    EndpointFile(path, NOWHERE).remove()
    assert path.exists()


def test_an_own_file_goes_and_a_second_call_finds_none(tmp_path: Path) -> None:
    path = tmp_path / "endpoint"
    path.write_text(f"{NOWHERE}/v1\n")
    file = EndpointFile(path, NOWHERE)
    file.remove()
    file.remove()
    assert not path.exists()
