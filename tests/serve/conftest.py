from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_dist.models.convert.smollm2 import write_smollm2
from tests.serve.scripted_model import scripted_model
from tests.serve.server import REPOSITORY, Server


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2 as a GPT-OSS mixture of experts; the one that `make demo` builds, or builds."""
    folder = REPOSITORY / ".cache" / "demo-model"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        write_smollm2(folder)
    return folder


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two data-parallel ranks that share the experts; little room, so that limits can be reached."""
    options = ("--kv-tokens", "3000", "--max-running", "8", "--max-waiting", "46", "--max-context", "2500")
    with Server(demo_model, 2, *options, folder=tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def scripted() -> Path:
    """A model that knows `script.py` by heart; made in half a minute the first time."""
    return scripted_model(REPOSITORY / ".cache" / "scripted-model")
