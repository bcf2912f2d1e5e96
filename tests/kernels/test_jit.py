"""The kernel cache: restarts, two processes at once, damage, and what its key depends on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import jit
from rose_dist.kernels.arch import BLACKWELL, HOPPER, arch_of
from rose_dist.kernels.cute.embedding import Embed
from rose_dist.kernels.errors import CompileInCaptureError, UnsupportedArchError
from rose_dist.kernels.row_tiling import RowTiling

KERNEL = Embed(HOPPER, torch.bfloat16, RowTiling(8, 8, 4), 16, 128)
LOAD = """
import logging, torch
logging.basicConfig(level=logging.INFO)
from rose_dist.kernels import jit
from tests.kernels.test_jit import KERNEL
jit.load(KERNEL)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROSE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "_loaded", {})
    return tmp_path


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "ROSE_KERNEL_CACHE": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", LOAD], env=environment, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


def compilations(process: subprocess.Popen[str]) -> int:
    _, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    return log.count("compiled Embed")


def test_another_process_reads_what_one_compiled(cache: Path) -> None:
    assert compilations(start(cache)) == 1
    assert compilations(start(cache)) == 0
    assert len(list(cache.iterdir())) == 1


def test_two_processes_at_once(cache: Path) -> None:
    both = [start(cache) for _ in range(2)]
    assert sum(compilations(p) for p in both) in (1, 2)
    assert [p.suffix for p in cache.iterdir()] == [".o"]
    assert compilations(start(cache)) == 0


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_file_is_replaced(cache: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    jit.load(KERNEL)
    path = jit.cache_path(KERNEL)
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:middle],
        "flip": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "empty": b"",
        "text": b"not an object file" * 10,
    }[damage]
    path.write_bytes(damaged)
    jit._loaded.clear()
    jit.load(KERNEL)
    assert "is damaged" in caplog.text
    assert path.read_bytes() != damaged
    jit._loaded.clear()
    caplog.clear()
    jit.load(KERNEL)
    assert not caplog.text


def test_a_folder_that_cant_be_written_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROSE_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(jit, "_loaded", {})
    jit.load(KERNEL)
    assert "compiling at every start" in caplog.text


def test_memory_serves_the_second_call(cache: Path) -> None:
    first = jit.load(KERNEL)
    jit.cache_path(KERNEL).unlink()
    same = Embed(HOPPER, torch.bfloat16, RowTiling(8, 8, 4), 16, 128)
    assert jit.load(same) is first


def test_key_depends_on_constants_arch_and_source(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {
        jit.cache_path(KERNEL),
        jit.cache_path(Embed(BLACKWELL, torch.bfloat16, RowTiling(8, 8, 4), 16, 128)),
        jit.cache_path(Embed(HOPPER, torch.float16, RowTiling(8, 8, 4), 16, 128)),
        jit.cache_path(Embed(HOPPER, torch.bfloat16, RowTiling(8, 8, 8), 16, 128)),
    }
    monkeypatch.setattr(jit, "_source_digest", lambda folder: "changed")
    paths.add(jit.cache_path(KERNEL))
    monkeypatch.setattr(jit, "_versions", lambda: "newer compiler")
    paths.add(jit.cache_path(KERNEL))
    assert len(paths) == 6


def test_source_digest_follows_the_files(tmp_path: Path) -> None:
    digest = jit._source_digest.__wrapped__
    (tmp_path / "a.py").write_text("x = 1\n")
    before = digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert digest(tmp_path) != before


def test_never_compiles_while_a_graph_is_captured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CompileInCaptureError, match="was not loaded before graph capture: run the step once first"):
        jit.load(KERNEL)
    assert not list(cache.iterdir())


def test_archs() -> None:
    assert arch_of((9, 0)) is HOPPER
    assert arch_of((10, 0)) is BLACKWELL
    with pytest.raises(UnsupportedArchError, match=r"NVIDIA A100 has compute capability 8\.0; kernels exist for 9\.0"):
        arch_of((8, 0), "NVIDIA A100")


@pytest.mark.gpu(1)
def test_loaded_kernels_run_and_capture_refuses_new_ones(cache: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from rose_dist.kernels.embedding import embed_with_angles  # noqa: PLC0415

    ids, table, angles = (torch.arange(4, device="cuda"), *(torch.randn(8, n, device="cuda") for n in (160, 32)))

    def embed() -> torch.Tensor:
        return embed_with_angles(ids, ids, table, angles, angles)[0]

    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CompileInCaptureError), torch.cuda.graph(graph):
        embed()
    torch.cuda.synchronize()
    wanted = embed()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = embed()
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    assert torch.equal(out, table[:4])
